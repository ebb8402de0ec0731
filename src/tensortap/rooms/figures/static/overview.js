// Overview: layers by steps. A click opens the exponents of a layer at a step.
import { drawCells } from "/static/cells.js";
import { dim, grow, labelled, segments, select, setOptions, tools } from "/static/dom.js";
import { listen } from "/static/figure.js";
import { STATISTICS, model, statisticText } from "/static/model.js";
import { set } from "/static/state.js";
import { figureTab, listenSpan, spanButton, spanLayout } from "./figure_tab.js";

const metric = select("Statistic", (value) => set({ metric: value }));
const colors = segments("Colors", [["", "Relative to the row"], ["absolute", "Absolute"]],
  (value) => set({ colors: value }));
colors.title = "Colors by the distance to the median of each row, or by the value itself";

export const tab = figureTab({
  id: "overview",
  title: "Heatmap",
  within: "Layers",
  light: true,
  about: "Every layer over all steps: a heatmap of one statistic, or lines",
  tools: () => [tools(labelled("Statistic", metric), colors, spanButton(), grow(),
    dim("Click a cell to open its exponents"))],

  update(state, now) {
    const listed = now.metric === "auto" ? ["auto", ...model.run.statistics] : model.run.statistics;
    setOptions(metric, listed.map((key) => [key, statisticText(key)]), now.metric);
    metric.title = STATISTICS[now.metric]?.[1] ?? "";
    colors.choose(state.colors);
  },

  query: ({ q, colors }, { kind, key, metric, rank, theme }) => ({ kind, key, metric, rank, theme, q, colors }),

  options(state, now, figure, height) {
    const layers = figure.layout.meta?.layers?.length ?? 0;
    const margin = { l: 40, r: 8, t: figure.data.length > 1 ? 34 : 12, b: 42 };
    const rows = figure.data[0]?.y ?? [], tickvals = rows.filter((_, row) => row % Math.ceil(rows.length / 25) === 0);
    const ticktext = tickvals.map((name) => (name.length > 16 ? `…${name.slice(-15)}` : name));
    const yaxis = innerWidth < 640 ? { yaxis: { ...figure.layout.yaxis, tickvals, ticktext } } : {};
    return {
      height: layers ? Math.max(Math.min(height - 94, 70 + layers * 64), 260) : 260,
      preview: !state.span && !state.colors && drawCells,
      keep: `${model.run.id} ${now.kind} ${now.key} ${state.span}`,
      layout: { ...spanLayout(figure.layout), ...yaxis, margin },
    };
  },

  ready(plot) {
    listenSpan(plot);
    listen(plot, "plotly_click", (event) => {
      const [layer, step] = event.points.find((point) => point.customdata)?.customdata ?? [];
      const name = plot.layout.meta.layers[layer];
      if (name === undefined) return;
      set({ tab: "exponents", name: [name], step, follow: false }, true);
    });
  },
});
