// Timelines on one time axis: decoding, the view that they share, drawing, and pointing at an instruction.

const OPS = ["F", "B", "I", "W", "SEND", "RECV", "SEND", "RECV", "SEND", "RECV", "SEND", "RECV", "NORM", "STEP",
  "SEND", "RECV", "SEND", "RECV"];
const NORM = OPS.indexOf("NORM"), LEFT = 58, AXIS = 22;

/** Columns of a rank with absolute times in ms, as typed arrays. */
function decode(rank, codes) {
  const n = rank.gap_ns.length, out = { ...codes, n, start: new Float64Array(n), end: new Float64Array(n) };
  out.exposed = rank.exposed_ns;
  out.held = new Float64Array(n);
  let now = 0, held = 0;
  for (let i = 0; i < n; i++) {
    out.start[i] = (now += rank.gap_ns[i]) / 1e6;
    out.end[i] = (now += rank.took_ns[i]) / 1e6;
    out.held[i] = held += rank.held_bytes[i];
  }
  return out;
}

const timelines = data.timelines.map((t) => {
  const ranks = t.ranks.map((rank, r) => decode(rank, data.programs[t.program][r]));
  const arrivals = ranks.map((rank) => rank.start[rank.op.indexOf(NORM)] || 0);
  return { name: t.name, ranks, span: t.span_ns / 1e6, met: Math.max(0, ...arrivals) }; // met: all ranks are at NORM
});
const whole = Math.max(...timelines.map((t) => t.span), 1e-6) * 1.005;
const view = { from: 0, to: whole };
let chosen = null; // { t, rank, index }: the instruction that is pointed at

const redraw = eachFrame(() => drawings.filter((d) => d.moves).forEach((d) => d()));

function look(from, to) {
  const span = Math.min(whole, Math.max(to - from, whole / 1e5));
  view.from = Math.max(0, Math.min(from, whole - span));
  view.to = view.from + span;
  document.getElementById("range").textContent = `${ms(view.from)} to ${ms(Math.min(view.to, whole))}`;
  redraw();
}

/** Closer by `factor`, so that time `at` stays where it is on the screen. */
function zoom(factor, at = (view.from + view.to) / 2) {
  look(at - (at - view.from) / factor, at + (view.to - at) / factor);
}

/** Index of the first instruction that ends after time `at`. */
function firstAfter(rank, at) {
  let low = 0, high = rank.n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rank.end[middle] > at) high = middle;
    else low = middle + 1;
  }
  return low;
}

function sentence(t, rank, i) {
  const r = timelines[t].ranks[rank];
  const what = data.words[r.op[i]].replace(/\{(\w+)\}/g, (_, key) => r[key][i]);
  const parts = [`${what}, rank ${rank}: ${ms(r.end[i] - r.start[i])}, from ${ms(r.start[i])}`];
  const bytes = data.bytes[`${r.op[i]},${r.stage[i]},${r.other[i]}`];
  if (bytes) parts.push(bytes < MIB ? `${number(bytes / 1024)} KiB` : mib(bytes));
  if (OPS[r.op[i]] === "RECV") parts.push(`${ms(r.exposed[i] / 1e6)} of it exposed: the message was on its way`);
  if (r.op[i] === NORM) parts.push(`${ms(timelines[t].met - r.start[i])} of it waiting for the last rank`);
  if (r.held[i]) parts.push(`${mib(r.held[i])} held`);
  return parts.join("\n");
}

class Drawn {
  constructor(canvas, t) {
    Object.assign(this, { canvas, t, ranks: timelines[t].ranks });
    const n = this.ranks.length;
    this.row = n <= 8 ? 30 : n <= 24 ? 20 : 10;
    this.draw.moves = true;
    drawings.push(this.draw);
  }

  toX = (time) => LEFT + ((time - view.from) / (view.to - view.from)) * (this.width - LEFT);
  toTime = (x) => view.from + ((x - LEFT) / (this.width - LEFT)) * (view.to - view.from);

