/* The page Plan: does it fit, how fast is it, what does it cost, what else can the machine train? */

import { ask, keepInAddress, problem, startFacts } from "./app.js";
import { bar, bytes, card, h, money, note, number, parameters, seconds, table, tilesOf }
  from "./dom.js";

const DEFAULTS = { model: "llama-3-8b", batch: "8", seq: "1024" };
const WAIT_MS = 350;
export const LANES = { compute: ["compute", 0], ssd: ["drives", 1], optimizer: ["optimizer", 2],
  h2d: ["link to the device", 3], d2h: ["link from the device", 4], net: ["network", 5],
  bus: ["main memory", 6] };
const TIERS = { device: "GPU memory", host: "Main memory", ssd: "Drives" };

export async function planPage(place, query, page) {
  const facts = await startFacts();
  const values = new URLSearchParams(query);
  for (const [key, value] of Object.entries(DEFAULTS)) if (!values.get(key)) values.set(key, value);
  if (!values.has("machine") && facts.machines[0].name) values.set("machine", "rtx4090");

  const inputs = {};
  const control = (key, label, input, hint) => {
    inputs[key] = input;
    input.value = values.get(key) || "";
    input.id = `plan-${key}`;
    input.addEventListener("input", changed);
    return h("div", { class: "field" }, h("label", { for: input.id }, label), input,
      hint ? h("small", {}, hint) : null);
  };
  const text = (key, label, placeholder, hint) =>
    control(key, label, h("input", { placeholder, autocomplete: "off" }), hint);
  const choice = (key, label, options) => control(key, label, h("select", {},
    options.map(([value, title]) => h("option", { value }, title))));

  const models = h("datalist", { id: "plan-models" },
    facts.models.map((model) => h("option", { value: model.name }, parameters(model.parameters))),
    facts.files.models.map((name) => h("option", { value: name })));
  const describe = (machine) => `${machine.title} \u2013 ${machine.gpus > 1 ? `${machine.gpus} \u00d7 ` : ""}`
    + `${machine.device_bytes ? bytes(machine.device_bytes) : machine.unified ? "unified" : "CPU"}, `
    + `${bytes(machine.host_bytes)}, ${machine.drives} \u00d7 ${(machine.drive_bytes / 1e12).toPrecision(3)} TB`;
  const model = text("model", "Model", "preset, folder or config.json");
  inputs.model.setAttribute("list", "plan-models");
  const form = card("Plan", models,
    h("div", { class: "fields" }, model,
      choice("machine", "Machine", facts.machines.map((m) => [m.name, describe(m)])),
      text("batch", "Batch", "8"), text("seq", "Sequence length", "1024"),
      text("steps", "Steps", "1000"), text("lora", "LoRA rank", "all weights")),
    h("details", { open: [...values.keys()].some((key) => facts.typed[key]
      || ["ssds", "gpus", "host", "device_memory", "drive_bytes"].includes(key)) || null },
    h("summary", {}, "Other numbers of the machine, and of the run"),
    h("div", { class: "fields" },
      text("host", "Main memory", "the machine's"), text("device_memory", "GPU memory", "the machine's"),
      text("gpus", "GPUs", "the machine's"), text("ssds", "Drives", "the machine's"),
      text("drive_bytes", "Size of a drive", "the machine's"),
      Object.entries(facts.typed).map(([key, hint]) => text(key, key.replace("_", " "), "", hint)),
      choice("dtype", "Type", [["", "of the machine"], ["bf16", "bf16"], ["fp16", "fp16"], ["fp32", "fp32"]]),
      choice("optimizer", "Optimizer", facts.optimizers.map((name, i) => [i ? name : "", name])),
      choice("moments", "Moments", [["", "fp32"], ["bf16", "bf16"], ["int8", "int8"]]),
      choice("base", "Frozen weights", [["", "as they are"], ["int8", "int8"], ["nf4", "nf4"]]),
      choice("minimise", "Minimise", [["", "time"], ["writes", "writes"], ["cost", "cost"]]))));
  const verdict = h("div"), forecast = h("div"), all = h("div");
  place.replaceChildren(form, verdict, forecast, all);

  function asked() {
    const found = new URLSearchParams();
    for (const [key, input] of Object.entries(inputs))
      if (input.value.trim()) found.set(key, input.value.trim());
    return found;
  }

  let turn = new AbortController(), timer = 0;
  page.signal.addEventListener("abort", () => { turn.abort(); clearTimeout(timer); });
  function changed() {
    clearTimeout(timer);
    timer = setTimeout(compute, WAIT_MS);
  }

  async function compute() {
    turn.abort();
    const here = turn = new AbortController();
    const question = asked();
    keepInAddress("plan", question);
    place.dataset.state = "computing";
    delete place.dataset.planned;
    forecast.replaceChildren();
    try {
      const fit = await ask("fit", { query: question, signal: here.signal });
      verdict.replaceChildren(verdictCard(fit));
      table_.ask(question, here.signal);
      if (fit.fits) {
        forecast.replaceChildren(card("Forecast", h("p", { class: "waiting" },
          "Plans and simulates a step. This takes some seconds.")));
        const plan = await ask("plan", { query: question, signal: here.signal });
        forecast.replaceChildren(...forecastCards(plan, fit));
        place.dataset.planned = plan.tokens_per_s;
      }
    } catch (error) {
      if (here.signal.aborted) return;
      (error.stage || verdict).replaceChildren(problem(error));
    }
    place.dataset.state = "ready";
  }

  const table_ = modelTable(facts, all, (name, batch) => {
    inputs.model.value = name;
    inputs.batch.value = batch;
    scrollTo({ top: 0, behavior: "smooth" });
    compute();
  });
  await compute();
}

