// What the page knows of the run that is shown.
import { decodeArray, request } from "./api.js";

// a run is what the server says of it (routes/run.py), with `total`, its number of names
export const model = {
  run: null,
  entries: [],
  error: "",
};

export async function loadRun(id) {
  const run = await request("run", { run: id });
  return { ...run, steps: decodeArray(run.steps) };
}

/** The last captured step at or before a step. */
export function nearestStep(steps, step) {
  if (!steps.length) return null;
  return step === null ? steps[steps.length - 1] : steps[stepIndex(steps, step)];
}

/** The index of a step, or of the one before it. */
export function stepIndex(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Whether a run has such a rank; "all" shows every rank, "" whole tensors. */
function isRank(run, rank) {
  return rank === "all" || (rank !== "" && run?.ranks.includes(Number(rank)));
}

/** What is selected, with defaults for what is not. */
export function selection(state) {
  const run = model.run;
  const kinds = run?.kinds ?? [];
  const kind = [state.kind, "Activation", ...kinds].find((each) => kinds.includes(each)) ?? "";
  const isNumber = ["Value", "Local", "Health"].includes(kind); // single numbers without statistics
  const ofKind = (_, i) => run.name_kinds[i].includes(kinds.indexOf(kind));
  const first = run?.names.find(ofKind) ?? run?.names[0];
  return {
    kind,
    metric: run?.statistics.includes(state.metric) ? state.metric : isNumber ? "value" : "rm2",
    names: state.name.length || first === undefined ? state.name : [first],
    stats: state.stat.length ? state.stat : isNumber ? ["value"] : ["rm2", "max_abs"],
    rank: isRank(run, state.rank) ? state.rank : "",
    step: nearestStep(run?.steps ?? [], state.step),
    theme: document.documentElement.dataset.theme ?? "light",
  };
}
