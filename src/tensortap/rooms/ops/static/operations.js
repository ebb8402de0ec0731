// Operations: modules, each of which unfolds into the operations that it ran at a step.
import { request } from "/static/api.js";
import { card, count, dim, empty, fill, h, plural, table, tools } from "/static/dom.js";
import { model, selection } from "/static/model.js";
import { get, set } from "/static/state.js";

const summary = dim();
const bar = tools(summary);
const body = card();

export const tab = {
  id: "operations",
  title: "Operations",
  within: "Layers",
  isUsed: (run) => run.kinds.includes("Op"),
  mount: (panel) => panel.append(bar, body),

  async show(state) {
    const { step, rank } = selection(state), opened = openModules(state);
    const found = await request("operations", { run: model.run.id, step, rank, module: opened });
    bar.hidden = !found.modules.length;
    if (bar.hidden) {
      const why = "Record every operation of a few steps:";
      return fill(body, empty("No operations were recorded", why, "with tap.ops(model): …"));
    }
    const total = found.modules.reduce((sum, each) => sum + each.count, 0);
    fill(summary, `step ${count(found.step)}`, model.run.ranks.length > 1 && ` · rank ${found.rank}`,
      ` · ${plural(total, "record")}`);
    const rows = found.modules.flatMap((module) =>
      moduleRows(module, opened.includes(module.name), found.operations[module.name] ?? []));
    fill(body, table(["Operation", "Phase", "Line", "Output"], rows));
  },
};

/** The modules that are open: those that were clicked, and those that are selected in the tree. */
const openModules = (state) => [...new Set([...state.module, ...state.name.map(moduleOf)])];
const moduleOf = (name) => name.replace(/:(?:(?:backward|recompute|optimizer):)?\d+:.*$/s, "");

function moduleRows({ name, count: size, bad }, isOpen, shown) {
  const toggle = () => {
    const { module, name: names } = get(), without = (all) => all.filter((each) => each !== name);
    set(isOpen ? { module: without(module), name: names.filter((each) => moduleOf(each) !== name) }
      : { module: [...module, name] });
  };
  const onkeydown = (event) => event.key === "Enter" && toggle();
  const head = h("tr", {
    class: "module clickable", tabindex: "0", "aria-expanded": String(isOpen), onclick: toggle,
    onkeydown,
  },
    h("td", { colSpan: 3 }, h("span", { class: "twisty" }, "▶"), name),
    h("td", {}, dim(plural(size, "operation")),
      bad > 0 && h("span", { class: "bad" }, ` · ${count(bad)} with NaN or Inf`)));
  if (!isOpen) return [head];
  const rest = size - shown.length;
  const more = rest > 0 && h("tr", {}, h("td", { colSpan: 4 }, dim(`and ${count(rest)} more`)));
  return [head, ...shown.map(operationRow), more].filter(Boolean);
}

function operationRow(operation) {
  const { name, index, op, call, phase, parameter, line, function: inside, output, bad, why, made } =
    operation;
  const open = () => set({ tab: "exponents", kind: "Op", name: [name] }, true);
  const onkeydown = (event) => event.key === "Enter" && open();
  const detail = (text) => h("div", { class: "dim" }, text);
  return h("tr", { class: "operation clickable", tabindex: "0", onclick: open, onkeydown },
    h("td", {}, dim(`${index} `), op, call > 0 && dim(` · call ${call}`)),
    h("td", {}, phase, parameter && detail(parameter)),
    h("td", { class: "mono", title: line }, line.split("/").at(-1), inside && detail(inside)),
    h("td", { class: bad ? "mono bad" : "mono" }, output,
      made && detail(made === name ? why : `from ${made}`)));
}