function verdictCard(fit) {
  const what = `${fit.model}, ${parameters(fit.parameters)} parameters, batch ${number(fit.batch)} \u00d7 `
    + `${number(fit.seq)} tokens, on ${fit.machine}`;
  const largest = fit.largest_batch ? `The largest batch that fits is ${number(fit.largest_batch)}.`
    : "No batch fits.";
  return h("section", { class: `card verdict ${fit.fits ? "yes" : "no"}` },
    h("h2", {}, fit.fits ? "It fits" : "It does not fit"), h("p", {}, what),
    fit.fits ? note(largest) : h("p", { class: "reason" }, fit.reason),
    fit.fits ? null : note(largest),
    fit.command ? h("p", { class: "command" }, h("code", {}, fit.command)) : null);
}

/* Memory by tier: a bar of all owners for each. */
export function memoryCard(ledger, budgets, ranks) {
  const rows = Object.entries(TIERS).map(([tier, title]) => {
    const entries = ledger.filter((entry) => entry.tier === tier && entry.bytes)
      .sort((a, b) => b.bytes - a.bytes);
    if (!entries.length) return null;
    const total = entries.reduce((sum, entry) => sum + entry.bytes, 0);
    const each = tier === "device" ? 1 : ranks;
    const budget = (budgets[tier] || 0) / each || total;
    const whole = Math.max(total, budget);
    const colors = entries.map((_, n) => `var(--c${n % 10})`);
    return h("div", { class: "tier" },
      h("h3", {}, title, h("span", {}, `${bytes(total * each)} of ${bytes(budget * each)}`)),
      h("div", { class: "stack" }, entries.map((entry, n) => h("i", { title:
        `${entry.owner}: ${bytes(entry.bytes)}`, style: { width: `${100 * entry.bytes / whole}%`,
        background: colors[n] } }))),
      h("div", { class: "legend" }, entries.slice(0, 6).map((entry, n) => h("span", {},
        h("i", { style: { background: colors[n] } }), `${entry.owner} ${bytes(entry.bytes)}`))));
  });
  return card("Memory", rows);
}

