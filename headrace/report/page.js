// The value of every curve under the pointer, read back from the paths. The page is complete without it.
"use strict";
const PLOT = { left: 52, right: 428, top: 10, bottom: 200, width: 440 };
const tip = document.getElementById("tip");
const points = new WeakMap();

function pointsOf(path) {
  if (!points.has(path)) {
    const numbers = path.getAttribute("d").match(/-?[\d.]+/g).map(Number);
    points.set(path, numbers);
  }
  return points.get(path);
}

function written(value, percent) {
  if (percent) return (100 * value).toPrecision(3).replace(/\.?0+$/, "") + " %";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function nearest(numbers, x) {
  let best = 0;
  for (let i = 0; i < numbers.length; i += 2) {
    if (Math.abs(numbers[i] - x) < Math.abs(numbers[best] - x)) best = i;
  }
  return best;
}

function valueAt(svg, pixel) {
  const share = (PLOT.bottom - pixel) / (PLOT.bottom - PLOT.top);
  let low = Number(svg.dataset.low), high = Number(svg.dataset.high);
  if (svg.dataset.log === "1") return 10 ** (Math.log10(low) + share * (Math.log10(high) - Math.log10(low)));
  return low + share * (high - low);
}

function show(svg, event) {
  const wall = document.getElementById("x-wall").checked;
  const group = svg.querySelector(wall ? ".by-wall" : ".by-step");
  if (!group) return;
  const box = svg.getBoundingClientRect();
  const x = (event.clientX - box.left) * PLOT.width / box.width;
  if (x < PLOT.left - 4 || x > PLOT.right + 4) return hide(svg);
  let lines = [], at = null, below = 0;
  for (const path of group.querySelectorAll("path[data-name]")) {
    const numbers = pointsOf(path), i = nearest(numbers, x);
    const top = valueAt(svg, numbers[i + 1]);
    const value = svg.classList.contains("stack") ? top - below : top;
    below = top;
    if (at === null || Math.abs(numbers[i] - x) < Math.abs(at - x)) at = numbers[i];
    lines.push(path.dataset.name + "  " + written(value, svg.dataset.percent === "1"));
  }
  if (at === null) return hide(svg);
  if (svg.classList.contains("stack")) lines.reverse();
  const low = Number(group.dataset.low), high = Number(group.dataset.high);
  const place = low + (at - PLOT.left) / (PLOT.right - PLOT.left) * (high - low);
  const unit = group.dataset.unit;
  const head = unit === "step" ? "step " + Math.round(place) : written(place, false) + " " + unit;
  tip.textContent = head + "\n" + lines.join("\n");
  tip.style.display = "block";
  const size = tip.getBoundingClientRect();
  const right = event.clientX + 14 + size.width < window.innerWidth;
  tip.style.left = Math.max(4, right ? event.clientX + 14 : event.clientX - 14 - size.width) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 12, window.innerHeight - size.height - 4)) + "px";
  let cursor = svg.querySelector(".cursor");
  if (!cursor) {
    cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cursor.setAttribute("class", "cursor");
    svg.append(cursor);
  }
  cursor.setAttribute("d", "M" + at + " " + PLOT.top + "V" + PLOT.bottom);
}

function hide(svg) {
  tip.style.display = "none";
  const cursor = svg.querySelector(".cursor");
  if (cursor) cursor.remove();
}

if (location.hash === "#wall") document.getElementById("x-wall").checked = true;
for (const svg of document.querySelectorAll("svg.chart")) {
  svg.addEventListener("pointermove", (event) => show(svg, event));
  svg.addEventListener("pointerdown", (event) => show(svg, event));
  svg.addEventListener("pointerleave", () => hide(svg));
}
