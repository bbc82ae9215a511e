/* Elements and texts. Every text becomes a text node, so that none of them is read as HTML. */

export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "value") element.value = value;
    else if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined
    && child !== ""));
  return element;
}

/* A cell is a text, {code: text}, or a list of these. */
export function cell(value) {
  if (Array.isArray(value)) return value.map(cell).flat();
  if (value && value.code !== undefined) return [h("code", {}, value.code)];
  return [String(value)];
}

/* A text with `code` in it. */
export function coded(text) {
  return text.split("`").map((part, at) => at % 2 ? h("code", {}, part) : part);
}

export function card(title, ...parts) {
  return h("section", { class: "card" }, title ? h("h2", {}, title) : null, ...parts);
}

export function note(text) {
  return text ? h("p", { class: "note" }, text) : null;
}

export function table(head, rows, numbers = []) {
  const line = (tag, cells) => h("tr", {}, cells.map((value, at) =>
    h(tag, { class: numbers.includes(at) ? "n" : null },
      value instanceof Node ? value : cell(value))));
  const top = head.some((name) => name) ? h("thead", {}, line("th", head)) : null;
  return h("div", { class: "wide" },
    h("table", {}, top, h("tbody", {}, rows.map((row) => line("td", row)))));
}

export function tilesOf(pairs) {
  return h("section", { class: "tiles" }, pairs.map(([value, meaning]) =>
    h("div", { class: "tile" }, h("b", {}, value), h("span", {}, meaning))));
}

export function bar(share, color, opacity) {
  const width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
  return h("div", { class: "bar" }, h("i", { style: { width, background: color, opacity } }));
}

// -- Numbers --------------------------------------------------------------------------------------

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  let at = 0;
  while (Math.abs(value) >= 1024 && at < 5) { value /= 1024; at += 1; }
  return (value >= 100 || at === 0 ? value.toFixed(0) : value.toPrecision(3)) + " " + UNITS[at];
}

export function number(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e13)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}

export const percent = (value) => `${+value.toPrecision(3)} %`;

export const money = (usd) => usd < 0.01 ? "less than a cent"
  : usd < 10 ? `${usd.toFixed(2)} USD` : `${Math.round(usd).toLocaleString("en")} USD`;

export function seconds(value) {
  if (value < 60) return `${+value.toPrecision(3)} s`;
  const minutes = Math.floor(Math.round(value) / 60), rest = Math.round(value) % 60;
  if (minutes < 60) return `${minutes} min ${rest} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 100 ? `${hours} h ${minutes % 60} min` : `${(value / 86400).toFixed(1)} days`;
}

export const short = (value) => `${+value.toPrecision(3)} s`;

export const parameters = (count) => count >= 1e8 ? `${+(count / 1e9).toPrecision(3)}B`
  : count >= 1e5 ? `${+(count / 1e6).toPrecision(3)}M` : count.toLocaleString("en");
