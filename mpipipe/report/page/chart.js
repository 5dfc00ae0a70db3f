// Lines over steps, with the values under the pointer.

/** series: [{ name, x, y, colour }]; a y of null is a gap. unit: function from a value to its text. */
function chart(canvas, series, { unit = number, zero = false, height = 220 } = {}) {
  const xs = series.flatMap((s) => s.x), ys = series.flatMap((s) => s.y).filter((y) => y !== null);
  if (!ys.length) return;
  const low = ys.reduce((a, b) => Math.min(a, b)), high = ys.reduce((a, b) => Math.max(a, b));
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const range = {
    x0: xs.reduce((a, b) => Math.min(a, b)), x1: xs.reduce((a, b) => Math.max(a, b)),
    y0: zero ? 0 : low - room, y1: high + room,
  };
  let pointed = null, width = 1;
  const LEFT = 66, BOTTOM = 24;
  const toX = (x) => LEFT + ((x - range.x0) / (range.x1 - range.x0 || 1)) * (width - LEFT - 8);
  const toY = (y) => 6 + (1 - (y - range.y0) / (range.y1 - range.y0)) * (height - BOTTOM - 6);

  function axes(ctx) {
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    for (const mark of ticks(range.y0, range.y1, height / 50)) {
      ctx.fillStyle = colour("line");
      ctx.fillRect(LEFT, toY(mark), width - LEFT, 1);
      ctx.fillStyle = colour("faint");
      ctx.fillText(unit(+mark.toPrecision(12)), LEFT - 8, toY(mark));
    }
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    for (const mark of ticks(range.x0, range.x1, (width - LEFT) / 90).filter(Number.isInteger)) {
      if (toX(mark) < width - 14) ctx.fillText(`${mark}`, toX(mark), height - BOTTOM + 8);
    }
  }

  function line(ctx, s) {
    ctx.strokeStyle = ctx.fillStyle = s.colour();
    ctx.lineWidth = 1.8;
    ctx.lineJoin = "round";
    ctx.beginPath();
    let open = false;
    s.x.forEach((x, i) => {
      if (s.y[i] === null) { open = false; return; }
      if (open) ctx.lineTo(toX(x), toY(s.y[i]));
      else ctx.moveTo(toX(x), toY(s.y[i]));
      open = true;
    });
    ctx.stroke();
    if (s.x.length <= 40) s.x.forEach((x, i) => { if (s.y[i] !== null) dot(ctx, x, s.y[i]); });
  }

  function dot(ctx, x, y) {
    ctx.beginPath();
    ctx.arc(toX(x), toY(y), 3, 0, 7);
    ctx.fill();
  }

  const draw = () => {
    const fitted = fit(canvas, height), ctx = fitted.ctx;
    width = fitted.width;
    axes(ctx);
    series.forEach((s) => line(ctx, s));
    if (pointed === null) return;
    ctx.fillStyle = colour("faint");
    ctx.fillRect(toX(pointed), 6, 1, height - BOTTOM - 6);
    for (const { s, i } of under(pointed)) { ctx.fillStyle = s.colour(); dot(ctx, s.x[i], s.y[i]); }
  };

  /** Of each series the newest point that is not beyond x. */
  function under(x) {
    return series.flatMap((s) => {
      let i = s.x.length - 1;
      while (i >= 0 && (s.x[i] > x || s.y[i] === null)) i--;
      return i < 0 ? [] : [{ s, i }];
    });
  }

  function point(x, left, top) {
    const all = series[0].x;
    pointed = all.reduce((best, v) => (Math.abs(v - x) < Math.abs(best - x) ? v : best), all[0]);
    const told = under(pointed).map(({ s, i }) => `${s.name} ${unit(s.y[i])}${s.x[i] === pointed ? "" : ` (step ${s.x[i]})`}`);
    const shown = told.length > 10 ? [...told.slice(0, 10), `and ${told.length - 10} more`] : told;
    say(`step ${pointed}\n${shown.join("\n")}`, left, top);
    draw();
  }

  canvas.addEventListener("pointermove", (event) => {
    const share = (event.offsetX - LEFT) / (width - LEFT - 8);
    point(range.x0 + share * (range.x1 - range.x0), event.clientX, event.clientY);
  });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const all = series[0].x, now = pointed === null ? -1 : all.indexOf(pointed);
    const next = all[Math.max(0, Math.min(all.length - 1, now + move))], box = canvas.getBoundingClientRect();
    point(next, box.left + toX(next), box.top + height / 2);
  });
  for (const name of ["pointerleave", "blur"]) {
    canvas.addEventListener(name, () => { pointed = null; say(null); draw(); });
  }
  drawings.push(draw);
}