  draw = () => {
    const { ctx, width, height } = fit(this.canvas, this.ranks.length * this.row + AXIS);
    this.width = width;
    Object.assign(this.canvas.dataset, { left: LEFT, row: this.row });
    const paint = Object.fromEntries(["F", "B", "I", "W", "STEP", "NORM", "exposed_s", "bubble_s", "panel", "line", "faint", "ink"]
      .map((name) => [name, colour(name)]));
    ctx.fillStyle = paint.panel;
    ctx.fillRect(LEFT, 0, width - LEFT, height - AXIS);
    this.axis(ctx, width, height, paint);
    this.ranks.forEach((rank, r) => this.label(ctx, r, paint));
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, 0, width - LEFT, height - AXIS);
    ctx.clip();
    this.ranks.forEach((rank, r) => this.boxes(ctx, rank, r, paint));
    this.outline(ctx, paint);
    ctx.restore();
  };

  label(ctx, r, paint) {
    if (this.row < 14 && r % 4) return;
    ctx.fillStyle = paint.faint;
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillText(this.row < 20 ? `${r}` : `rank ${r}`, LEFT - 6, (r + 0.5) * this.row);
  }

  axis(ctx, width, height, paint) {
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    const marks = ticks(view.from, view.to, (width - LEFT) / 110);
    const digits = Math.max(0, -Math.floor(Math.log10(marks[1] - marks[0] || 1) + 1e-9));
    for (const mark of marks) {
      const x = this.toX(mark);
      ctx.fillStyle = paint.line;
      ctx.fillRect(x, 0, 1, height - AXIS + 4);
      ctx.fillStyle = paint.faint;
      if (x < width - 26) ctx.fillText(`${mark.toFixed(digits)} ms`, Math.max(x, LEFT + 14), height - AXIS + 7);
    }
  }

  boxes(ctx, rank, r, paint) {
    const top = r * this.row + (this.row > 12 ? 3 : 1), tall = this.row - (this.row > 12 ? 6 : 2);
    const alike = chosen ? timelines[chosen.t].ranks[chosen.rank].micro[chosen.index] : -1;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    for (let i = firstAfter(rank, view.from); i < rank.n && rank.start[i] < view.to; i++) {
      const kind = OPS[rank.op[i]];
      if (kind === "SEND" || (kind === "RECV" && !rank.exposed[i])) continue;
      const begin = kind === "RECV" ? rank.end[i] - rank.exposed[i] / 1e6 : rank.start[i];
      const x = this.toX(begin), wide = Math.max(0.6, this.toX(rank.end[i]) - x);
      ctx.globalAlpha = alike >= 0 && rank.micro[i] !== alike ? 0.3 : 1;
      ctx.fillStyle = paint[kind === "RECV" ? "exposed_s" : kind];
      if (kind === "RECV") ctx.fillRect(x, top + tall * 0.35, wide, tall * 0.3);
      else if (kind === "NORM") this.norm(ctx, rank.end[i], x, top, tall, paint);
      else ctx.fillRect(x, top, wide > 3 ? wide - 1 : wide, tall);
      this.caption(ctx, rank, i, kind, x, wide, top + tall / 2 + 1);
    }
    ctx.globalAlpha = 1;
  }

  /** What it waits for the last rank is bubble. */
  norm(ctx, end, x, top, tall, paint) {
    const met = this.toX(timelines[this.t].met), right = this.toX(end);
    ctx.fillRect(met, top, Math.max(1.5, right - met), tall);
    ctx.fillStyle = paint.bubble_s;
    ctx.fillRect(x, top + tall * 0.35, Math.max(0, met - x), tall * 0.3);
  }

  caption(ctx, rank, i, kind, x, wide, y) {
    if (kind === "RECV" || kind === "NORM" || this.row < 14) return;
    const text = rank.micro[i] >= 0 ? `${rank.micro[i]}` : "update";
    if (wide < 4 + 7 * text.length) return;
    ctx.fillStyle = "#111";
    const left = Math.max(x, LEFT), right = Math.min(x + wide, this.width);
    ctx.fillText(text, (left + right) / 2, y);
  }

  outline(ctx, paint) {
    if (!chosen || chosen.t !== this.t) return;
    const rank = this.ranks[chosen.rank], x = this.toX(rank.start[chosen.index]);
    ctx.strokeStyle = paint.ink;
    ctx.lineWidth = 2;
    ctx.strokeRect(x, chosen.rank * this.row + 2, Math.max(2, this.toX(rank.end[chosen.index]) - x), this.row - 4);
  }

  /** The instruction at a place on the canvas, or null. A send takes next to no time: it is found by the keys. */
  at(x, y) {
    const rank = Math.floor(y / this.row), time = this.toTime(x);
    if (x < LEFT || !this.ranks[rank]) return null;
    const index = firstAfter(this.ranks[rank], time);
    const hit = index < this.ranks[rank].n && this.ranks[rank].start[index] <= time;
    return hit ? { t: this.t, rank, index } : null;
  }
}
