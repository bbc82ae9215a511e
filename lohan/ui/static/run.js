/* The page of one or several runs, for the server and for the file of `lohan report`. */

import { bar, bytes, card, cell, h, note, seconds, short, table, tilesOf } from "./dom.js";
import { bandsOf, chart, withSmooth } from "./charts.js";
import { timelineOf } from "./timeline.js";

const CHARTS = {
  loss: ["Loss", { tall: true }],
  speed: ["Tokens per second", { zero: true }],
  norm: ["Gradient norm before clipping", {}],
  rate: ["Learning rate", {}],
  busy: ["Busy share of each lane", { format: "percent", zero: true }],
  rewards: ["Rewards of chosen and rejected answers", { tall: true }],
  margins: ["Margin: chosen minus rejected", {}],
  accuracy: ["Accuracy: share of pairs with the chosen answer ahead", {}],
  memory: ["Plan of host memory, and --host", { tall: true }],
  resident: ["Resident memory of the process", { tall: true, format: "bytes", zero: true }],
};

/* The curves of one chart: those of a run, or one color for each of several runs. */
function curvesOf(name, views) {
  const several = views.length > 1;
  return views.flatMap((view, n) => withSmooth(view.charts[name] || []).map((curve) => {
    if (!several) return { ...curve, ink: curve.ink || (curve.dots ? "--c1" : "--c0") };
    const what = (view.charts[name] || []).length > 1 ? `${view.label}: ${curve.name}` : view.label;
    return { ...curve, name: what, ink: `--c${n % 10}`, dash: curve.dots };
  }));
}

const lanesOf = (view) => {
  const lanes = view.lanes;
  if (!lanes) return null;
  const time = (value) => value === null || value === undefined ? "-" : short(value);
  const rows = lanes.rows.map((row) => [row.name, time(row.predicted_s), time(row.measured_s),
    row.difference, h("div", {}, bar(row.shares[0], `var(${row.ink})`, 0.45),
      bar(row.shares[1], `var(${row.ink})`, 1))]);
  rows.push(["whole step", time(lanes.step.predicted_s), time(lanes.step.measured_s),
    lanes.step.difference, ""]);
  const changes = [["with", lanes.changes], ["at most, with one lane out of the way", lanes.bounds]]
    .filter(([, found]) => found && found.length)
    .map(([head, found]) => table([head, "speed"], found, [1]));
  return card("What a step is spent on",
    lanes.bottleneck ? h("p", { class: "advice" }, h("b", {}, lanes.bottleneck[0]),
      cell(lanes.bottleneck.slice(1))) : null,
    table(["lane", "predicted", "measured", "difference", "predicted above, measured below"], rows,
      [1, 2, 3]),
    note(lanes.note), note(lanes.no_change),
    changes.length ? h("div", { class: "pair" }, ...changes) : null, note(lanes.advice_note));
};

function timelineCard(view) {
  if (view.timeline === undefined) return null;
  if (view.timeline)
    return card("Timeline of two steps",
      note("From the end of one backward to that of the one after the next."),
      timelineOf(view.timeline));
  return card("Timeline", h("p", {}, "This run has no trace. ", h("code", {}, view.trace_command),
    " records one."));
}

function logCard(view) {
  if (!view.log.length) return null;
  return card("Last lines", view.log_is_whole ? null
    : note("Made again from metrics.jsonl, because the run was not started from here."),
  h("pre", { class: "log" }, view.log.join("\n")));
}

const wearCard = (view) => view.wear
  ? card("SSD", table(["", "", ""], view.wear.rows), note(view.wear.note)) : null;

function samplesCard(view) {
  if (!view.samples.length) return null;
  const said = (text) => h("span", { class: "said" }, text);
  return card("Samples", table(["step", "prompt", "answer"],
    view.samples.map(([step, prompt, text]) => [step, said(prompt), said(text)]), [0]));
}

const exampleCard = (view) => view.example.length
  ? card("First example", h("pre", {}, view.example.join("\n"))) : null;

const settingsCard = (view) => card("Settings", h("pre", { class: "long" }, view.settings),
  view.versions.length ? h("h3", {}, "Versions and machine") : null,
  view.versions.length ? table(["", ""], view.versions) : null);

function heading(views) {
  if (views.length === 1) {
    const [view] = views;
    return h("div", {}, h("h1", {}, view.name), h("p", { class: "facts" }, view.facts.join(" \u00b7 ")),
      view.state ? stateLine(view) : null);
  }
  return h("div", {}, h("h1", {}, `${views.length} runs`), card("", table(
    ["", "run", "state", "step", "loss", "tokens/s", "settings"],
    views.map((view, n) => {
      const last = (name) => {
        const found = view.charts[name];
        return found ? found[0].y.at(-1).toPrecision(4) : "-";
      };
      return [h("i", { class: "dot", style: { background: `var(--c${n % 10})` } }), view.label,
        view.state ? stateBadge(view.state.name) : "", `${view.step} of ${view.total || "?"}`,
        last("loss"), last("speed"),
        h("span", { class: "one-line" }, view.facts.join(" \u00b7 "))];
    }), [3, 4, 5])));
}

