/* Charts as SVG: curves, stacked bands and sparklines. They share the tip and redraw themselves. */

import { bytes, h, number, percent } from "./dom.js";

export const ink = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const formats = { bytes, number, percent };

function svg(kind, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(made);
  return made;
}

// -- Redrawing ------------------------------------------------------------------------------------

/* Draw an element whenever it gets a size, changes it, or the color scheme changes. */
const drawings = new Map();
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (!target.isConnected) continue;
    if (target.clientWidth && drawings.has(target)) drawings.get(target)();
  }
});

export function onRedraw(element, draw) {
  drawings.set(element, draw);
  sizes.observe(element);
}

export function redraw(element) {
  if (element.isConnected && element.clientWidth) drawings.get(element)();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const element of drawings.keys()) redraw(element);
});

// -- The tip --------------------------------------------------------------------------------------

const tip = h("div", { id: "tip", role: "status" });

export function showTip(event, text) {
  if (!tip.isConnected) document.body.append(tip);
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14
    : event.clientX + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - box.height - 4) + "px";
}

export const hideTip = () => { tip.style.display = "none"; };

// -- Parts ----------------------------------------------------------------------------------------

export function ticks(low, high, count, base) {
  const raw = (high - low) / count || 1;
  const power = Math.pow(base, Math.floor(Math.log(raw) / Math.log(base)));
  const steps = base === 2 ? [1, 2] : [1, 2, 2.5, 5, 10];
  const step = power * steps.find((s) => s * power >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step)
    found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

export function legend(entries) {
  return h("div", { class: "legend" }, entries.map(([name, color]) =>
    h("span", {}, h("i", { style: { background: color } }), name)));
}

function smoothed(values) {
  const weight = Math.min(0.95, Math.max(0.5, 1 - 15 / values.length));
  let mean = 0, norm = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

/* A long, noisy curve becomes a faint curve and a smooth one. */
export function withSmooth(curves) {
  return curves.flatMap((curve) => curve.smooth && curve.y.length > 24
    ? [{ ...curve, faint: true }, { ...curve, y: smoothed(curve.y), name: `${curve.name}, smoothed` }]
    : [curve]);
}

export function sparkline(values) {
  const width = 120, height = 30;
  const root = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": "loss" });
  const low = Math.min(...values), high = Math.max(...values), range = high - low || 1;
  const points = values.map((y, i) =>
    `${(2 + i / Math.max(1, values.length - 1) * (width - 4)).toFixed(1)},`
    + `${(height - 3 - (y - low) / range * (height - 6)).toFixed(1)}`);
  if (points.length > 1) svg("polyline", { points: points.join(" ") }, root);
  return root;
}

/* Steps with a ledger each, as stacked bands: {bands, tops, tipped, budget}. */
export function bandsOf(memory) {
  const edges = memory.from.map((step) => Math.max(0, step)), last = memory.last;
  const base = edges.map(() => 0), xs = [], bands = [];
  edges.forEach((from, i) => xs.push(from, i + 1 < edges.length ? edges[i + 1] : last));
  for (const owner of memory.owners) {
    const low = [], high = [];
    owner.bytes.forEach((size, i) => {
      low.push(base[i], base[i]);
      base[i] += size;
      high.push(base[i], base[i]);
    });
    bands.push({ name: owner.name, x: xs, y: high.map((top, i) => top - low[i]), low, high });
  }
  return { bands, tops: base, tipped: bands, budget: memory.budget, format: "bytes", zero: true,
    series: [] };
}

// -- A chart --------------------------------------------------------------------------------------

/* Return a chart with `element` and `show(content)`.

   content: {series: [{name, x, y, ink, dots, faint, dash}], bands: [{name, x, low, high}], tops,
   tipped, budget, format: number, bytes or percent, zero: the axis begins at 0}. Dragging over the
   chart zooms into these steps, a double click shows all of them again. */
export function chart(title, { name, tall } = {}) {
  const place = h("div", { class: tall ? "chart tall" : "chart", "data-chart": name });
  const key = h("div");
  const element = h("div", { class: "figure" }, title ? h("h3", {}, title) : null, place, key);
  let content = null, zoom = null;
  const draw = () => { if (content) drawInto(place, content, zoom, setZoom); };
  function setZoom(range) { zoom = range; draw(); }
  onRedraw(place, draw);
  return {
    element,
    show(next) {
      content = next;
      place.dataset.points = JSON.stringify(next.series.filter((s) => !s.faint).map((s) =>
        [s.name, s.x.length, s.x.at(-1), s.y.at(-1)]));
      const named = next.series.filter((s) => !s.faint);
      const entries = named.length > 1 ? named.map((s) => [s.name, `var(${s.ink})`]) : [];
      const bands = (next.bands || []).map((band, n) => [band.name, `var(--c${n % 10})`]);
      key.replaceChildren(...(entries.length + bands.length ? [legend([...entries, ...bands])] : []));
      redraw(place);
    },
  };
}

function drawInto(place, chart, zoom, setZoom) {
  place.textContent = "";
  const width = place.clientWidth, height = place.clientHeight;
  const box = { left: 58, right: width - 8, top: 10, bottom: height - 24 };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, place);
  const format = formats[chart.format || "number"];
  const all = chart.series.concat(chart.bands || []);
  const xs = all.flatMap((s) => s.x);
  let [x0, x1] = zoom || [Math.min(...xs), Math.max(...xs)];
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  const inside = (s) => s.y.filter((_, i) => s.x[i] >= x0 && s.x[i] <= x1);
  const ys = chart.series.flatMap(inside);
  if (chart.bands) ys.push(...chart.tops);
  if (chart.budget) ys.push(chart.budget);
  if (!ys.length) return;
  let [y0, y1] = [chart.zero ? 0 : Math.min(...ys), Math.max(...ys)];
  const pad = (y1 - y0) * 0.06 || Math.abs(y1) * 0.05 || 1;
  y1 += pad;
  if (!chart.zero) y0 -= pad;
  const px = (x) => box.left + (x - x0) / (x1 - x0) * (box.right - box.left);
  const py = (y) => box.bottom - (y - y0) / (y1 - y0) * (box.bottom - box.top);
  for (const y of ticks(y0, y1, height / 60, chart.format === "bytes" ? 2 : 10)) {
    svg("line", { class: "grid", x1: box.left, x2: box.right, y1: py(y), y2: py(y) }, root);
    svg("text", { x: box.left - 8, y: py(y) + 4, "text-anchor": "end" }, root)
      .textContent = format(y);
  }
  for (const x of ticks(x0, x1, width / 110, 10)) {
    if (x !== Math.round(x)) continue;
    svg("text", { x: px(x), y: height - 6, "text-anchor": "middle" }, root)
      .textContent = number(x);
  }
  svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, root);
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  svg("rect", { x: box.left, y: 0, width: Math.max(0, box.right - box.left + 4),
    height: box.bottom + 4 }, svg("clipPath", { id: clip }, root));
  const ground = svg("g", { "clip-path": `url(#${clip})` }, root);
  (chart.bands || []).forEach((band, n) => {
    const up = band.x.map((x, i) => `${px(x)},${py(band.high[i])}`);
    const down = band.x.map((x, i) => `${px(x)},${py(band.low[i])}`).reverse();
    svg("polygon", { points: up.concat(down).join(" "), fill: ink(`--c${n % 10}`), opacity: 0.55 },
      ground);
  });
  if (chart.budget)
    svg("line", { class: "budget", x1: box.left, x2: box.right, y1: py(chart.budget),
      y2: py(chart.budget) }, root);
  for (const line of chart.series) {
    const color = ink(line.ink);
    const points = line.x.map((x, i) => `${px(x)},${py(line.y[i])}`);
    if (points.length > 1)
      svg("polyline", { points: points.join(" "), fill: "none", stroke: color,
        "stroke-width": line.faint ? 1 : 2, opacity: line.faint ? 0.35 : 1,
        "stroke-dasharray": line.dash ? "5 4" : "none", "stroke-linejoin": "round" }, ground);
    if (line.dots || points.length === 1)
      line.x.forEach((x, i) =>
        svg("circle", { cx: px(x), cy: py(line.y[i]), r: 3.5, fill: color }, ground));
  }
  follow(place, root, chart, { px, x0, x1, box, format, zoom, setZoom });
}

