// Probes: what the programs of a live session can look at, with a switch for each name, here and in
// the tree.
import { request } from "/static/api.js";
import { button, count, dim, emptyCard, fill, grow, h, plural, select, setOptions, table, tools } from "/static/dom.js";
import { model } from "/static/model.js";
import { get } from "/static/state.js";
import { drawNames, rowExtras } from "/static/tree.js";

const MOST = 300; // rows; a search finds the others
const EVERY = [["1", "every step"], ["10", "every 10 steps"], ["100", "every 100 steps"]];
const every = select("How often", () => undefined);
setOptions(every, EVERY, "1");
const whole = h("input", { type: "checkbox" });
// name, parameters, and what the text beside it holds
const ACTIONS = {
  snapshot: ["keep everything of the next step whole", { every: "1", tensors: "1", steps: "1" }],
  ops: ["record all operations of the next step", { action: "ops" }],
  trace: ["trace a local variable in the next step", { action: "trace" }, "blocks.0.forward.scores"],
  rules: ["use other rules", { action: "rules" }, "nan,inf"],
  reset: ["look as the program says", { action: "reset" }],
  stop: ["stop training after a step", { action: "stop" }],
};
const action = select("What else to do", () => { argument.placeholder = ACTIONS[action.value][2] ?? ""; });
setOptions(action, Object.entries(ACTIONS).map(([id, [title]]) => [id, title]), "snapshot");
const argument = h("input", { type: "text", "aria-label": "a path, or names of rules" });
const found = dim(), told = h("div", { class: "dim", role: "status" }), list = h("div");
let programs = [], states = new Map(); // by name: on which ranks it is on, and on which it exists

const isLive = (run) => model.entries.find((each) => each.id === run.id)?.what === "live";
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

export const tab = {
  id: "probes",
  title: "Probes",
  within: "Layers",
  about: "What the running programs can look at, and a switch for each",
  isUsed: isLive,
  alone: true,
  mount: (panel) => panel.append(
    tools(every, h("label", {}, whole, " whole tensors"), found, grow(),
      button("All on", () => switchTo(get().q, true)), button("All off", () => switchTo(get().q, false))),
    tools(action, argument, button("Do it", () => ask({ ...ACTIONS[action.value][1], argument: argument.value }))),
    told, list),

  async show() {
    await load();
    drawList();
  },

  receive: () => void (model.run && isLive(model.run) && !states.size && load().then(drawNames).catch(() => undefined)),
};

async function load() {
  ({ programs } = await request("probes", { run: model.run?.id ?? get().run }));
  states = new Map();
  for (const { rank, probes } of programs) {
    for (const [name, kind, period, tensors, seen, spent] of probes) {
      const state = states.get(name) ?? { kinds: new Set(), on: new Set(), ranks: new Set(), period: 0, seen: 0, spent: 0 };
      state.kinds.add(kind);
      state.ranks.add(rank);
      if (period) state.on.add(rank);
      state.period = Math.max(state.period, period);
      state.tensors ||= tensors;
      state.seen += seen;
      state.spent += spent;
      states.set(name, state);
    }
  }
}

function switchTo(pattern, on) {
  return ask({ q: pattern, every: on ? every.value : "0", tensors: on && whole.checked });
}

async function ask(change) {
  const parameters = { run: model.run?.id ?? get().run, ...change };
  fill(told, "waiting for the next steps …");
  try {
    const { at, ranks } = await request("probe", parameters, { method: "POST" });
    fill(told, [`from step ${count(at)} on`, ...Object.entries(ranks).map(([rank, text]) => `${rank}: ${text}`)].join(" · "));
    await load();
  } catch (error) {
    fill(told, error.message);
  }
  drawList();
  drawNames();
}

/** A switch for a name; half on if it is on on some ranks only. */
function switchOf(name) {
  const { on, ranks } = states.get(name), isOn = on.size === ranks.size;
  const box = h("input", {
    type: "checkbox", role: "switch", "aria-label": `look at ${name}`,
    onchange: () => void switchTo(`^${escaped(name)}$`, !on.size),
  });
  box.checked = isOn;
  box.indeterminate = on.size > 0 && !isOn;
  const where = ranks.size > 1 ? `on on ${on.size} of ${plural(ranks.size, "rank")}` : isOn ? "on" : "off";
  return h("label", { class: "switch", title: where, onmousedown: (event) => event.stopPropagation() },
    box, h("span", { class: "track" }));
}
rowExtras.push((name) => model.run && isLive(model.run) && states.has(name) && switchOf(name));

function drawList() {
  const pattern = get().q ? new RegExp(get().q, "i") : null;
  const names = [...states.keys()].filter((name) => !pattern || pattern.test(name));
  const trouble = programs.filter((each) => each.trouble);
  fill(found, `${plural(names.length, "name")} of ${plural(programs.length, "program")}`,
    trouble.map((each) => ` · rank ${each.rank}: ${each.trouble}`));
  if (!names.length) return fill(list, emptyCard("No probes", "No program that tracks or catches is connected."));
  const rows = names.slice(0, MOST).map((name) => {
    const { kinds, on, ranks, period, seen, spent, tensors } = states.get(name);
    const state = !on.size ? "off" : period > 1 ? `every ${count(period)} steps` : "on";
    return [switchOf(name), name, [...kinds].join(", ").replaceAll("_", " ").toLowerCase(),
      state + (tensors && on.size ? ", whole" : ""), `${on.size} of ${ranks.size}`, count(seen),
      seen && spent ? `${(spent / seen / 1000).toFixed(1)} µs` : ""];
  });
  fill(list, table(["", "Name", "Kinds", "State", "Ranks", "Seen", "Cost each"], rows, [4, 5, 6]),
    names.length > MOST && dim(`… ${count(names.length - MOST)} more: search for them`));
}
