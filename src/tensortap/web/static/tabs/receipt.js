// Receipt: what it cost, what was dropped, how fast records came.
import { ask } from "../api.js";
import { bytes, count, empty, fill, h, seconds } from "../dom.js";
import { model } from "../model.js";

/** @type {any} */ let body;

/** @type {import("../main.js").Tab} */
export const receipt = {
  id: "receipt",
  title: "Receipt",

  mount(panel) {
    body = h("div", { style: "display: grid; gap: 12px" });
    panel.append(body);
  },

  async show() {
    const run = model.run;
    if (!run) return;
    const found = await ask("receipt", { run: run.id });
    fill(body, found.live ? live(found) : disk(found), bill(found), found.live ? clients(found) : dropped(found));
  },
};

/** @param {[string, any, string?][]} pairs */
const figures = (pairs) => h("dl", { class: "figures" }, ...pairs.map(([k, v, c]) => h("div", { class: c ?? "" }, h("dt", {}, k), h("dd", {}, v))));
/** @param {number} n @param {number} s */
const rate = (n, s) => (s > 0 ? `${count(Number((n / s).toPrecision(3)))} / s` : "–");

/** @param {any} f */
const disk = (f) => figures([
  ["records", count(f.records)], ["ranks", `${f.ranks} of ${f.world_size}`],
  ["steps", count(f.steps)], ["time", seconds(f.seconds)], ["records", rate(f.records, f.seconds)], ["steps", rate(f.steps, f.seconds)],
  ["tables", bytes(f.nbytes.records)], ["tensors", bytes(f.nbytes.tensors)],
  ["dropped", count(f.dropped), f.dropped ? "bad" : ""], ...(f.cut ? [/** @type {[string, any, string]} */ (["cut off", bytes(f.cut), "warn"])] : []),
]);

/** @param {any} f */
const live = (f) => figures([
  ["records", count(f.records)], ["received", bytes(f.nbytes)], ["held", `${bytes(f.held_nbytes)} of ${bytes(f.bound)}`],
  ["records", rate(f.records, f.seconds)], ["up for", seconds(f.seconds)],
  ["made room", count(f.evicted), f.evicted ? "warn" : ""],
  ...Object.entries(f.refused).map(([k, v]) => /** @type {[string, any, string]} */ ([`refused: ${k}`, count(Number(v)), "warn"])),
]);

/** @param {any} f */
function bill(f) {
  const b = f.bill;
  if (!b) return h("div", { class: "card" }, h("h3", {}, "What it cost"), h("span", { class: "dim" }, f.live ? "The training program knows: print(tap.receipt()) there." : "It is known when the run has ended."));
  const where = Object.entries(b.activities).filter(([, s]) => Number(s) > 0).sort((x, y) => Number(y[1]) - Number(x[1]));
  return h("div", { class: "card" }, h("h3", {}, `What it cost the training thread${b.rank == null ? "" : ` of rank ${b.rank}, which paid most`}`), figures([
    ["in all", seconds(b.seconds)], ["a step", b.steps ? seconds(b.seconds_per_step) : "–"], ["captured", count(b.captured)], ["tracked", count(b.tracked)],
    ["skipped", count(b.skipped)], ["dropped", count(b.dropped), b.dropped ? "bad" : ""],
    ...Object.entries(b.reasons).filter(([, n]) => n).map(([k, n]) => /** @type {[string, any, string]} */ ([`dropped: ${k}`, count(Number(n)), "bad"])),
  ]), h("table", { style: "margin-top: 10px; width: auto" }, h("tbody", {}, ...where.map(([k, s]) => h("tr", {}, h("td", {}, k), h("td", { class: "num", style: "width: auto" }, seconds(Number(s))))))));
}

/** @param {any} f */
function dropped(f) {
  if (!f.dropped) return h("div", { class: "card" }, empty("Nothing was dropped", "Every value that was captured is in the run."));
  return h("div", { class: "card" }, h("h3", {}, "Dropped: there was no room when they were captured"), h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Name"), h("th", { scope: "col", class: "num" }, "Values"))),
    h("tbody", {}, ...f.dropped_names.map((/** @type {[string, number]} */ [n, c]) => h("tr", {}, h("td", {}, n), h("td", { class: "num" }, count(c)))))));
}

/** @param {any} f */
function clients(f) {
  return h("div", { class: "card" }, h("h3", {}, "Programs"), h("table", {},
    h("thead", {}, h("tr", {}, ...["Program", "Rank", "Records", "Bytes", "Dropped", "Reasons"].map((w, i) => h("th", { scope: "col", class: i > 1 ? "num" : "" }, w)))),
    h("tbody", {}, ...f.programs.map((/** @type {any} */ p) => h("tr", {}, h("td", {}, p.program), h("td", {}, `${p.rank} of ${p.world_size}`),
      ...[count(p.records), bytes(p.nbytes), count(p.dropped), Object.entries(p.reasons).filter(([, n]) => n).map(([k, n]) => `${count(Number(n))} ${k}`).join(", ")].map((w) => h("td", { class: "num" }, w)))))));
}
