// Memory of each rank over the step, under the same view as the timelines.

/** Points (time, bytes) of a staircase: predicted bytes hold from the start of an instruction, measured ones from its end. */
function stairs(t) {
  return t.ranks.map((rank) => ({ at: t.name === "measured" ? rank.end : rank.start, held: rank.held, n: rank.n }));
}

function drawMemory(canvas) {
  const all = timelines.map((t) => ({ name: t.name, ranks: stairs(t) }));
  const n = timelines[0].ranks.length, row = n <= 8 ? 74 : n <= 24 ? 40 : 24;
  const highest = (t) => t.ranks.map((r) => r.held.reduce((a, b) => Math.max(a, b), 0));
  const peaks = highest(all.at(-1)), most = Math.max(1, ...all.flatMap(highest));
  let width = 1;
  const toX = (time) => LEFT + ((time - view.from) / (view.to - view.from)) * (width - LEFT);

  function line(ctx, steps, base, close) {
    const toY = (held) => base - (held / most) * row * 0.85;
    ctx.beginPath();
    let i = 0;
    while (i + 1 < steps.n && steps.at[i + 1] <= view.from) i++;
    ctx.moveTo(LEFT, toY(steps.held[i]));
    for (; i < steps.n && steps.at[i] < view.to; i++) {
      const x = Math.max(LEFT, toX(steps.at[i]));
      ctx.lineTo(x, toY(i ? steps.held[i - 1] : steps.held[0]));
      ctx.lineTo(x, toY(steps.held[i]));
    }
    ctx.lineTo(width, toY(steps.held[Math.max(0, i - 1)]));
    if (close) { ctx.lineTo(width, base); ctx.lineTo(LEFT, base); }
  }

  const draw = () => {
    const { ctx, width: w } = fit(canvas, n * row + 6);
    width = w;
    for (let r = 0; r < n; r++) {
      const base = (r + 1) * row;
      ctx.fillStyle = colour("faint");
      ctx.textAlign = "left";
      ctx.textBaseline = "top";
      ctx.fillText(`rank ${r}`, 0, base - Math.min(row, 62));
      if (row > 24) ctx.fillText(`${(peaks[r] / MIB).toFixed(0)} MiB`, 0, base - Math.min(row, 62) + 15);
      ctx.fillRect(LEFT, base, width - LEFT, 0.5);
      for (const t of all) {
        const measured = t.name === "measured";
        line(ctx, t.ranks[r], base, measured);
        ctx.globalAlpha = 0.25;
        ctx.fillStyle = colour("measured");
        if (measured) ctx.fill();
        ctx.globalAlpha = 1;
        line(ctx, t.ranks[r], base, false);
        ctx.setLineDash(measured ? [] : [5, 3]);
        ctx.strokeStyle = colour(t.name);
        ctx.lineWidth = 1.6;
        ctx.stroke();
      }
      ctx.setLineDash([]);
    }
  };
  draw.moves = true;
  drawings.push(draw);

  canvas.addEventListener("pointermove", (event) => {
    const time = view.from + ((event.offsetX - LEFT) / (width - LEFT)) * (view.to - view.from);
    const r = Math.min(n - 1, Math.floor(event.offsetY / row));
    if (event.offsetX < LEFT) return say(null);
    const values = all.map((t) => {
      const steps = t.ranks[r];
      let i = 0;
      while (i + 1 < steps.n && steps.at[i + 1] <= time) i++;
      return `${t.name} ${mib(steps.held[i])}`;
    });
    say(`rank ${r} at ${ms(time)}\n${values.join("\n")}`, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => say(null));
}
