// Exponents: values by powers of two, and what a dtype would lose of them.
import { count, dim, fill, grow, labelled, segments, select, setOptions, tools } from "/static/dom.js";
import { model } from "/static/model.js";
import { set } from "/static/state.js";
import { figureTab } from "./figure_tab.js";

const DTYPES = [
  "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
  "float4_e2m1fn", "float32",
];

const dtype = select("Range of a dtype", (value) => set({ dtype: value }));
const scale = segments("Scale", [["", "Linear"], ["log", "Log"]], (value) => set({ scale: value }));
const note = dim();

export const tab = figureTab({
  id: "exponents",
  title: "Exponents",
  about: "Values by powers of two, and what a number format would lose",
  tools: () => [tools(labelled("Range of", dtype), scale, grow(), note)],

  update(state) {
    setOptions(dtype, [["", "no dtype"], ...DTYPES], state.dtype);
    scale.choose(state.scale === "log" ? "log" : "");
  },

  query: (state, now) => ({
    kind: now.kind, name: now.names, rank: now.rank, dtype: state.dtype, step: now.step,
    scale: state.scale, theme: now.theme,
  }),

  options(state, now, figure, height) {
    const keep = JSON.stringify([model.run.id, now.kind, now.names]);
    const single = now.names.length === 1 && !figure.layout.meta?.empty;
    return single ? { keep, height: Math.max(320, Math.min(height - 100, 560)) } : { keep };
  },

  ready(plot, figure, state, now) {
    const differs = now.step !== null && figure.step !== now.step;
    fill(note, differs && `nothing at step ${count(now.step)}; this is step ${count(figure.step)}`);
  },
});