export const stateBadge = (name) => h("span", { class: `badge ${name}` }, name);

function stateLine(view) {
  const state = view.state, share = view.total ? view.step / view.total : 0;
  const left = state.left_s ? `, about ${seconds(state.left_s)} left` : "";
  return h("div", { class: "progress" }, stateBadge(state.name), h("span", {}, state.words + left),
    state.active && view.total ? bar(share, "var(--accent)", 1) : null);
}

/* Return a page with `element` and `update(views)`. Parts whose data did not change stay. */
export function runPage() {
  const charts = new Map(), parts = new Map(), element = h("div", { class: "run" });

  function figure(name, views) {
    if (!charts.has(name)) charts.set(name, chart(CHARTS[name][0], { name, ...CHARTS[name][1] }));
    const made = charts.get(name);
    if (name === "memory") made.show(bandsOf(views[0].memory));
    else made.show({ series: curvesOf(name, views), ...CHARTS[name][1] });
    return made.element;
  }
  const has = (name, views) => views.some((view) => view.charts[name]);
  const figures = (names, views) =>
    names.filter((name) => has(name, views)).map((name) => figure(name, views));

  function learning(views) {
    if (!has("loss", views)) {
      return card("Loss", note("No step is in the log yet. The first one takes longest, because it "
        + "learns the order of the blocks."));
    }
    return h("section", { class: "card" }, figure("loss", views),
      h("div", { class: views.length === 1 ? "pair quad" : "pair" },
        figures(["speed", "norm", "rate"], views),
        views.length === 1 ? figures(["busy"], views) : null));
  }
  const rewards = (views) => has("rewards", views) || has("margins", views)
    ? card("Rewards", figures(["rewards"], views),
      h("div", { class: "pair" }, figures(["margins", "accuracy"], views))) : null;

  function memory(views) {
    if (!has("resident", views)) return null;
    const planned = views.length === 1 && views[0].memory.owners.length;
    return card("Memory",
      note("Planned host memory by owner, and resident memory. Python, torch and transformers are "
        + "not part of the plan."),
      h("div", { class: "pair" }, planned ? figure("memory", views) : null,
        figure("resident", views)),
      planned ? h("details", {}, h("summary", {}, "Ledger"),
        table(["owner", "tier", "bytes", "of --host"], views[0].ledger, [2, 3])) : null);
  }

  /* One run: cards below each other. Several: the cards of each below its name. */
  const OWN = [["lanes", lanesOf], ["timeline", timelineCard], ["wear", wearCard],
    ["samples", samplesCard], ["log", logCard], ["example", exampleCard],
    ["settings", settingsCard]];
  const folds = new Map();

  function part(key, data, build) {
    const text = JSON.stringify(data), known = parts.get(key);
    if (known && known.text === text) return known.node;
    const node = build() || document.createComment(key);
    if (known && known.node.isConnected) known.node.replaceWith(node);
    parts.set(key, { text, node });
    return node;
  }

  function update(views) {
    const names = views.map((view) => view.name);
    const twice = names.some((name, at) => names.indexOf(name) !== at);
    for (const view of views) view.label = twice ? view.path : view.name;
    const common = [
      part("heading", views.map((v) => [v.name, v.facts, v.state, v.step, v.total]),
        () => heading(views)),
      views.length === 1 && views[0].tiles
        ? part("tiles", views[0].tiles, () => tilesOf(views[0].tiles)) : null,
      part("charts", views.map((v) => v.charts), () => learning(views)),
      part("rewards", views.map((v) => v.charts), () => rewards(views)),
    ].filter((node) => node);
    const own = views.map((view, n) => {
      const nodes = OWN.flatMap(([name, build]) => {
        const made = part(`${name} ${n}`, [view[name], view.log_is_whole], () => build(view));
        return name === "timeline"
          ? [made, ...(views.length === 1 ? [part("memory", [view.memory, view.charts.resident],
            () => memory(views))] : [])] : [made];
      });
      if (views.length === 1) return nodes;
      if (!folds.has(n)) folds.set(n, h("details", { class: "fold" }));
      const fold = folds.get(n);
      if (!fold.childNodes.length) fold.append(h("summary", {}, view.label), ...nodes);
      return [fold];
    }).flat();
    const memories = views.length > 1
      ? [part("memory", views.map((v) => v.charts.resident), () => memory(views))] : [];
    const wanted = [...common, ...memories, ...own];
    const same = wanted.length === element.childNodes.length
      && wanted.every((node, at) => element.childNodes[at] === node);
    if (!same) element.replaceChildren(...wanted);
    for (const log of element.querySelectorAll(".log")) log.scrollTop = log.scrollHeight;
  }
  return { element, update };
}
