// Summary: the verdict on a run: its state, its last numbers, the first problem, all layers at once.
import { RequestError, request } from "/static/api.js";
import { drawCells } from "/static/cells.js";
import {
  button, card, count, dim, empty, fill, h, kindText, number, plural, seconds,
} from "/static/dom.js";
import { model, selection } from "/static/model.js";
import { set } from "/static/state.js";

const STATES = { live: "training", closed: "session closed" };
const verdict = h("section", { class: "card conclusion" });
const figures = h("dl", { class: "figures" });
const plot = h("div", { onclick: () => set({ tab: "overview" }, true) });
const heatmap = h("section", { class: "card figure small" }, plot);
const unseen = card();

export const tab = {
  id: "summary",
  title: "Summary",
  light: true,
  about: "The verdict: what is wrong with this run, and where to look",
  mount: (panel) => panel.append(verdict, figures, heatmap, unseen),

  async show(state) {
    const heatmapDrawn = drawHeatmap(selection(state)); // its request is sent now
    heatmapDrawn.catch(() => undefined); // reported where it is awaited
    const found = await request("summary", { run: model.run.id });
    fill(verdict, conclusion(found));
    fill(figures, facts(found).map(([name, text, kind]) =>
      h("div", { class: kind ?? "" }, h("dt", {}, name), h("dd", {}, text))));
    drawUnseen(found, []);
    await heatmapDrawn;
    const run = model.run.id, { rules } = await request("health", { run }).catch(() => ({ rules: [] }));
    if (model.run?.id === run) drawUnseen(found, rules.filter((row) => row.state === "blind" && !row.name));
  },
};

function facts({ state, crashed, steps, last_step: last, seconds: time, metrics, problems, hints }) {
  return [
    ["state", (STATES[state] ?? state) + (crashed ? `: ${crashed}` : ""), { silent: "warn", crashed: "bad", deleted: "bad" }[state]],
    ["steps", steps ? count(steps) : "none"], ["last step", last === null ? "–" : count(last)],
    ["duration", seconds(Math.round(time * 100) / 100)],
    ...metrics.map(({ name, value }) => [name, short(value), typeof value === "string" && "bad"]),
    ["alerts", count(problems), problems && "bad"], ["hints", count(hints), hints && "warn"],
  ];
}

const short = (value) => (typeof value === "number" ? number(Number(value.toPrecision(4))) : value);

/** The light, one sentence, and the first problem with a way to its place. */
function conclusion({ state: run, steps, problems, problem_rules: kinds, hints, rules, first, unseen_total: hidden }) {
  const state = problems ? "problem" : !rules ? "unknown" : hints ? "hint" : "fine";
  const limits = hidden ? ` ${plural(hidden, "thing")} could not be looked at: see below.` : "";
  const text = {
    problem: `${plural(kinds, "problem")} found, the first at step ${count(first?.step ?? 0)}.`,
    hint: `No problem found by ${plural(rules, "rule")}; ${plural(hints, "hint")}.`,
    fine: `No problem found by ${plural(rules, "rule")}.`,
    unknown: !steps && ["training", "live"].includes(run) ? "No step has ended yet."
      : "No rule looked at this run: track it with tap.track(model, optimizer, alerts=True), or start it with tensortap run.",
  }[state];
  return [
    h("div", { class: "headline" }, h("span", { class: `light ${state}`, role: "img", "aria-label": state }),
      h("h2", {}, text + (problems ? "" : limits))),
    first && [
      h("p", {}, h("span", { class: "rule" }, first.rule), " ", h("b", {}, first.name),
        dim(` ${kindText(first.kind)}${first.rank ? ` · rank ${first.rank}` : ""}`), ": ", first.message,
        first.origin && !first.name.startsWith(first.origin) && dim(` It began in ${first.origin}.`)),
      h("p", {}, button("Show the place", () => openPlace(first), { class: "primary" }), " ",
        button("All problems", () => set({ tab: "alerts" }, true))),
    ],
    !problems && hints > 0 && h("p", {}, button("Hints", () => set({ tab: "health" }, true))),
  ];
}

function openPlace({ name, kind, step }) {
  const place = kind === "Metric" ? { tab: "lines", kind, name: [name], stat: ["value"] }
    : { tab: "exponents", kind, name: [name] };
  set({ ...place, step, follow: false }, true);
}

function drawUnseen({ unseen: rows, unseen_total: total }, blind) {
  unseen.hidden = !total && !blind.length;
  const whys = [...new Set(blind.map(({ message }) => message))];
  const more = total - rows.length;
  fill(unseen, h("h3", {}, "What could not be looked at"), h("ul", { class: "unseen" },
    rows.map(({ name, message }) => h("li", {}, h("b", {}, name || "model"), " ", dim(message))),
    more > 0 && h("li", {}, dim(`and ${count(more)} more`)), whys.map((why) => h("li", {},
      h("b", {}, blind.filter(({ message }) => message === why).map(({ rule }) => rule).join(", ")), " ", dim(why)))));
}

async function drawHeatmap({ kind, key, metric, rank, theme }) {
  heatmap.hidden = !model.run.names.length;
  if (heatmap.hidden) return;
  let figure;
  try {
    figure = await request("overview", { run: model.run.id, kind, key, metric, rank, theme });
  } catch (error) {
    if (!(error instanceof RequestError && error.status === 404)) throw error; // no room draws it
    heatmap.hidden = true;
    return;
  }
  if (figure.layout.meta.empty) fill(plot, empty(figure.layout.annotations[0].text));
  else drawCells(plot, figure);
}
