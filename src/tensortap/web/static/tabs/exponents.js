// Exponents: how values are spread over powers of two, and what a format would lose of them.
import { ask } from "../api.js";
import { choose, count, h, segments } from "../dom.js";
import { draw, mark, on } from "../figure.js";
import { chosen, model } from "../model.js";
import { set } from "../state.js";
import { go } from "../top.js";

const FORMATS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn", "float32"];

/** @type {any} */ let plot;
/** @type {any} */ let dtype;
/** @type {any} */ let over;
/** @type {any} */ let scale;
/** @type {any} */ let said;
let drawn = "";

/** @param {any} state */
const overAll = (state) => state.over === "steps" || state.over === "ridge";

/** @type {import("../main.js").Tab} */
export const exponents = {
  id: "exponents",
  title: "Exponents",

  mount(panel) {
    dtype = h("select", { "aria-label": "Range of a format", onchange: () => set({ dtype: dtype.value }) });
    over = segments("Steps", [["", "This step"], ["steps", "All steps"], ["ridge", "Ridge"]], (v) => set({ over: v }));
    scale = segments("Scale", [["", "Linear"], ["log", "Log"]], (v) => set({ scale: v }));
    said = h("span", { class: "dim" });
    plot = h("div", {});
    panel.append(
      h("div", { class: "tools" }, h("label", {}, h("span", {}, "Range of"), dtype), over, scale, h("span", { class: "grow" }), said),
      h("div", { class: "card figure" }, plot));
  },

  question(state) {
    const now = chosen(state);
    return ["exponents", {
      run: model.run.id, kind: now.kind, name: overAll(state) ? now.names.slice(0, 1) : now.names, rank: now.rank,
      dtype: state.dtype, over: state.over, step: now.step, scale: state.scale, theme: now.theme,
    }];
  },

  async show(state) {
    const run = model.run, now = chosen(state);
    if (!run) return;
    choose(dtype, [["", "no format"], ...FORMATS.map((f) => /** @type {[string, string]} */ ([f, f]))], state.dtype);
    over.choose(state.over);
    scale.choose(state.scale === "log" ? "log" : "");
    scale.hidden = state.over !== "";
    const all = overAll(state);
    const key = JSON.stringify([run.id, run.version, now.kind, now.names, state.dtype, state.over, state.scale, now.rank, now.theme, all && state.over === "steps" ? 0 : now.step]);
    if (key === drawn) return state.over === "steps" ? mark(plot, now.step) : undefined;
    const figure = await ask(...exponents.question(state));
    const room = /** @type {any} */ (plot.parentElement).parentElement.clientHeight - 100;
    const single = all || now.names.length === 1;
    await draw(plot, figure, {
      step: state.over === "steps" ? now.step : null, keep: JSON.stringify([run.id, now.kind, now.names, state.over]),
      ...(single && !figure.layout.meta?.empty ? { height: Math.max(320, Math.min(room, 560)) } : {}),
    });
    drawn = key;
    said.textContent = !all && figure.step !== now.step && now.step !== null ? `nothing at step ${count(now.step)}: this is step ${count(figure.step)}` : "";
    on(plot, "plotly_click", (/** @type {any} */ event) => {
      const x = event.points?.[0]?.x;
      if (plot.dataset.over === "steps" && Number.isFinite(Number(x))) go(Number(x));
    });
    plot.dataset.over = state.over;
  },
};