export function forecastCards(plan, fit) {
  const steps = plan.steps || 1000, total = steps * plan.step_s;
  if (!plan.step_s) return [memoryCard(plan.plan.ledger, fit ? fit.budgets : {}, plan.gpus)];
  const machine = plan.machine_usd_per_s ? total * plan.machine_usd_per_s : null;
  const worn = plan.drive_usd_per_step ? steps * plan.drive_usd_per_step : null;
  const tiles = [
    [number(plan.tokens_per_s), "tokens/s"],
    [seconds(plan.step_s), "per step"],
    [seconds(total), `for ${number(steps)} steps, ${number(steps * plan.batch * plan.seq)} tokens`],
    [`${bytes(steps * plan.written_bytes_per_step)}`, "written to the drives"],
  ];
  if (plan.drive_lives_per_step) {
    const lives = 100 * steps * plan.drive_lives_per_step;
    tiles.push([lives < 0.1 ? "< 0.1 %" : `${number(lives)} %`, "of the drives' rated life"]);
  }
  if (worn !== null || machine !== null)
    tiles.push([money((worn || 0) + (machine || 0)), "drive wear, and the machine over three years"]);
  if (plan.tokens_per_s_per_1000_usd)
    tiles.push([number(plan.tokens_per_s_per_1000_usd), `tokens/s per 1000 USD of ${money(plan.machine_usd)}`]);
  const busy = Object.entries(plan.lane_busy_s).filter(([, time]) => time > 0);
  const lanes = busy.map(([lane, time]) => {
    const [title, n] = LANES[lane] || [lane, 7];
    return [title, seconds(time), `${Math.round(100 * time / plan.step_s)} %`,
      bar(time / plan.step_s, `var(--c${n})`, 1)];
  });
  const binding = (LANES[plan.binding_lane] || [plan.binding_lane])[0];
  const rate = plan.step_s / plan.step_s_without_binding_lane;
  const others = plan.instead.map((other) => [{ code: other.option }, seconds(other.step_s),
    bytes(other.written_bytes_per_step)]);
  return [
    tilesOf(tiles),
    card("What a step is spent on",
      h("p", { class: "advice" }, h("b", {}, binding), ` binds: without it a step would take `
        + `${seconds(plan.step_s_without_binding_lane)} (${rate.toFixed(2)}x)`),
      table(["lane", "busy", "of a step", ""], lanes, [1, 2]),
      plan.step_s_clipped ? note(`If every gradient norm is above the limit: `
        + `${seconds(plan.step_s_clipped)} per step.`) : null,
      others.length ? [h("h3", {}, "Options that write less"),
        table(["option", "per step", "written per step"], others, [1, 2])] : null),
    memoryCard(plan.plan.ledger, fit ? fit.budgets : {}, plan.gpus),
  ];
}

/* The table of all models: which batches fit. A row is asked for at a time. */
function modelTable(facts, place, choose) {
  let last = "";
  return {
    async ask(question, signal) {
      const machine = new URLSearchParams(question);
      for (const key of ["model", "batch", "steps"]) machine.delete(key);
      if (String(machine) === last) return;
      last = String(machine);
      const rows = facts.models.map((model) => ({ model, row: h("tr", {},
        h("td", {}, model.name), h("td", { class: "n" }, parameters(model.parameters)),
        h("td", { class: "soft" }, "\u2026")) }));
      const head = ["model", "parameters", ...facts.batches.map((batch) => `batch ${batch}`), "largest"];
      place.replaceChildren(card("What can this machine train?",
        note("Which batches fit with these settings. A click plans one."),
        h("div", { class: "wide" }, h("table", { class: "models" },
          h("thead", {}, h("tr", {}, head.map((name, n) => h("th", { class: n ? "n" : null }, name)))),
          h("tbody", {}, rows.map(({ row }) => row))))));
      for (const { model, row } of rows) {
        machine.set("model", model.name);
        machine.set("batch", "1");
        try {
          const found = await ask("model", { query: machine, signal });
          const cells = Object.entries(found.batches).map(([batch, fits]) => h("td", { class: "n" },
            fits ? h("button", { class: "fits", "aria-label": `plan ${model.name}, batch ${batch}`,
              onclick: () => choose(model.name, batch) }, "fits") : h("span", { class: "soft" }, "\u2013")));
          row.replaceChildren(row.children[0], row.children[1], ...cells, h("td", { class: "n" },
            found.largest_batch ? h("button", { class: "fits",
              onclick: () => choose(model.name, found.largest_batch) }, number(found.largest_batch))
              : h("span", { class: "soft" }, "none")));
          row.className = found.largest_batch ? "" : "out";
        } catch (error) {
          if (signal.aborted) { last = ""; return; }
          row.lastChild.textContent = error.message;
          row.lastChild.colSpan = facts.batches.length + 1;
        }
      }
      place.dataset.done = "";
    },
  };
}
