/* The timeline of two steps: what every lane did when. */

import { h } from "./dom.js";
import { hideTip, ink, legend, onRedraw, showTip, ticks } from "./charts.js";

const milliseconds = (ms) => ms === 0 ? "0" : ms >= 1000 ? (ms / 1000).toPrecision(4) + " s"
  : ms >= 1 ? ms.toPrecision(4) + " ms" : (ms * 1000).toPrecision(3) + " \u00b5s";

/* The colours of operations; the others are grey. */
const COLORS = {
  F: 0, B: 3, U: 4, W: 1, Y: 1, R: 2, T: 2, L: 2, A: 2, S: 5, Q: 5,
  H: 6, P: 6, G: 6, N: 6, D: 6, X: 6, O: 9, K: 9, I: 8, V: 8,
};
const GREY = 7;
const color = (kind) => ink(`--c${COLORS[kind] ?? GREY}`);

/* Draw the spans of two steps and return a function that draws them again. */
function spansOn(canvas, shown, buttons) {
  const ROW = 16, GAP = 10, LEFT = 116, TOP = 22;
  const offsets = new Map(), titles = [];
  let y = TOP, before = -1;
  for (const [lane, row] of shown.rows) {
    if (lane !== before) {
      if (before >= 0) y += GAP;
      titles.push([shown.lanes[lane], y]);
      before = lane;
    }
    offsets.set(lane * 100 + row, y);
    y += ROW;
  }
  const height = y + 8;
  const spans = shown.spans.map(([lane, row, name, start, length]) =>
    ({ y: offsets.get(lane * 100 + row), name, start, length }));
  let low = 0, high = shown.length;
  canvas.style.height = height + "px";

  function paint() {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const px = (ms) => LEFT + (ms - low) / (high - low) * (width - LEFT);
    pen.fillStyle = ink("--soft");
    pen.strokeStyle = ink("--grid");
    for (const at of ticks(low, high, width / 130, 10)) {
      pen.beginPath();
      pen.moveTo(px(at), TOP - 4);
      pen.lineTo(px(at), height);
      pen.stroke();
      if (px(at) >= LEFT && px(at) < width - 50) pen.fillText(milliseconds(at), px(at) + 3, 10);
    }
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, height);
    pen.clip();
    for (const span of spans) {
      if (span.start + span.length < low || span.start > high) continue;
      const x = px(span.start), w = Math.max(0.7, px(span.start + span.length) - x - 0.5);
      pen.fillStyle = color(span.name[0]);
      pen.fillRect(x, span.y + 1, w, ROW - 2);
      if (w > 10 + 7 * span.name.length) {
        pen.fillStyle = ink("--card");
        pen.fillText(span.name, x + 4, span.y + ROW / 2);
      }
    }
    pen.restore();
    pen.fillStyle = ink("--text");
    for (const [title, at] of titles) pen.fillText(title, 10, at + ROW / 2);
  }

  function zoom(factor, at) {
    const centre = at === undefined ? (low + high) / 2 : at;
    const length = Math.min(shown.length, Math.max(shown.length / 5000, (high - low) * factor));
    low = Math.max(0, Math.min(shown.length - length, centre - (centre - low) * length
      / (high - low)));
    high = low + length;
    paint();
  }
  function move(by) {
    const length = high - low;
    low = Math.max(0, Math.min(shown.length - length, low + by));
    high = low + length;
    paint();
  }
  const where = (event) => low + (event.offsetX - LEFT) / (canvas.clientWidth - LEFT)
    * (high - low);
  let held = null;
  canvas.addEventListener("wheel", (event) => {
    if (!(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    zoom(Math.pow(1.002, event.deltaY), where(event));
  }, { passive: false });
  canvas.onpointerdown = (event) => {
    held = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("drag");
  };
  canvas.onpointerup = () => { held = null; canvas.classList.remove("drag"); };
  canvas.onpointermove = (event) => {
    if (held !== null) {
      move((held - event.offsetX) / (canvas.clientWidth - LEFT) * (high - low));
      held = event.offsetX;
      return;
    }
    const ms = where(event), slack = (high - low) / canvas.clientWidth;
    const hit = spans.find((s) => event.offsetY >= s.y && event.offsetY < s.y + ROW
      && ms >= s.start - slack && ms <= s.start + s.length + slack);
    if (!hit || event.offsetX < LEFT) return hideTip();
    showTip(event, `${hit.name}: ${shown.kinds[hit.name[0]] || hit.name}\n`
      + `${milliseconds(hit.length)}, from ${milliseconds(hit.start)}`);
  };
  canvas.onpointerleave = hideTip;
  canvas.ondblclick = (event) => zoom(0.5, where(event));
  canvas.onkeydown = (event) => {
    const by = (high - low) / 8;
    const acts = { ArrowLeft: () => move(-by), ArrowRight: () => move(by), "+": () => zoom(0.6),
      "-": () => zoom(1 / 0.6), "0": () => zoom(1e9) };
    if (acts[event.key]) { acts[event.key](); event.preventDefault(); }
  };
  for (const button of buttons)
    button.onclick = () => zoom(+button.dataset.zoom);
  const kinds = [...new Set(spans.map((s) => s.name[0]))].filter((k) => shown.kinds[k] && k !== "E");
  return {
    paint,
    kinds: () => kinds.map((k) => [`${k}  ${shown.kinds[k]}`, color(k)]),
  };
}

export function timelineOf(shown) {
  const canvas = h("canvas", { class: "timeline", tabindex: "0",
    "aria-label": "What every lane did when" });
  const buttons = [["zoom in", 0.5], ["zoom out", 2], ["all", 1e6]].map(([name, factor]) =>
    h("button", { "data-zoom": factor }, name));
  const picture = spansOn(canvas, shown, buttons);
  const key = h("div");
  onRedraw(canvas, () => {
    picture.paint();
    key.replaceChildren(legend(picture.kinds()));
  });
  const help = "drag to move, Ctrl and wheel or double click to zoom; with the keyboard: arrows, "
    + "+, - and 0";
  return h("div", {}, h("div", { class: "tools" }, ...buttons, h("span", {}, help)), canvas, key);
}
