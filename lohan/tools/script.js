"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const color = (n) => getComputedStyle(document.documentElement).getPropertyValue("--c" + n % 10);
  const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

  function svg(kind, attributes, parent) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (parent) parent.appendChild(made);
    return made;
  }

  function show(event, text) {
    tip.textContent = text;
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14
      : event.clientX + 14;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - box.height - 4) + "px";
  }
  const hide = () => { tip.style.display = "none"; };

  // -- numbers ---------------------------------------------------------------------------------

  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  function bytes(value) {
    let at = 0;
    while (Math.abs(value) >= 1024 && at < 4) { value /= 1024; at += 1; }
    return (value >= 100 || at === 0 ? value.toFixed(0) : value.toPrecision(3)) + " " + units[at];
  }
  function number(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  }
  const milliseconds = (ms) => ms === 0 ? "0" : ms >= 1000 ? (ms / 1000).toPrecision(4) + " s"
    : ms >= 1 ? ms.toPrecision(4) + " ms" : (ms * 1000).toPrecision(3) + " \u00b5s";
  const formats = { bytes, number };

  function ticks(low, high, count, base) {
    const raw = (high - low) / count || 1;
    const power = Math.pow(base, Math.floor(Math.log(raw) / Math.log(base)));
    const steps = base === 2 ? [1, 2] : [1, 2, 2.5, 5, 10];
    const step = power * steps.find((s) => s * power >= raw * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step)
      found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
    return found;
  }

  // -- curves ----------------------------------------------------------------------------------

  /* chart: {series: [{name, x, y, dots}], bands: [{name, x, y}] (stacked steps), budget, format,
     zero: the axis begins at 0} */
  function draw(place, chart) {
    place.textContent = "";
    const width = place.clientWidth, height = place.clientHeight;
    const box = { left: 62, right: width - 8, top: 10, bottom: height - 24 };
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, place);
    const format = formats[chart.format || "number"];
    const all = chart.series.concat(chart.bands || []);
    const xs = all.flatMap((s) => s.x), ys = chart.series.flatMap((s) => s.y);
    if (chart.bands) ys.push(...chart.tops);
    if (chart.budget) ys.push(chart.budget);
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    let [y0, y1] = [chart.zero ? 0 : Math.min(...ys), Math.max(...ys)];
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
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
    svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom },
      root);
    (chart.bands || []).forEach((band, n) => {
      const up = band.x.map((x, i) => `${px(x)},${py(band.high[i])}`);
      const down = band.x.map((x, i) => `${px(x)},${py(band.low[i])}`).reverse();
      svg("polygon", { points: up.concat(down).join(" "), fill: color(n), opacity: 0.55 }, root);
    });
    if (chart.budget)
      svg("line", { class: "budget", x1: box.left, x2: box.right, y1: py(chart.budget),
        y2: py(chart.budget) }, root);
    chart.series.forEach((line, n) => {
      const ink = line.ink === undefined ? color(n) : shade(line.ink);
      const points = line.x.map((x, i) => `${px(x)},${py(line.y[i])}`);
      if (points.length > 1)
        svg("polyline", { points: points.join(" "), fill: "none", stroke: ink,
          "stroke-width": line.faint ? 1 : 2, opacity: line.faint ? 0.35 : 1,
          "stroke-linejoin": "round" }, root);
      if (line.dots || points.length === 1)
        line.x.forEach((x, i) =>
          svg("circle", { cx: px(x), cy: py(line.y[i]), r: 3.5, fill: ink }, root));
    });
    follow(place, root, chart, { px, x0, x1, box, format });
  }

  function follow(place, root, chart, view) {
    const rule = svg("line", { class: "hover", y1: view.box.top, y2: view.box.bottom,
      visibility: "hidden" }, root);
    place.onpointermove = (event) => {
      const left = event.clientX - place.getBoundingClientRect().left;
      const x = view.x0 + (left - view.box.left) / (view.box.right - view.box.left)
        * (view.x1 - view.x0);
      const named = chart.series.filter((s) => !s.faint || chart.series.length === 1);
      const near = named.concat(chart.tipped || []).map((line) => {
        let best = 0;
        line.x.forEach((at, i) => {
          if (Math.abs(at - x) < Math.abs(line.x[best] - x)) best = i;
        });
        return { line, best };
      });
      if (!near.length || !near[0].line.x.length) return;
      const at = near[0].line.x[near[0].best];
      rule.setAttribute("x1", view.px(at));
      rule.setAttribute("x2", view.px(at));
      rule.setAttribute("visibility", "visible");
      show(event, ["step " + number(at)].concat(near.map(({ line, best }) =>
        `${line.name}  ${view.format(line.y[best])}`
        + (line.x[best] === at ? "" : ` (step ${line.x[best]})`))).join("\n"));
    };
    place.onpointerleave = () => { rule.setAttribute("visibility", "hidden"); hide(); };
  }

  function smooth(values) {
    const weight = Math.min(0.97, 1 - 6 / Math.max(7, values.length));
    let mean = 0, norm = 0;
    return values.map((value) => {
      mean = weight * mean + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return mean / norm;
    });
  }

  function legend(place, entries) {
    const list = document.createElement("div");
    list.className = "legend";
    for (const [name, ink] of entries) {
      const item = document.createElement("span"), dot = document.createElement("i");
      dot.style.background = ink;
      item.append(dot, document.createTextNode(name));
      list.appendChild(item);
    }
    const old = place.nextElementSibling;
    if (old && old.className === "legend") old.remove();
    place.after(list);
  }

  // -- memory ----------------------------------------------------------------------------------

  function memoryChart(memory) {
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
      bands.push({ name: owner.name, x: xs, y: high.map((h, i) => h - low[i]), low, high });
    }
    return { bands, tops: base, tipped: bands, budget: memory.budget, format: "bytes", zero: true,
      series: [] };
  }

  // -- the timeline ----------------------------------------------------------------------------

  const KINDS = {
    F: ["forward", 0], B: ["backward", 3], E: ["end of backward", 7], R: ["read weights", 2],
    S: ["read optimizer state", 5], W: ["write state and weights", 1], U: ["update", 4],
    H: ["hold gradients", 6], P: ["put gradients away", 6], G: ["get gradients back", 6],
    O: ["activations out", 9], I: ["activations in", 8], C: ["commit", 7],
    L: ["load weights", 2], V: ["restore activations", 8], K: ["keep activations", 9],
    D: ["gradients to memory", 6], A: ["gather weights", 2], X: ["sum gradients", 6],
  };

  function timeline(canvas, shown) {
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
      pen.fillStyle = shade("--soft");
      pen.strokeStyle = shade("--grid");
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
        pen.fillStyle = color((KINDS[span.name[0]] || ["", 7])[1]);
        pen.fillRect(x, span.y + 1, w, ROW - 2);
        if (w > 10 + 7 * span.name.length) {
          pen.fillStyle = shade("--card");
          pen.fillText(span.name, x + 4, span.y + ROW / 2);
        }
      }
      pen.restore();
      pen.fillStyle = shade("--text");
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
      if (!hit || event.offsetX < LEFT) return hide();
      show(event, `${hit.name}: ${(KINDS[hit.name[0]] || [hit.name])[0]}\n`
        + `${milliseconds(hit.length)}, from ${milliseconds(hit.start)}`);
    };
    canvas.onpointerleave = hide;
    canvas.ondblclick = (event) => zoom(0.5, where(event));
    canvas.onkeydown = (event) => {
      const by = (high - low) / 8;
      const acts = { ArrowLeft: () => move(-by), ArrowRight: () => move(by), "+": () => zoom(0.6),
        "-": () => zoom(1 / 0.6), "0": () => zoom(1e9) };
      if (acts[event.key]) { acts[event.key](); event.preventDefault(); }
    };
    for (const button of document.querySelectorAll("[data-zoom]"))
      button.onclick = () => zoom(+button.dataset.zoom);
    const kinds = [...new Set(spans.map((s) => s.name[0]))].filter((k) => KINDS[k] && k !== "E");
    return () => {
      paint();
      legend(canvas, kinds.map((k) => [`${k}  ${KINDS[k][0]}`, color(KINDS[k][1])]));
    };
  }

  // -- all of it -------------------------------------------------------------------------------

  const redraws = [];
  for (const [name, curves] of Object.entries(data.charts)) {
    const place = document.getElementById(name);
    if (!place) continue;
    const series = [];
    for (const curve of curves) {
      const ink = curve.ink || (curve.dots ? "--c1" : "--c0");
      if (curve.smooth && curve.y.length > 24) {
        series.push({ ...curve, faint: true, ink });
        series.push({ ...curve, y: smooth(curve.y), ink, name: curve.name + ", smoothed" });
      } else series.push({ ...curve, ink });
    }
    const format = name === "resident" ? "bytes" : "number";
    redraws.push(() => {
      draw(place, { series, format, zero: name === "resident" });
      if (curves.length > 1) legend(place, series.filter((s) => !s.faint)
        .map((s) => [s.name, shade(s.ink)]));
    });
  }
  const memory = document.getElementById("memory");
  if (memory && data.memory.owners.length) {
    const chart = memoryChart(data.memory);
    redraws.push(() => {
      draw(memory, chart);
      legend(memory, chart.bands.map((b, n) => [b.name, color(n)]));
    });
  }
  const canvas = document.getElementById("timeline");
  if (canvas && data.timeline) redraws.push(timeline(canvas, data.timeline));
  const redraw = () => redraws.forEach((each) => each());
  redraw();
  let wait = 0;
  addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(redraw, 60); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.documentElement.dataset.drawn = redraws.length;
})();
