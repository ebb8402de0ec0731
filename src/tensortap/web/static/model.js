// The run that is looked at, as far as the page knows it.
import { array, ask } from "./api.js";

/**
 * @typedef {object} Run
 * @property {string} id @property {string} title @property {string} what @property {string} where @property {string} state
 * @property {number} version @property {number} records @property {string[]} kinds
 * @property {string[]} names @property {number[][]} name_kinds @property {number[]} ranks
 * @property {string[]} statistics @property {string[]} dtypes @property {string[]} metrics @property {number[]} steps
 */
/** @typedef {{id: string, title: string, what: string, where: string, state: string, version: number}} Shown */

export const model = {
  /** @type {Run | null} */ run: null,
  /** @type {Shown[]} */ shown: [],
  error: "",
};

/** @param {string} id */
export async function load(id) {
  const run = await ask("run", { run: id });
  return { ...run, steps: array(run.steps) };
}

/** The last step that is there, at or before one. @param {number[]} steps @param {number | null} step */
export function nearest(steps, step) {
  if (!steps.length) return null;
  if (step === null) return steps[steps.length - 1];
  return steps[place(steps, step)];
}

/** Where a step is among them, or the one before it. @param {number[]} steps @param {number} step */
export function place(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** What is chosen, or what one would choose. @param {import("./state.js").State} state */
export function chosen(state) {
  const run = model.run;
  const kinds = run?.kinds ?? [];
  const kind = kinds.includes(state.kind) ? state.kind : kinds.includes("Activation") ? "Activation" : kinds[0] ?? "";
  const number = kinds.indexOf(kind);
  const names = state.name.length ? state.name : [];
  const single = kind === "Value" || kind === "Local"; // of which there are numbers, and no statistics
  const first = run?.names.find((_, i) => run.name_kinds[i].includes(number)) ?? run?.names[0];
  const statistics = run?.statistics ?? [];
  return {
    kind,
    metric: statistics.includes(state.metric) ? state.metric : single ? "value" : "rm2",
    names: names.length ? names : first === undefined ? [] : [first],
    stats: state.stat.length ? state.stat : single ? ["value"] : ["rm2", "max_abs"],
    rank: run?.ranks.includes(Number(state.rank)) && state.rank !== "" ? state.rank : "",
    step: nearest(run?.steps ?? [], state.step),
    theme: document.documentElement.dataset.theme ?? "light",
  };
}
