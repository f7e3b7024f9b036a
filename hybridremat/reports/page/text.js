// Numbers as text, the same as the Python side writes them, and elements.

const SVG = "http://www.w3.org/2000/svg";

/** A number with fixed decimals; exact halves go to the even digit, as in Python. */
function fixed(amount, decimals) {
  const scaled = amount * 10 ** decimals;
  const below = Math.floor(scaled);
  const half = scaled - below === 0.5;
  const whole = half ? below + (below % 2) : Math.round(scaled);
  return (whole / 10 ** decimals).toFixed(decimals);
}

function formatBytes(size) {
  if (size < 1024) return `${size} B`;
  let power = 1;
  while (power < 4 && size / 1024 ** power >= 1023.95) power += 1;
  const amount = size / 1024 ** power;
  return `${fixed(amount, amount < 9.995 ? 2 : 1)} ${" KMGT"[power]}iB`;
}

function formatTime(nanoseconds) {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
    if (nanoseconds < size) continue;
    const amount = nanoseconds / size;
    return `${amount < 999.5 ? Number(amount.toPrecision(3)) : Math.round(amount)} ${unit}`;
  }
  return `${Math.round(nanoseconds)} ns`;
}

const percent = (share) => `${share < 0 ? "−" : "+"}${fixed(Math.abs(100 * share), 1)} %`;
const counted = (number) => number.toLocaleString("en");

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

/** About `count` round numbers from 0 to `most`; sizes in bytes are round in powers of 1024. */
function ticks(most, count, binary = false) {
  if (!(most > 0)) return [0];
  const unit = binary ? 1024 ** Math.floor(Math.log(most / 2) / Math.log(1024)) : 1;
  const rough = most / unit / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough) * unit;
  const found = [];
  for (let i = 0; i * step <= most * 1.0001; i += 1) found.push(i * step);
  return found;
}

const tip = document.querySelector(".tip");

/** Show a tooltip beside a place of the window, always inside of it. */
function showTip(x, y, ...lines) {
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > document.documentElement.clientWidth ? x - 16 - width : x + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(y - height / 2, window.innerHeight - height - 4))}px`;
}

function hideTip() {
  tip.hidden = true;
}
