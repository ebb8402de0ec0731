// Lines: statistics of names over steps.
import { $, button, dim, fill, grow, h, segments, tools } from "/static/dom.js";
import { onStepClick } from "/static/figure.js";
import { STATISTICS, model, statisticText } from "/static/model.js";
import { set } from "/static/state.js";
import { goToStep } from "/static/top.js";
import { figureTab, listenSpan, spanButton, spanLayout } from "./figure_tab.js";

const LISTED = [
  "auto", "value", "rm2", "max_abs", "mean", "std", "min", "max", "mean_abs", "min_abs", "rm4", "rm8",
  "zeros", "nonfinite",
];
const MAX_CHIPS = 12;

const names = h("div", { class: "chips", role: "list", "aria-label": "Selected names" });
const stats = h("div", { class: "chips", role: "group", "aria-label": "Statistics" });
const scale = segments("Scale", [["", "Auto"], ["linear", "Linear"], ["log", "Log"]],
  (value) => set({ scale: value }));
const panels = segments("One panel per", [["stat", "By statistic"], ["name", "By name"]],
  (value) => set({ by: value }));

const panelsBy = (state, now) => state.by || (now.names.length > 8 ? "name" : "stat");

export const tab = figureTab({
  id: "lines",
  title: "Lines",
  within: "Layers",
  tools: () => [tools(stats), tools(names, grow(), spanButton(), panels, scale)],

  update(state, now) {
    scale.choose(state.scale);
    panels.choose(panelsBy(state, now));
    const isChosen = (stat) => now.stats.includes(stat);
    const isShown = (stat) => LISTED.includes(stat) || isChosen(stat);
    const others = model.run.statistics.filter((stat) => !LISTED.includes(stat));
    const known = (stat) => model.run.statistics.includes(stat) || (stat === "auto" && isChosen(stat));
    fill(stats, [...LISTED.filter(known), ...others].filter(isShown).map((stat) => button(statisticText(stat), () => toggle("stat", now.stats, stat), {
      class: "chip toggle", "aria-pressed": String(isChosen(stat)), title: STATISTICS[stat]?.[1],
    })));
    const more = now.names.length - MAX_CHIPS;
    fill(names, now.names.slice(0, MAX_CHIPS).map((name) => h("span",
      { class: "chip", role: "listitem" }, h("span", { title: name }, name),
      button("×", () => toggle("name", now.names, name), { "aria-label": `Remove ${name}` }))),
      more > 0 && dim(`and ${more} more`), dim("Ctrl-click a name on the left to add it"));
  },

  query: (state, now) => ({
    kind: now.kind, name: now.names, stat: now.stats, rank: now.rank, scale: state.scale,
    by: panelsBy(state, now), theme: now.theme,
    width: Math.ceil(Math.max(300, $("panels").clientWidth - 40) / 100) * 100,
  }),

  options(state, now, figure, height) {
    // two or three panels fit into the window; more of them scroll
    const room = height - 120, tall = figure.layout.height ?? 0;
    return {
      height: tall > room ? Math.max(room, 0.72 * tall) : Math.min(room, 1.3 * tall),
      keep: JSON.stringify([model.run.id, now.kind, now.names, now.stats, state.scale, state.span]),
      layout: spanLayout(figure.layout),
    };
  },

  ready(plot) {
    onStepClick(plot, goToStep);
    listenSpan(plot);
  },
});

/** Adds what is not chosen to a list of the state, and removes what is; one always stays. */
function toggle(key, chosen, value) {
  const rest = chosen.filter((each) => each !== value);
  const next = rest.length < chosen.length ? rest : [...chosen, value];
  if (next.length) set({ [key]: next });
}
