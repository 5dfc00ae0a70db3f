// What all drawings share: the data, colours of the theme, numbers in words, the tip.

const data = JSON.parse(document.getElementById("data").textContent);
const MIB = 1024 * 1024;
const FONT = "12px system-ui, sans-serif";
const drawings = []; // functions that draw anew: after a change of size or theme

const probe = document.createElement("i");
document.body.append(probe);
probe.hidden = true;

/** What the style sheet calls --name, resolved for the theme. */
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/** A canvas as sharp as the screen: its context, cleared, and its size in CSS pixels. */
function fit(canvas, height) {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.font = FONT;
  return { ctx, width, height };
}

/** Four significant digits, as a person writes them. */
function number(value) {
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return size >= 1000 ? value.toFixed(0) : String(+value.toPrecision(4));
}

const ms = (value) => `${size(value, 1)} ms`;
const mib = (bytes) => `${size(bytes / MIB, 1)} MiB`;

/** At least `digits` decimals, more where the number is small. */
function size(value, digits) {
  const small = Math.abs(value) > 0 && Math.abs(value) < 1;
  return small ? String(+value.toPrecision(2)) : value.toFixed(digits);
}

/** Round numbers from `low` to `high`, about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(i * step);
  return out;
}

const tip = document.getElementById("tip");

/** Beside the pointer, inside the window; null hides it. Screen readers hear it. */
function say(text, x, y) {
  tip.hidden = text === null;
  if (text === null) return;
  if (tip.textContent !== text) tip.textContent = text;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > window.innerWidth ? Math.max(4, x - width - 14) : x + 14;
  const top = y + 16 + height > window.innerHeight ? Math.max(4, y - height - 12) : y + 16;
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

/** Calls `draw` at most once per frame. */
function eachFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  };
}
