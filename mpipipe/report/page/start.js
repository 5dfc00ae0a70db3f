// Hands: pointer, wheel and keys for the timelines; then every drawing of the page.

const drawn = [...document.querySelectorAll("canvas[data-timeline]")]
  .map((canvas) => new Drawn(canvas, Number(canvas.dataset.timeline)));

const outline = eachFrame(() => drawn.forEach((d) => d.draw())); // the memory is as it was

function choose(found, x, y) {
  const same = ["t", "rank", "index"].every((key) => found?.[key] === chosen?.[key]);
  say(found && sentence(found.t, found.rank, found.index), x, y);
  if (same) return;
  chosen = found;
  outline();
}

/** The instruction `by` further on its rank, or the one of the rank `down` below at that time. */
function move(d, by, down) {
  const old = chosen && chosen.t === d.t ? chosen : { t: d.t, rank: 0, index: firstAfter(d.ranks[0], view.from) - by };
  const rank = Math.max(0, Math.min(d.ranks.length - 1, old.rank + down)), r = d.ranks[rank];
  const wanted = down ? firstAfter(r, d.ranks[old.rank].start[old.index]) : old.index + by;
  const index = Math.max(0, Math.min(r.n - 1, wanted));
  if (r.start[index] < view.from || r.end[index] > view.to) {
    const middle = (r.start[index] + r.end[index]) / 2, half = (view.to - view.from) / 2;
    look(middle - half, middle + half);
  }
  const box = d.canvas.getBoundingClientRect();
  choose({ t: d.t, rank, index }, box.left + d.toX((r.start[index] + r.end[index]) / 2), box.top + (rank + 1) * d.row);
}

function keys(d, event) {
  const actions = {
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5),
    0: () => look(0, whole), Home: () => look(0, whole), Escape: () => choose(null),
    ArrowLeft: () => move(d, -1, 0), ArrowRight: () => move(d, 1, 0),
    ArrowUp: () => move(d, 0, -1), ArrowDown: () => move(d, 0, 1),
  };
  if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  actions[event.key]();
}

/** Out at its widest, the wheel scrolls the page again. */
function wheel(d, event) {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY), span = view.to - view.from;
  if (span >= whole * 0.999 && (sideways || event.deltaY > 0)) return;
  event.preventDefault();
  if (sideways) look(view.from + (event.deltaX / d.width) * span, view.to + (event.deltaX / d.width) * span);
  else zoom(Math.exp(-event.deltaY * 0.002), d.toTime(event.offsetX));
}

/** One pointer pans, two pinch. */
function grab(d) {
  const held = new Map(); // pointer -> x
  const spread = () => { const [a, b] = [...held.values()]; return Math.abs(a - b) || 1; };
  d.canvas.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event.offsetX);
    d.canvas.setPointerCapture(event.pointerId);
  });
  d.canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) {
      choose(d.at(event.offsetX, event.offsetY), event.clientX, event.clientY);
      return;
    }
    const before = held.get(event.pointerId), apart = held.size === 2 ? spread() : 0;
    held.set(event.pointerId, event.offsetX);
    if (apart) zoom(spread() / apart, d.toTime(event.offsetX));
    else if (before !== event.offsetX) {
      const by = d.toTime(before) - d.toTime(event.offsetX);
      choose(null);
      look(view.from + by, view.to + by);
    }
  });
  for (const name of ["pointerup", "pointercancel"]) {
    d.canvas.addEventListener(name, (event) => {
      held.delete(event.pointerId);
      if (name === "pointerup") choose(d.at(event.offsetX, event.offsetY), event.clientX, event.clientY);
    });
  }
}

for (const d of drawn) {
  grab(d);
  d.canvas.addEventListener("wheel", (event) => wheel(d, event), { passive: false });
  d.canvas.addEventListener("dblclick", () => look(0, whole));
  d.canvas.addEventListener("keydown", (event) => keys(d, event));
  for (const name of ["pointerleave", "blur"]) d.canvas.addEventListener(name, () => choose(null));
}
for (const button of document.querySelectorAll("button[data-zoom]")) {
  const actions = { in: () => zoom(2), out: () => zoom(0.5), all: () => look(0, whole) };
  button.addEventListener("click", actions[button.dataset.zoom]);
}

const steady = (i) => () => colour(`c${i % 6}`);
const held = document.getElementById("held"), resident = document.getElementById("resident");
if (held) drawMemory(held);
if (resident) {
  const { steps, ranks } = data.resident;
  const lines = ranks.map((y, i) => ({ name: `rank ${i}`, x: steps, y: y.map((bytes) => bytes / MIB), colour: steady(i) }));
  chart(resident, lines, { unit: (value) => `${number(value)} MiB`, zero: true });
}
for (const canvas of document.querySelectorAll("canvas[data-curve]")) {
  const { series } = data.curves[canvas.dataset.curve], first = canvas.dataset.curve === "0";
  chart(canvas, series.map((s, i) => ({ ...s, colour: steady(i) })), { height: first ? 280 : 170 });
}

const drawAll = eachFrame(() => drawings.forEach((draw) => draw()));
const printing = (on) => () => {
  document.documentElement.classList.toggle("print", on);
  drawings.forEach((draw) => draw());
};
window.addEventListener("resize", drawAll);
window.addEventListener("beforeprint", printing(true));
window.addEventListener("afterprint", printing(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
if (drawn.length) look(0, whole);
drawAll();
