/* The page Try it: a prompt answered by the weights of a run before and after its training. */

import { address, ask, problem } from "./app.js";
import { card, h, note } from "./dom.js";

export async function tryPage(place, query, page) {
  const name = query.get("name");
  const field = (label, value, size) => {
    const input = h("input", { size, value });
    return [h("label", {}, label, " ", input), input];
  };
  const prompt = h("textarea", { rows: 4, "aria-label": "prompt", placeholder: "A prompt" });
  prompt.value = query.get("prompt") || "";
  const [tokensLabel, tokens] = field("longest answer, tokens", query.get("tokens") || "64", 5);
  const [heatLabel, heat] = field("temperature", query.get("temperature") || "0", 4);
  const [seedLabel, seed] = field("seed", query.get("seed") || "0", 4);
  const answers = h("div", { class: "pair answers" });
  const button = h("button", { class: "main", onclick: go }, "Answer");
  place.replaceChildren(
    h("a", { class: "back", href: address("run", new URLSearchParams({ name })) }, `\u2190 ${name}`),
    h("h1", {}, "Try it"),
    card("Prompt", prompt, h("div", { class: "actions" }, tokensLabel, heatLabel, seedLabel, button),
      note("Both answers are computed on this machine, with weights that are streamed from SSD; "
        + "loading takes a while.")), answers);

  async function go() {
    button.disabled = true;
    const body = { name, prompt: prompt.value, tokens: tokens.value, temperature: heat.value,
      seed: seed.value };
    const both = ["before", "after"].map((which) => [which, h("pre", { class: "said",
      "data-answer": which }, "computing \u2026")]);
    answers.replaceChildren(...both.map(([which, text]) => card(which === "before"
      ? "Before: the model that the run began with" : "After: the run's last committed step", text)));
    for (const [which, text] of both) {
      try {
        const found = await ask("answer", { body: { ...body, which }, signal: page.signal });
        text.textContent = found.text || "(an empty answer)";
        text.dataset.done = "";
      } catch (error) {
        if (page.signal.aborted) return;
        text.replaceWith(problem(error));
      }
    }
    button.disabled = false;
  }
}
