// Align: this run and another, token by token; layers by tokens, colored by difference.
import { RequestError, request } from "/static/api.js";
import { count, dim, emptyCard, fill, h, select, setOptions, tools } from "/static/dom.js";
import { draw } from "/static/figure.js";
import { model } from "/static/model.js";
import { set } from "/static/state.js";

const first = select("The trainer", (run) => set({ run, step: null, span: "", name: [] }, true));
const second = select("The engine", (value) => set({ other: value }));
const told = h("div", { class: "contents", role: "status" });
const plot = h("div", {}), card = h("div", { class: "card figure" }, plot);
let drawn = "";

export const tab = {
  id: "align",
  title: "Align",
  within: "Compare",
  about: "The same tokens in a trainer and an inference engine",
  isUsed: (run) => run.names.includes("tokens"),
  alone: true,
  mount: (panel) => panel.append(tools(first, dim("with"), second), told, card),

  async show(state) {
    const runs = model.entries.map((entry) => [entry.id, entry.title]);
    const others = runs.filter(([id]) => id !== state.run);
    setOptions(first, runs, state.run);
    const other = state.other || (others.length === 1 ? others[0][0] : "");
    setOptions(second, [["", "choose a run"], ...others], other);
    const theme = document.documentElement.dataset.theme;
    const parameters = { run: state.run, other, theme }, key = JSON.stringify(parameters);
    if (key === drawn) return;
    drawn = key;
    card.hidden = true;
    if (!other || other === state.run) {
      fill(told, emptyCard("Align two runs", "Choose the run of the inference engine."));
      return;
    }
    fill(told, dim("matching tokens …"));
    try {
      const found = await request("align", parameters);
      if (key === drawn) await showFound(found);
    } catch (error) {
      if (!(error instanceof RequestError)) throw error;
      if (key === drawn) fill(told, emptyCard("These runs cannot be aligned", error.message));
    }
  },
};

async function showFound({ verdict, matched, tokens, lines, figure }) {
  const [a, b] = tokens.map(count);
  fill(told, h("h3", {}, verdict), dim(`${count(matched)} contexts are in both, of ${a} and ${b}`),
    lines.map((line) => h("div", {}, line)));
  card.hidden = false;
  // names of layers would fill a narrow screen; a tap on a cell shows its name
  const yaxis = { ...figure.layout.yaxis, showticklabels: plot.clientWidth > 600 };
  await draw(plot, figure, { height: figure.layout.height, layout: { yaxis } });
}
