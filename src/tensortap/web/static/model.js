// What the page knows of the run that is shown.
import { decodeArray, request } from "./api.js";

/** @typedef {{id: string, title: string, what: string, where: string, state: string, version: number}} Entry */
/**
 * @typedef {Entry & {records: number, kinds: string[], names: string[], name_kinds: number[][], ranks: number[],
 *   statistics: string[], steps: number[], total: number | undefined}} Run
 */
export const model = {
  /** @type {Run | null} */ run: null,
  /** @type {Entry[]} */ entries: [],
  error: "",
};

/** @param {string} id @returns {Promise<Run>} */
export async function loadRun(id) {
  const run = await request("run", { run: id });
  return { ...run, steps: decodeArray(run.steps) };
}

/** The last captured step at or before a step. @param {number[]} steps @param {number | null} step */
export function nearestStep(steps, step) {
  if (!steps.length) return null;
  return step === null ? steps[steps.length - 1] : steps[stepIndex(steps, step)];
}

/** The index of a step, or of the one before it. @param {number[]} steps @param {number} step */
export function stepIndex(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** What is selected, with defaults for what is not. @param {import("./state.js").State} state */
export function selection(state) {
  const run = model.run;
  const kinds = run?.kinds ?? [];
  const kind = [state.kind, "Activation", ...kinds].find((each) => kinds.includes(each)) ?? "";
  const isNumber = kind === "Value" || kind === "Local"; // single numbers without statistics
  const first = run?.names.find((_, i) => run.name_kinds[i].includes(kinds.indexOf(kind))) ?? run?.names[0];
  return {
    kind,
    metric: run?.statistics.includes(state.metric) ? state.metric : isNumber ? "value" : "rm2",
    names: state.name.length || first === undefined ? state.name : [first],
    stats: state.stat.length ? state.stat : isNumber ? ["value"] : ["rm2", "max_abs"],
    rank: state.rank !== "" && run?.ranks.includes(Number(state.rank)) ? state.rank : "",
    step: nearestStep(run?.steps ?? [], state.step),
    theme: document.documentElement.dataset.theme ?? "light",
  };
}
