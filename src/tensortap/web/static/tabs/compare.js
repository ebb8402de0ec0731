// Compare: this run with another; the report is that of `tensortap compare --html`.
import { RequestError, request } from "../api.js";
import { button, card, count, dim, emptyCard, fill, grow, h, kindText, labelled, select, setOptions, tools } from "../dom.js";
import { model } from "../model.js";
import { WHOLE_TENSOR, get, set } from "../state.js";

const FIELDS = { rtol: ["1e-5", 62], atol: ["1e-8", 62], names: ["regex", 90], steps: ["10:20", 64] }; // placeholder, width
const fields = Object.fromEntries(Object.entries(FIELDS).map(([key, [placeholder, width]]) => [key, h("input", {
  type: "text", placeholder, "aria-label": key, style: `width: ${width}px`, onchange: (event) => set({ [key]: event.target.value.trim() }),
})]));
const first = select("This run", (value) => set({ run: value, step: null, span: "", name: [] }, true));
const second = select("The other run", (value) => set({ other: value }));
const body = h("div", { class: "contents" });
let job = "", drawn = "";

/** @type {import("../main.js").Tab} */
export const compare = {
  id: "compare",
  title: "Compare",
  mount: (panel) => panel.append(tools(first, dim("with"), second, Object.entries(fields).map(([key, input]) => labelled(key, input))), body),

  async show(state) {
    const runs = model.entries.map((entry) => [entry.id, entry.title]);
    const others = runs.filter(([id]) => id !== state.run);
    setOptions(first, runs, state.run);
    setOptions(second, [["", "choose a run"], ...others], state.other);
    for (const [key, input] of Object.entries(fields)) if (document.activeElement !== input) input.value = state[key];
    const { run, other, rtol, atol, names, steps } = state, parameters = { run, other, rtol, atol, names, steps };
    const key = JSON.stringify(parameters), frame = body.querySelector("iframe");
    if (key === drawn && (!frame || frame.dataset.theme === document.documentElement.dataset.theme)) return;
    drawn = key;
    if (!others.length) return fill(body, emptyCard("There is only one run", "Open the folder that contains both, or both runs:", "tensortap view runs/a runs/b"));
    if (!other || other === run) return fill(body, emptyCard("Compare two runs", "Choose the other run to see the first tensor that differs, at which step, and by how much."));
    try {
      const state = await request("compare/start", parameters, { method: "POST" });
      job = state.job;
      await showJob(state);
    } catch (error) {
      if (!(error instanceof RequestError)) throw error;
      showFailure(error.message);
    }
  },

  receive(news) {
    if (job && news.jobs?.[job]) void showJob(news.jobs[job]);
  },
};

const showFailure = (reason) => fill(body, emptyCard("These runs cannot be compared", reason));

async function showJob(state) {
  if (state.state === "running") showProgress(state);
  else if (state.state === "failed") showFailure(state.error);
  else if (state.state === "done") showResult(await request("compare", { job }));
  else fill(body, emptyCard("Cancelled"), button("Compare again", () => {
    drawn = "";
    void compare.show(get());
  }));
}

function showProgress({ done, total }) {
  const text = total ? `${count(done)} of ${count(total)} records` : "reading both runs";
  if (!body.querySelector("progress")) {
    const cancel = button("Cancel", () => request("compare/cancel", { job }, { method: "POST" }));
    fill(body, card(tools(h("h3", {}, "Comparing"), dim(), grow(), cancel), h("progress", { "aria-label": "Progress of the comparison", max: "1" })));
  }
  fill(body.querySelector(".dim"), text);
  if (total) body.querySelector("progress").value = done / total;
}

function showResult({ job: id, first: difference }) {
  const theme = document.documentElement.dataset.theme;
  fill(body, difference && tools(differenceButtons(difference), dim(`first difference: ${difference.name} (${kindText(difference.kind)}) at step ${count(difference.step)}`)),
    h("iframe", { class: "report", title: "Report of the comparison", src: `/api/compare/report?theme=${theme}&job=${encodeURIComponent(id)}`, "data-theme": theme, sandbox: "allow-scripts" }));
}

function differenceButtons({ name, kind, step, rank }) {
  const tensor = { name: [name], kind, step, follow: false };
  if (kind === "Metric") return button(`Go to step ${count(step)}`, () => set({ step, follow: false }), { class: "primary" });
  return [
    button("Show the difference", () => set({ ...tensor, ...WHOLE_TENSOR, tab: "tensors", rank: rank < 0 ? "" : String(rank), minus: "run" }, true), { class: "primary" }),
    button("Show its lines", () => set({ ...tensor, tab: "lines" }, true)),
  ];
}
