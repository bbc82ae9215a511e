/* The pages Runs and Run. */

import { address, ask, problem, repeat } from "./app.js";
import { bar, bytes, card, h, note, number, seconds } from "./dom.js";
import { sparkline } from "./charts.js";
import { runPage, stateBadge } from "./run.js";

const EVERY_MS = 2000;

export async function runsPage(place, query, page) {
  const chosen = new Set();
  const trouble = h("div"), list = h("div"), compare = h("a", { class: "button" }, "Compare");
  function drawCompare() {
    const names = new URLSearchParams([...chosen].map((name) => ["name", name]));
    compare.hidden = chosen.size < 2;
    compare.href = address("run", names);
    compare.textContent = `Compare ${chosen.size} runs`;
  }
  drawCompare();
  place.replaceChildren(h("div", { class: "head" }, h("h1", {}, "Runs"), compare,
    h("a", { class: "button main", href: "#/new" }, "New run")), trouble, list);
  let shown = "";
  await repeat(page, trouble, EVERY_MS, async () => {
    const found = await ask("runs", { signal: page.signal });
    const text = JSON.stringify(found);
    if (text === shown) return;
    shown = text;
    const starts = found.starts.filter((start) => start.state === "starting"
      || Date.now() / 1000 - start.time < 86400);
    if (!found.runs.length && !starts.length) {
      list.replaceChildren(card("No runs yet", h("p", {},
        "Runs below this folder appear here, however they were started. ",
        h("a", { href: "#/plan" }, "Plan"), " shows what a machine can train; ",
        h("a", { href: "#/new" }, "New run"), " starts one.")));
      return;
    }
    list.replaceChildren(h("div", { class: "runs" },
      starts.map(startCard), found.runs.map((run) => runCard(run, chosen, drawCompare))));
  });
}

function startCard(start) {
  return h("article", { class: "card row" },
    h("div", { class: "title" }, h("b", {}, start.name), stateBadge(start.state)),
    h("pre", { class: "log short" }, start.log.slice(-12).join("\n")));
}

function fact(value, meaning) {
  return h("div", { class: "fact" }, h("b", {}, value), h("span", {}, meaning));
}

function runCard(run, chosen, changed) {
  const link = h("a", { href: address("run", new URLSearchParams({ name: run.name })) }, run.name);
  if (run.state === "unreadable") {
    return h("article", { class: "card row" },
      h("div", { class: "title" }, h("b", {}, run.name), stateBadge(run.state)), note(run.words));
  }
  const box = h("input", { type: "checkbox", "aria-label": `compare ${run.name}` });
  box.checked = chosen.has(run.name);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(run.name); else chosen.delete(run.name);
    changed();
  });
  const has = (value) => value !== null && value !== undefined;
  const facts = [
    fact(run.total ? `${number(run.step)} of ${number(run.total)}` : number(run.step), "steps"),
    has(run.loss) ? fact(run.loss.toPrecision(4), "loss") : null,
    has(run.tokens_per_s) ? fact(number(run.tokens_per_s), "tokens/s") : null,
    has(run.left_s) ? fact(seconds(run.left_s), "left") : null,
    has(run.rss_bytes) ? fact(bytes(run.rss_bytes), "resident") : null,
    has(run.planned_bytes)
      ? fact(`${bytes(run.planned_bytes)} of ${bytes(run.host_bytes)}`, "planned of --host") : null,
  ];
  return h("article", { class: "card row", "data-run": run.name },
    h("div", { class: "title" }, box, link, stateBadge(run.state),
      h("span", { class: "soft" }, [run.model, (run.began || "").replace("T", " ").slice(0, 16)]
        .filter((text) => text).join(" \u00b7 "))),
    h("div", { class: "facts" }, facts, run.losses.length > 1 ? sparkline(run.losses) : null),
    run.total ? bar(run.step / run.total, "var(--accent)", run.state === "finished" ? 0.4 : 1) : null,
    run.state === "crashed" || run.state === "failed" ? note(run.words) : null);
}

// -- One run, or several in the same charts -------------------------------------------------------

export async function onePage(place, query, page) {
  const names = query.getAll("name");
  const trouble = h("div"), actions = h("div", { class: "actions" }), shown = runPage();
  const jobs = h("div");
  place.replaceChildren(h("a", { class: "back", href: "#/runs" }, "\u2190 all runs"), trouble,
    actions, jobs, shown.element);
  const answer = h("div", { class: "answer" });
  const buttons = names.length === 1 ? actionsOf(names[0], answer, page) : null;
  if (buttons) actions.append(buttons.element, answer);
  const wanted = new URLSearchParams(names.map((name) => ["name", name]));
  await repeat(page, trouble, EVERY_MS, async () => {
    const { runs } = await ask("run", { query: wanted, signal: page.signal });
    shown.update(runs);
    if (buttons) buttons.show(runs[0]);
    jobs.replaceChildren(...runs.flatMap((run) => run.jobs || []).slice(0, 1).map(jobCard));
    place.dataset.step = runs[0].step;
  });
}

function jobCard(job) {
  const how = job.running ? "running" : job.code ? "failed" : "ended";
  return h("details", { class: "card job", open: job.running || job.code ? true : null },
    h("summary", {}, `lohan ${job.kind} \u00b7 ${how}`),
    h("pre", { class: "log short" }, job.log.join("\n")));
}

/* The buttons of a run: {element, show(view)}. */
function actionsOf(name, answer, page) {
  let stopping = false, before = "";
  const say = (text) => answer.replaceChildren(h("p", { class: "said-so", role: "status" }, text));
  async function act(path, body, text) {
    try {
      await ask(path, { body: { name, ...body }, signal: page.signal });
      say(text);
    } catch (error) {
      answer.replaceChildren(problem(error));
    }
  }
  const stop = h("button", { class: "warn", onclick: () => {
    if (stopping && !confirm("Stop at once? The step in flight is lost; committed steps are safe."))
      return;
    act("stop", {}, stopping ? "Stops at once."
      : "It finishes its step, commits and ends, as after Ctrl-C.");
    stopping = true;
  } }, "Stop");
  const steps = h("input", { size: "7", inputmode: "numeric", placeholder: "total",
    "aria-label": "new total number of steps" });
  const resume = h("span", { class: "group" }, h("button", { onclick: () => {
    act("resume", { steps: steps.value }, "It continues from its last committed step.");
    stopping = false;
  } }, "Resume"), h("label", {}, "to step ", steps));
  const out = h("input", { size: "22", "aria-label": "folder of the export" });
  out.value = `${name}-export`;
  const exported = h("span", { class: "group" }, h("button", { onclick: () =>
    act("export", { out: out.value }, `The weights are written to ${out.value}.`) }, "Export"),
  h("label", {}, "to ", out));
  const report = h("button", { onclick: () =>
    act("report", {}, `A self-contained page is written to ${name}/report.html.`) }, "Report");
  const tried = h("a", { class: "button",
    href: address("try", new URLSearchParams({ name })) }, "Try it");
  const element = h("div", { class: "buttons" }, stop, resume, exported, tried, report);
  return {
    element,
    show(view) {
      const state = view.state;
      if (!state.active) stopping = false;
      if (before && before !== state.name && state.name !== "starting") answer.replaceChildren();
      before = state.name;
      stop.hidden = !state.active;
      resume.hidden = !state.resumable;
      exported.hidden = !state.exportable;
      tried.hidden = !(state.exportable && view.prompted);
      report.hidden = !view.step;
    },
  };
}
