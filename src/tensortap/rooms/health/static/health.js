// Health: one row per rule with a light, where and since when, and what to do; below, what analyses
// have recorded of each layer as small lines.
import { request } from "/static/api.js";
import {
  button, card, count, dim, empty, fill, h, kindText, plural, svgLine, table,
} from "/static/dom.js";
import { model, selection } from "/static/model.js";
import { set } from "/static/state.js";

const STATES = { problem: "problem", hint: "hint", fine: "fine", unknown: "not active" };
const WIDTH = 96, HEIGHT = 24; // of small lines, as in report.py
const summary = h("dl", { class: "figures" });
const rules = card(), layers = card();

export const tab = {
  id: "health",
  title: "Health",
  mount: (panel) => panel.append(summary, rules, layers),

  async show(state) {
    const { rank } = selection(state);
    const found = await request("health", { run: model.run.id, rank, q: state.q });
    fill(summary, Object.entries(STATES).map(([key, text]) => {
      const total = found.rules.filter((row) => row.state === key).length;
      return h("div", { class: total ? key : "" }, h("dt", {}, text), h("dd", {}, count(total)));
    }));
    fill(rules, h("h3", {}, "Rules"),
      table(["", "Rule", "Where", "Since", "What to do"], found.rules.map(ruleRow), [3]));
    fill(layers, found.total ? layerParts(found)
      : empty("No analyses", "Norms, updates, dead units, attention and more need", "tap.track(model, analyses=True)"));
  },
};

const detail = (text) => h("div", { class: "dim" }, text);

function ruleRow(row) {
  const { rule, state, alerts, name, kind, step, rank, message } = row;
  const open = () => set({ tab: "alerts", rule }, true);
  const onkeydown = (event) => event.key === "Enter" && open();
  const light = h("span", { class: `light ${state}`, role: "img", "aria-label": STATES[state] });
  if (!alerts) {
    const note = state === "unknown" ? `${row.looks_for} (needs tap.track(model, alerts=True))` : row.looks_for;
    return h("tr", {}, h("td", { class: "lights" }, light), h("td", {}, rule), h("td", { class: "dim", colSpan: 3 }, note));
  }
  const facts = [kindText(kind), rank && `rank ${rank}`, alerts > 1 && plural(alerts, "alert")];
  return h("tr", { class: "clickable", tabindex: "0", onclick: open, onkeydown },
    h("td", { class: "lights" }, light), h("td", {}, rule), h("td", {}, name, detail(facts.filter(Boolean).join(" · "))),
    h("td", { class: "num" }, count(step)), h("td", {}, message, detail(row.remedy)));
}

// -- layers --------------------------------------------------------------------------------------

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
