// What the page knows of the run that is shown.
import { decodeArray, request } from "./api.js";

// a run is what the server says of it (routes/run.py), with `total`, its number of names
export const model = {
  run: null,
  entries: [],
  error: "",
  problems: new Map(), // id of a run that was opened → how many alerts it has
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

/** Statistics by their key: a name and an explanation for people. */
export const STATISTICS = {
  auto: ["value or RMS", "The number itself; of a tensor its root mean square"],
  value: ["value", "The number itself"],
  rm2: ["RMS (rm2)", "Root mean square: the typical size of the values"],
  max_abs: ["largest |x| (max_abs)", "The largest magnitude"],
  min_abs: ["smallest |x| (min_abs)", "The smallest magnitude that is not zero"],
  mean_abs: ["mean |x| (mean_abs)", "The mean of the magnitudes"],
  mean: ["mean", "The mean of the values"], std: ["std", "Standard deviation: the spread around the mean"],
  min: ["min", "The smallest value"], max: ["max", "The largest value"],
  rm4: ["4th moment (rm4)", "Fourth root of the mean of x⁴: above RMS if there are outliers"],
  rm8: ["8th moment (rm8)", "Eighth root of the mean of x⁸: outliers weigh even more"],
  count: ["count", "How many values there are"], finite: ["finite", "How many values are finite"],
  zeros: ["zeros", "How many values are zero"], nans: ["NaN (nans)", "How many values are NaN"],
  posinfs: ["+Inf (posinfs)", "How many values are +Inf"], neginfs: ["−Inf (neginfs)", "How many values are −Inf"],
  nonfinite: ["not finite (nonfinite)", "How many values are NaN or infinite"],
};
export const statisticText = (key) => STATISTICS[key]?.[0] ?? key;

/** The states of the optimizer that a run has, such as exp_avg: the ends of their names. */
function optimizerStates(run) {
  const kind = run.kinds.indexOf("Optimiser_State");
  const ends = run.names.filter((_, i) => run.name_kinds[i].includes(kind)).map((name) => name.split(".").at(-1));
  return [...new Set(ends)];
}

/** The kinds of a run; each state of the optimizer is one of its own. */
export function kindsOf(run) {
  return run.ownKinds ??= run.kinds.flatMap((kind) => (kind !== "Optimiser_State" ? [kind]
    : optimizerStates(run).map((state) => `${kind}.${state}`)));
}

/** What is selected, with defaults for what is not. */
export function selection(state) {
  const run = model.run;
  const kinds = run ? kindsOf(run) : [];
  const find = (wanted) => kinds.find((each) => each === wanted || each.startsWith(`${wanted}.`));
  const chosen = find(state.kind) ?? find("Activation") ?? kinds[0] ?? "";
  const [kind, key = ""] = chosen.split(/\.(.*)/s);
  const isCaught = ["Value", "Local", "Health"].includes(kind); // numbers, or tensors without statistics
  const ofKind = (name, i) => run.name_kinds[i].includes(run.kinds.indexOf(kind)) && (!key || name.endsWith(`.${key}`));
  const first = run?.names.find(ofKind) ?? run?.names[0];
  return {
    kind, key, ofKind,
    metric: run?.statistics.includes(state.metric) ? state.metric : isCaught ? "auto" : "rm2",
    names: state.name.length || first === undefined ? state.name : [first],
    stats: state.stat.length ? state.stat : isCaught ? ["auto"] : ["rm2", "max_abs"],
    rank: isRank(run, state.rank) ? state.rank : "",
    step: nearestStep(run?.steps ?? [], state.step),
    theme: document.documentElement.dataset.theme ?? "light",
  };
}
