// Compare: this run and another; the report is the one of `tensortap compare --html`.
import { Failed, ask } from "../api.js";
import { choose, count, empty, fill, h } from "../dom.js";
import { model } from "../model.js";
import { get, set } from "../state.js";

/** @type {any} */ let a;
/** @type {any} */ let b;
/** @type {any} */ let body;
/** @type {Record<string, any>} */
const fields = {};
let job = "";
let drawn = "";

/** @type {import("../main.js").Tab} */
export const compare = {
  id: "compare",
  title: "Compare",

  mount(panel) {
    a = h("select", { "aria-label": "This run", onchange: () => set({ run: a.value, step: null, span: "", name: [] }, true) });
    b = h("select", { "aria-label": "The other run", onchange: () => set({ other: b.value }) });
    /** @param {string} key @param {string} label @param {string} hint @param {string} width */
    const field = (key, label, hint, width) => {
      fields[key] = h("input", { type: "text", placeholder: hint, "aria-label": label, style: `width: ${width}`, onchange: () => set({ [key]: fields[key].value.trim() }) });
      return h("label", {}, h("span", {}, label), fields[key]);
    };
    body = h("div", { style: "display: contents" });
    panel.append(h("div", { class: "tools" }, h("label", {}, a), h("span", { class: "dim" }, "with"), h("label", {}, b),
      field("rtol", "rtol", "1e-5", "62px"), field("atol", "atol", "1e-8", "62px"),
      field("names", "names", "regex", "90px"), field("steps", "steps", "10:20", "64px")), body);
  },

  async show(state) {
    const all = model.shown.map((s) => /** @type {[string, string]} */ ([s.id, s.title]));
    choose(a, all, state.run);
    const others = all.filter(([id]) => id !== state.run);
    choose(b, [["", "choose a run"], ...others], state.other);
    for (const [key, input] of Object.entries(fields)) if (document.activeElement !== input) input.value = /** @type {any} */ (state)[key];
    const key = JSON.stringify([state.run, state.other, state.rtol, state.atol, state.names, state.steps]);
    const frame = body.querySelector("iframe");
    if (key === drawn && (!frame || frame.dataset.theme === document.documentElement.dataset.theme)) return;
    drawn = key;
    if (!others.length) return fill(body, h("div", { class: "card" }, empty("Only one run is shown", "Open the folder that both are in, or both of them:", "tensortap view runs/a runs/b")));
    if (!state.other || state.other === state.run) return fill(body, h("div", { class: "card" }, empty("Two runs, side by side", "Choose the other run: you get the first tensor that differs, when, and by how much.")));
    try {
      const said = await ask("compare/start", { run: state.run, other: state.other, rtol: state.rtol, atol: state.atol, names: state.names, steps: state.steps }, { method: "POST" });
      job = said.job;
      await tell(said);
    } catch (error) {
      if (!(error instanceof Failed)) throw error;
      fill(body, h("div", { class: "card" }, empty("They cannot be compared", error.message)));
    }
  },

  hear(news) {
    if (job && news.jobs?.[job]) void tell(news.jobs[job]);
  },
};

/** @param {any} said */
async function tell(said) {
  if (said.state === "running") return running(said);
  if (said.state === "cancelled") return fill(body, h("div", { class: "card" }, empty("Cancelled", "Change something above to compare again."), again()));
  if (said.state === "failed") return fill(body, h("div", { class: "card" }, empty("They cannot be compared", said.error)));
  await result(await ask("compare", { job }));
}

const again = () => h("button", { type: "button", onclick: () => { drawn = ""; void compare.show(get(), new Set()); } }, "Compare again");

/** @param {any} said */
function running(said) {
  const bar = /** @type {any} */ (body.querySelector("progress"));
  const words = said.total ? `${count(said.done)} of ${count(said.total)} records` : "reading both runs";
  if (bar) {
    if (said.total) bar.value = said.done / said.total;
    body.querySelector(".dim").textContent = words;
    return;
  }
  const cancel = h("button", { type: "button", onclick: () => ask("compare/cancel", { job }, { method: "POST" }) }, "Cancel");
  fill(body, h("div", { class: "card" }, h("div", { class: "tools" }, h("h3", {}, "Comparing"), h("span", { class: "dim" }, words), h("span", { class: "grow" }), cancel),
    h("progress", { "aria-label": "Progress of the comparison", max: "1" })));
}

/** @param {any} found */
function result(found) {
  const first = found.first;
  const theme = document.documentElement.dataset.theme ?? "light";
  const metric = first?.kind === "Metric";
  const where = first && metric ? h("div", { class: "tools" },
    h("button", { type: "button", class: "first", onclick: () => set({ step: first.step, follow: false }) }, `Go to step ${count(first.step)}`),
    h("span", { class: "dim" }, `first: ${first.name} at step ${count(first.step)}`)) : first && h("div", { class: "tools" },
    h("button", { type: "button", class: "first", onclick: () => set({ tab: "tensors", name: [first.name], kind: first.kind, step: first.step, rank: first.rank < 0 ? "" : String(first.rank), minus: "run", follow: false, at: "", axes: "", zoom: "", leaf: "" }, true) }, "Show the difference"),
    h("button", { type: "button", onclick: () => set({ tab: "lines", name: [first.name], kind: first.kind, step: first.step, follow: false }, true) }, "Show its lines"),
    h("span", { class: "dim" }, `first: ${first.name} (${first.kind.replaceAll("_", " ")}) at step ${count(first.step)}`));
  const frame = h("iframe", { class: "report", title: "What the comparison found", src: `/api/compare/report?theme=${theme}&job=${encodeURIComponent(found.job)}`, "data-theme": theme, sandbox: "allow-scripts" });
  fill(body, where, frame);
}
