// Compare: this run with another; the report is that of `tensortap compare --html`.
import { RequestError, request } from "/static/api.js";
import {
  button, card, count, dim, emptyCard, fill, grow, h, kindText, labelled, select, setOptions, tools,
} from "/static/dom.js";
import { model } from "/static/model.js";
import { WHOLE_TENSOR, get, set } from "/static/state.js";

const fields = [
  ["rtol", "1e-5", 62], ["atol", "1e-8", 62], ["names", "regex", 90], ["steps", "10:20", 64],
].map(([key, placeholder, width]) => h("input", {
  type: "text", name: key, placeholder, "aria-label": key, style: `width: ${width}px`,
  onchange: (event) => set({ [key]: event.target.value.trim() }),
}));
const first = select("This run", (run) => set({ run, step: null, span: "", name: [] }, true));
const second = select("The other run", (value) => set({ other: value }));
const body = h("div", { class: "contents" });
let job = "", drawn = "";

const theme = () => document.documentElement.dataset.theme;
const showText = (...texts) => fill(body, emptyCard(...texts));

export const tab = {
  id: "compare",
  title: "Compare",
  about: "This run beside another: the first tensor that differs",
  alone: true,
  mount: (panel) => panel.append(
    tools(first, dim("with"), second, fields.map((input) => labelled(input.name, input))), body),

  async show(state) {
    const runs = model.entries.map((entry) => [entry.id, entry.title]);
    const others = runs.filter(([id]) => id !== state.run);
    setOptions(first, runs, state.run);
    if (!state.other && others.length === 1) state = { ...state, other: others[0][0] };
    setOptions(second, [["", "choose a run"], ...others], state.other);
    for (const input of fields) {
      if (document.activeElement !== input) input.value = state[input.name];
    }
    const { run, other, rtol, atol, names, steps } = state;
    const parameters = { run, other, rtol, atol, names, steps };
    const key = JSON.stringify(parameters), frame = body.querySelector("iframe");
    if (key === drawn && (!frame || frame.dataset.theme === theme())) return;
    drawn = key;
    if (!others.length) {
      return showText("There is only one run", "Open the folder that contains both, or both runs:",
        "tensortap view runs/a runs/b");
    }
    if (!other || other === run) {
      return showText("Compare two runs", "Choose the other run to see the first tensor that "
        + "differs, at which step, and by how much.");
    }
    try {
      const started = await request("compare/start", parameters, { method: "POST" });
      job = started.job;
      await showJob(started);
    } catch (error) {
      if (!(error instanceof RequestError)) throw error;
      showFailure(error.message);
    }
  },

  receive(news) {
    if (job && news.jobs?.[job]) void showJob(news.jobs[job]);
  },
};

const showFailure = (reason) => showText("These runs cannot be compared", reason);

async function showJob(state) {
  if (state.state === "running") showProgress(state);
  else if (state.state === "failed") showFailure(state.error);
  else if (state.state === "done") showResult(await request("compare", { job, theme: theme() }));
  else fill(body, emptyCard("Cancelled"), button("Compare again", () => {
    drawn = "";
    void tab.show(get());
  }));
}

function showProgress({ done, total }) {
  if (!body.querySelector("progress")) {
    const cancel = button("Cancel", () => request("compare/cancel", { job }, { method: "POST" }));
    fill(body, card(tools(h("h3", {}, "Comparing"), dim(), grow(), cancel),
      h("progress", { "aria-label": "Progress of the comparison", max: "1" })));
  }
  const text = total ? `${count(done)} of ${count(total)} records` : "reading both runs";
  fill(body.querySelector(".dim"), text);
  if (total) body.querySelector("progress").value = done / total;
}

function showResult({ report: src, first: difference }) {
  fill(body, difference && tools(differenceTools(difference)), h("iframe", {
    class: "report", title: "Report of the comparison", src, "data-theme": theme(),
    sandbox: "allow-scripts",
  }));
}

function differenceTools({ name, kind, step, rank }) {
  const tensor = { name: [name], kind, step, follow: false };
  const slice = { ...WHOLE_TENSOR, rank: rank < 0 ? "" : String(rank) };
  const go = (text, state, attributes) => button(text, () => set(state, true), attributes);
  const buttons = kind === "Metric"
    ? [go(`Go to step ${count(step)}`, { step, follow: false }, { class: "primary" })]
    : [
      go("Show the tensor", { ...tensor, ...slice, tab: "tensors" }, { class: "primary" }),
      go("Show its lines", { ...tensor, tab: "lines" }),
    ];
  return [buttons, dim(`first difference: ${name} (${kindText(kind)}) at step ${count(step)}`)];
}
