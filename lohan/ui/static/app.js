/* The pages of `lohan ui`. The part of the address after # names the page and its settings. */

import { h } from "./dom.js";
import { runsPage } from "./runs.js";
import { onePage } from "./runs.js";
import { planPage } from "./plan.js";
import { newPage } from "./new.js";
import { tryPage } from "./try.js";

const PAGES = { runs: runsPage, run: onePage, plan: planPage, new: newPage, try: tryPage };

/* Ask the server. An answer that is an error is thrown with the server's text. */
export async function ask(path, { query, body, signal } = {}) {
  const address = `api/${path}` + (query ? `?${query}` : "");
  const options = body === undefined ? { signal } : {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" },
  };
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("lohan ui does not answer; start it again and open its new address");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

let facts = null;
export async function startFacts() {
  facts = facts || ask("start");
  return facts;
}

/* The same, with the model folders and data files that there are now. */
export function freshFacts() {
  facts = null;
  return startFacts();
}

/* Call `work` now and every `ms`, until the page is left. Its failures are shown in `place`.
   Work that takes long is called less often, so that it takes at most a tenth of the time that the
   training could use. */
export function repeat(page, place, ms, work) {
  let timer = 0;
  async function turn() {
    const began = performance.now();
    try {
      if (!document.hidden) await work();
      if (!page.signal.aborted) place.replaceChildren();
    } catch (error) {
      if (page.signal.aborted) return;
      place.replaceChildren(problem(error));
    }
    if (!page.signal.aborted) timer = setTimeout(turn, Math.max(ms, 9 * (performance.now() - began)));
  }
  page.signal.addEventListener("abort", () => clearTimeout(timer));
  return turn();
}

export const problem = (error) => h("p", { class: "problem", role: "alert" }, error.message);

export function address(page, query) {
  const text = query ? String(query) : "";
  return `#/${page}` + (text ? `?${text}` : "");
}

/* Put settings into the address without a new page. */
export function keepInAddress(page, query) {
  history.replaceState(null, "", address(page, query));
}

let leave = new AbortController();

async function show() {
  leave.abort();
  leave = new AbortController();
  const [name, text] = location.hash.replace(/^#\/?/, "").split("?");
  const page = PAGES[name] ? name : "runs";
  for (const link of document.querySelectorAll("nav [data-page]")) {
    const inside = page === "run" || page === "try" ? "runs" : page;
    link.toggleAttribute("aria-current", link.dataset.page === inside);
  }
  const place = document.getElementById("page"), here = leave;
  try {
    const { root } = await startFacts();
    document.getElementById("root").textContent = root;
    if (!here.signal.aborted)
      await PAGES[page](place, new URLSearchParams(text || ""), { signal: here.signal });
  } catch (error) {
    facts = null;
    if (!here.signal.aborted) place.replaceChildren(problem(error));
  }
}

addEventListener("hashchange", show);
show();