function follow(place, root, chart, view) {
  const rule = svg("line", { class: "hover", y1: view.box.top, y2: view.box.bottom,
    visibility: "hidden" }, root);
  const range = svg("rect", { class: "range", y: view.box.top, visibility: "hidden",
    height: view.box.bottom - view.box.top }, root);
  const stepAt = (event) => view.x0 + (event.clientX - place.getBoundingClientRect().left
    - view.box.left) / (view.box.right - view.box.left) * (view.x1 - view.x0);
  let from = null;
  place.onpointerdown = (event) => { if (event.button === 0) from = stepAt(event); };
  place.onpointerup = (event) => {
    const to = stepAt(event), low = Math.min(from, to), high = Math.max(from, to);
    const wide = from !== null && high - low > 0.02 * (view.x1 - view.x0);
    from = null;
    if (wide) view.setZoom([Math.max(view.x0, low), Math.min(view.x1, high)]);
  };
  place.ondblclick = () => view.setZoom(null);
  place.onpointermove = (event) => {
    const x = stepAt(event);
    if (from !== null) {
      const [a, b] = [view.px(Math.min(from, x)), view.px(Math.max(from, x))];
      range.setAttribute("x", a);
      range.setAttribute("width", b - a);
      range.setAttribute("visibility", "visible");
    }
    const named = chart.series.filter((s) => !s.faint || chart.series.length === 1);
    const near = named.concat(chart.tipped || []).filter((line) => line.x.length).map((line) => {
      let best = 0;
      line.x.forEach((at, i) => {
        if (Math.abs(at - x) < Math.abs(line.x[best] - x)) best = i;
      });
      return { line, best };
    });
    if (!near.length) return;
    const at = near[0].line.x[near[0].best];
    rule.setAttribute("x1", view.px(at));
    rule.setAttribute("x2", view.px(at));
    rule.setAttribute("visibility", "visible");
    showTip(event, ["step " + number(at)].concat(near.map(({ line, best }) =>
      `${line.name}  ${view.format(line.y[best])}`
      + (line.x[best] === at ? "" : ` (step ${line.x[best]})`))).join("\n"));
  };
  place.onpointerleave = () => {
    from = null;
    range.setAttribute("visibility", "hidden");
    rule.setAttribute("visibility", "hidden");
    hideTip();
  };
}
