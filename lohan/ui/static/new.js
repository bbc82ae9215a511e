/* The page New run: a form made from the settings, the data as the model sees it, and the plan. */

import { address, ask, freshFacts, keepInAddress, problem } from "./app.js";
import { card, coded, h, note, seconds, number } from "./dom.js";
import { forecastCards } from "./plan.js";

const WAIT_MS = 300;
const SECTIONS = { "": "Run", train: "Training", preference: "Preferences", budget: "Budget",
  eval: "Evaluation", sample: "Samples", output: "Output" };

/* Settings of evaluations have short names, such as split, that need their section. */
function titleOf(info) {
  const name = info.name.replace(/_/g, " ");
  return info.first && info.section === "eval" ? `evaluation ${name}` : name;
}

export async function newPage(place, query, page) {
  const facts = await freshFacts();
  const inputs = new Map();
  const name = h("input", { id: "new-name", placeholder: "my-run", autocomplete: "off" });
  name.value = query.get("name") || "";
  name.addEventListener("input", changed);

  function field(info) {
    const id = `new-${info.key.replace(".", "-")}`;
    const shown = info.default !== "" ? info.default : info.required ? "" : "not given";
    let input, list = null;
    if (info.widget === "choice") {
      input = h("select", { id }, h("option", { value: "" }, shown || "choose"),
        info.options.filter((one) => String(one) !== info.default)
          .map((one) => h("option", { value: one }, one)));
    } else if (info.widget === "lines" && info.key !== "data") {
      input = h("textarea", { id, rows: 2, placeholder: "one per line" });
    } else {
      input = h("input", { id, placeholder: shown || info.metavar, autocomplete: "off" });
      const options = info.key === "model" ? facts.files.models
        : info.key === "data" || info.key === "eval.data" ? facts.files.data : info.options || [];
      if (options.length) {
        list = h("datalist", { id: `${id}-list` }, options.map((value) => h("option", { value })));
        input.setAttribute("list", list.id);
      }
    }
    input.value = query.get(info.key) || "";
    input.addEventListener("input", changed);
    inputs.set(info.key, input);
    return h("div", { class: "field" },
      h("label", { for: id }, titleOf(info), info.required ? h("em", {}, " required") : null),
      input, list, h("small", {}, coded(info.help)));
  }

  const first = facts.fields.filter((info) => info.first).map(field);
  const more = Object.entries(SECTIONS).map(([section, title]) => {
    const rest = facts.fields.filter((info) => info.section === section && !info.first);
    return rest.length ? h("details", {}, h("summary", {}, `${title}: ${rest.length} settings`),
      h("div", { class: "fields" }, rest.map(field))) : null;
  });
  const trouble = h("div"), file = h("div"), checked = h("div");
  const check = h("button", { onclick: dryRun }, "Check data and plan");
  const start = h("button", { class: "main", onclick: train }, "Start training");
  place.replaceChildren(h("h1", {}, "New run"), h("div", { class: "split" },
    h("div", {}, h("section", { class: "card" },
      h("div", { class: "fields" }, h("div", { class: "field" }, h("label", { for: "new-name" },
        "name", h("em", {}, " required")), name,
      h("small", {}, "The run's folder below this one. Its settings file is NAME.toml.")), first),
      more)),
    h("div", { class: "side" }, trouble, file, h("div", { class: "actions" }, check, start), checked)));

  const values = () => Object.fromEntries([...inputs].map(([key, input]) => [key, input.value])
    .filter(([, value]) => value.trim()));
  const body = () => ({ name: name.value, values: values() });

  let timer = 0;
  page.signal.addEventListener("abort", () => clearTimeout(timer));
  function changed() {
    clearTimeout(timer);
    timer = setTimeout(look, WAIT_MS);
  }

  /* Check the settings as the command line does; this takes milliseconds. */
  async function look() {
    keepInAddress("new", new URLSearchParams({ ...(name.value ? { name: name.value } : {}), ...values() }));
    try {
      const found = await ask("check", { body: body(), signal: page.signal });
      trouble.replaceChildren();
      file.replaceChildren(card(found.file, h("pre", {}, found.toml)));
      start.disabled = check.disabled = false;
    } catch (error) {
      if (page.signal.aborted) return;
      const empty = !name.value && !Object.keys(values()).length;
      trouble.replaceChildren(empty ? card("Settings", note(
        "Choose a name, a model and data. Everything else has a default.")) : problem(error));
      file.replaceChildren();
      start.disabled = check.disabled = true;
    }
  }

  async function dryRun() {
    check.disabled = true;
    checked.replaceChildren(card("Data and plan", h("p", { class: "waiting" },
      "Reads the data, traces the model and plans the run. This takes some seconds.")));
    try {
      const { plan, notes } = await ask("dry-run", { body: body(), signal: page.signal });
      const at = notes.findIndex((line) => line.startsWith("first example"));
      const example = at < 0 ? [] : notes.slice(at).filter((line, n) => n === 0 || line.startsWith("  "));
      const data = notes.filter((line) => !example.includes(line) && !/: done in .* s$/.test(line));
      checked.replaceChildren(
        card("Data", data.map((line) => h("p", {}, line)),
          example.length ? [h("h3", {}, example[0]), h("pre", { class: "example" },
            example.slice(1).map((line) => line.slice(2)).join("\n"))] : null),
        card("Plan", h("p", {}, `${number(plan.steps)} steps. `, plan.step_s
          ? `About ${seconds(plan.steps * plan.step_s)}.`
          : coded("How fast is not known; `lohan profile` measures this machine."))),
        ...forecastCards(plan, { budgets: { host: plan.host_budget_bytes } }));
      checked.dataset.done = "";
    } catch (error) {
      if (page.signal.aborted) return;
      checked.replaceChildren(problem(error));
    }
    check.disabled = false;
  }

  async function train() {
    start.disabled = true;
    try {
      const begun = await ask("train", { body: body(), signal: page.signal });
      location.hash = address("runs", new URLSearchParams({ begun: begun.name }));
    } catch (error) {
      if (page.signal.aborted) return;
      trouble.replaceChildren(problem(error));
      start.disabled = false;
    }
  }
  await look();
}
