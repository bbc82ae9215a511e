/* The file of `lohan report`: draw the runs that are embedded in it. */

import { h } from "./dom.js";
import { runPage } from "./run.js";

function drawReport() {
  const { runs } = JSON.parse(document.getElementById("data").textContent);
  const page = runPage();
  const paths = runs.map((run) => run.path).join(", ");
  document.getElementById("page").append(h("p", { class: "over" }, "LoHan run report"),
    page.element, h("footer", {}, `${paths} \u00b7 made by lohan report; this file loads nothing.`));
  page.update(runs);
  document.documentElement.dataset.drawn = document.querySelectorAll("[data-chart]").length;
}

drawReport();
