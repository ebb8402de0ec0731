// Overview: layers by steps; a click goes to the exponents of that layer at that step.
import { ask } from "../api.js";
import { choose, h } from "../dom.js";
import { draw, mark, on } from "../figure.js";
import { chosen, model } from "../model.js";
import { listenSpan, spanButton, spanned } from "../span.js";
import { set } from "../state.js";

/** @type {any} */ let plot;
/** @type {any} */ let metric;
/** @type {any} */ let hint;
let drawn = "";

/** @type {import("../main.js").Tab} */
export const overview = {
  id: "overview",
  title: "Overview",

  mount(panel) {
    metric = h("select", { "aria-label": "Statistic", onchange: () => set({ metric: metric.value }) });
    hint = h("span", { class: "dim" });
    plot = h("div", { class: "heat" });
    panel.append(
      h("div", { class: "tools" }, h("label", {}, h("span", {}, "Statistic"), metric), spanButton(), h("span", { class: "grow" }), hint),
      h("div", { class: "card figure" }, plot));
  },

  async show(state) {
    const run = model.run, now = chosen(state);
    if (!run) return;
    choose(metric, run.statistics, now.metric);
    hint.textContent = "A click on a cell opens its exponents";
    const key = JSON.stringify([run.id, run.version, now.kind, now.metric, now.rank, now.theme, state.q, state.span]);
    if (key === drawn) return mark(plot, now.step);
    const card = plot.parentElement;
    const waiting = setTimeout(() => card.classList.add("waiting"), 150);
    try {
      const figure = await ask("overview", { run: run.id, kind: now.kind, metric: now.metric, rank: now.rank, theme: now.theme, q: state.q });
      const room = card.parentElement.clientHeight - 28 - 12 - 40 - 14;
      const rows = figure.layout.meta?.layers?.length ?? 0;
      await draw(plot, figure, { height: rows ? Math.max(Math.min(room, 70 + rows * 64), 260) : 260, step: now.step, keep: `${run.id} ${now.kind} ${state.span}`,
        layout: { ...spanned(figure.layout), margin: { l: 40, r: 8, t: figure.data.length > 1 ? 34 : 12, b: 42 } } });
      drawn = key;
    } finally {
      clearTimeout(waiting);
      card.classList.remove("waiting");
    }
    listenSpan(plot);
    on(plot, "plotly_click", (/** @type {any} */ event) => {
      const layers = plot.layout.meta.layers;
      const point = event.points.find((/** @type {any} */ p) => p.customdata);
      const [layer, step] = point?.customdata ?? [];
      if (layers[layer] === undefined) return;
      set({ tab: "exponents", name: [layers[layer]], step, follow: false, over: "" }, true);
    });
  },
};
