// Lines: chosen statistics of chosen names; one crosshair, one zoom.
import { ask } from "../api.js";
import { $, fill, h, segments } from "../dom.js";
import { draw, mark, onStep } from "../figure.js";
import { chosen, model } from "../model.js";
import { listenSpan, spanButton, spanned } from "../span.js";
import { get, set } from "../state.js";
import { go } from "../top.js";

/** @type {any} */ let plot;
/** @type {any} */ let names;
/** @type {any} */ let stats;
/** @type {any} */ let scale;
/** @type {any} */ let by;
let drawn = "";

/** @type {import("../main.js").Tab} */
export const lines = {
  id: "lines",
  title: "Lines",

  mount(panel) {
    names = h("div", { class: "chips", role: "list", "aria-label": "Chosen names" });
    stats = h("div", { class: "chips", role: "group", "aria-label": "Statistics" });
    scale = segments("Scale", [["", "Auto"], ["linear", "Linear"], ["log", "Log"]], (v) => set({ scale: v }));
    by = segments("A panel for each", [["stat", "By statistic"], ["name", "By name"]], (v) => set({ by: v }));
    plot = h("div", {});
    panel.append(
      h("div", { class: "tools" }, stats),
      h("div", { class: "tools" }, names, h("span", { class: "grow" }), spanButton(), by, scale),
      h("div", { class: "card figure" }, plot));
  },

  question(state) {
    const now = chosen(state), width = Math.max(300, panelWidth() - 40);
    return ["lines", {
      run: model.run.id, kind: now.kind, name: now.names, stat: now.stats, rank: now.rank, scale: state.scale,
      by: panelsOf(state, now), theme: now.theme, width: Math.ceil(width / 100) * 100,
    }];
  },

  async show(state) {
    const run = model.run, now = chosen(state);
    if (!run) return;
    scale.choose(state.scale);
    const panels = panelsOf(state, now);
    by.choose(panels);
    fill(stats, ...run.statistics.filter((s) => SHOWN.includes(s) || now.stats.includes(s)).map((each) =>
      h("button", {
        type: "button", class: "chip toggle", "aria-pressed": String(now.stats.includes(each)),
        onclick: () => toggle(each),
      }, each)));
    fill(names, ...now.names.slice(0, 12).map((name) => h("span", { class: "chip", role: "listitem" },
      h("span", { title: name }, name),
      h("button", { type: "button", "aria-label": `Without ${name}`, onclick: () => set({ name: now.names.filter((n) => n !== name) }) }, "×"))),
      now.names.length > 12 && h("span", { class: "dim" }, `and ${now.names.length - 12} more`),
      h("span", { class: "dim" }, "Ctrl-click on the left adds names"));
    const key = JSON.stringify([run.id, run.version, now.kind, now.names, now.stats, now.rank, state.scale, panels, now.theme, state.span]);
    if (key === drawn) return mark(plot, now.step);
    const figure = await ask(...lines.question(state));
    // two or three panels fit the window; of more one scrolls
    const room = plot.parentElement.parentElement.clientHeight - 120, tall = figure.layout.height ?? 0;
    await draw(plot, figure, { height: tall > room ? Math.max(room, 0.72 * tall) : Math.min(room, 1.3 * tall), step: now.step, layout: spanned(figure.layout), keep: JSON.stringify([run.id, now.kind, now.names, now.stats, state.scale, state.span]) });
    drawn = key;
    onStep(plot, (step) => go(step));
    listenSpan(plot);
  },
};

/** @param {any} state @param {any} now */
const panelsOf = (state, now) => state.by || (now.names.length > 8 ? "name" : "stat");
const panelWidth = () => $("panels").clientWidth;

const SHOWN = ["value", "rm2", "max_abs", "mean", "std", "min", "max", "mean_abs", "min_abs", "rm4", "rm8", "zeros", "nonfinite"];

/** @param {string} stat */
function toggle(stat) {
  const now = chosen(get()).stats;
  const next = now.includes(stat) ? now.filter((s) => s !== stat) : [...now, stat];
  if (next.length) set({ stat: next });
}
