// Analyses: what they have recorded of each layer, as small lines.
import { request } from "/static/api.js";
import { button, card, count, dim, fill, h, svgLine } from "/static/dom.js";
import { model, selection } from "/static/model.js";
import { set } from "/static/state.js";

const WIDTH = 96, HEIGHT = 24; // of small lines, as in routes.py
const layers = card();

export const tab = {
  id: "analyses",
  title: "Analyses",
  within: "Problems",
  stacked: true,
  isUsed: (run) => run.kinds.includes("Health"),
  mount: (panel) => panel.append(layers),

  async show(state) {
    const { rank } = selection(state);
    fill(layers, layerParts(await request("analyses", { run: model.run.id, rank, q: state.q })));
  },
};

function layerParts({ layers: found, shown, found: matching, total }) {
  const few = shown < matching ? `the first ${count(shown)} of ${count(matching)}: search names on the left`
    : matching < total ? `${count(matching)} of ${count(total)}` : "";
  return [h("h3", {}, "Layers ", dim(few)), found.map(({ layer, lines }) => [
    h("h4", {}, layer || "model"), h("div", { class: "multiples" }, lines.map(multiple))])];
}

function multiple({ name, quantity, path, last }) {
  const open = () => set({ tab: "lines", name: [name], kind: "Health", stat: ["value"] }, true);
  return button([h("span", {}, quantity), h("b", {}, last), svgLine(path, WIDTH, HEIGHT)], open, {
    class: "multiple", title: name,
  });
}
