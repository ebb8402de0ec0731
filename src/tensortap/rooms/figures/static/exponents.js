// Exponents: values by powers of two, and what a dtype would lose of them.
import { count, dim, fill, grow, labelled, segments, select, setOptions, tools } from "/static/dom.js";
import { onStepClick } from "/static/figure.js";
import { model } from "/static/model.js";
import { get, set } from "/static/state.js";
import { goToStep } from "/static/top.js";
import { figureTab } from "./figure_tab.js";

const DTYPES = [
  "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
  "float4_e2m1fn", "float32",
];

const dtype = select("Range of a dtype", (value) => set({ dtype: value }));
const over = segments("Steps", [["", "This step"], ["steps", "All steps"]],
  (value) => set({ over: value }));
const scale = segments("Scale", [["", "Linear"], ["log", "Log"]], (value) => set({ scale: value }));
const note = dim();

export const tab = figureTab({
  id: "exponents",
  title: "Exponents",
  about: "Values by powers of two, and what a number format would lose",
  tools: () => [tools(labelled("Range of", dtype), over, scale, grow(), note)],

  update(state) {
    setOptions(dtype, [["", "no dtype"], ...DTYPES], state.dtype);
    over.choose(state.over);
    scale.choose(state.scale === "log" ? "log" : "");
    scale.hidden = state.over !== "";
  },

  query: (state, now) => ({
    kind: now.kind, name: state.over ? now.names.slice(0, 1) : now.names, rank: now.rank,
    dtype: state.dtype, over: state.over, step: state.over === "steps" ? null : now.step,
    scale: state.scale, theme: now.theme,
  }),

  options(state, now, figure, height) {
    const keep = JSON.stringify([model.run.id, now.kind, now.names, state.over]);
    const single = (state.over || now.names.length === 1) && !figure.layout.meta?.empty;
    return single ? { keep, height: Math.max(320, Math.min(height - 100, 560)) } : { keep };
  },

  ready(plot, figure, state, now) {
    const differs = !state.over && now.step !== null && figure.step !== now.step;
    fill(note, differs && `nothing at step ${count(now.step)}; this is step ${count(figure.step)}`);
    onStepClick(plot, (step) => get().over === "steps" && goToStep(step));
  },
});
