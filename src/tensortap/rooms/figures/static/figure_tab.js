// A tab with tools and one figure over steps or exponents.
import { request } from "/static/api.js";
import { $, button, h } from "/static/dom.js";
import { draw, listen, markStep } from "/static/figure.js";
import { model, selection } from "/static/model.js";
import { get, onChange, set } from "/static/state.js";

/**
 * `tools` returns the elements above the figure, `update` sets them to a state. `query` returns
 * the parameters of the request, `options` those of `draw`, `ready` is called with the plot after
 * it was drawn.
 */
export function figureTab({ id, title, within, about, light, tools, update, query, options, ready }) {
  const plot = h("div", { class: id });
  const figureCard = h("div", { class: "card figure" }, plot);
  let drawn = "";
  const parameters = (state) => ({ run: model.run.id, ...query(state, selection(state)) });
  // a figure over exponents has no steps to mark
  const hasSteps = id !== "exponents";
  return {
    id, title, within, about, light,
    mount: (panel) => panel.append(...tools(), figureCard),
    prepare: (state) => request(id, parameters(state)),

    async show(state) {
      const now = selection(state);
      update(state, now);
      const key = JSON.stringify([model.run.version, state.span, parameters(state)]);
      const step = hasSteps ? now.step : null;
      if (key === drawn) return step === null ? undefined : markStep(plot, step);
      const waiting = setTimeout(() => figureCard.classList.add("waiting"), 150);
      try {
        const figure = await request(id, parameters(state));
        const height = $("panels").clientHeight - (within ? 40 : 0); // of the choice of views
        await draw(plot, figure, { step, ...options(state, now, figure, height) });
        drawn = key;
        ready(plot, figure, state, now);
      } finally {
        clearTimeout(waiting);
        figureCard.classList.remove("waiting");
      }
    },
  };
}

// -- the zoomed steps: the same ones in all figures over steps ------------------------------------

/** The part of a layout that shows the zoomed steps. */
export function spanLayout(layout) {
  const span = get().span.split(",").map(Number);
  return span.length === 2 && span.every(Number.isFinite) && span[0] < span[1]
    ? { xaxis: { ...layout.xaxis, range: span, autorange: false } } : {};
}

/** A button that shows all steps, visible while some are zoomed. */
export function spanButton() {
  const element = button("All steps", () => set({ span: "" }), { hidden: !get().span });
  onChange(() => (element.hidden = !get().span));
  return element;
}

/** Follows zooming in a plot; a double click zooms out. */
export function listenSpan(plot) {
  listen(plot, "plotly_relayout", (event) => {
    const range = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
    const rounded = range.map((n) => Number(Number(n).toFixed(3)));
    if (event["xaxis.autorange"]) set({ span: "" });
    else if (range[0] !== undefined) set({ span: rounded.join(",") });
  });
  listen(plot, "plotly_doubleclick", () => set({ span: "" }));
}
