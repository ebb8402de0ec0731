// The top: what is shown, the training curves, the scrubber, play, follow.
import { decodeArray, request } from "./api.js";
import { $, count, dim, fill, h, plural } from "./dom.js";
import { clear, draw, extendLines, markStep, onStepClick } from "./figure.js";
import { model, nearestStep, selection, stepIndex } from "./model.js";
import { get, set } from "./state.js";
import { pill } from "./tree.js";

let playing = 0; // the interval
let drawn = ""; // what the curves show

const steps = () => model.run?.steps ?? [];
const currentStep = () => selection(get()).step;

/** Shows the title of the run in the bar. */
export function drawTitle() {
  const run = model.run;
  document.title = run ? `${run.title} · tensortap` : "tensortap";
  fill($("title"), run && [
    h("b", { title: run.where }, run.title), pill(run.state),
    dim(`${plural(run.records, "record")} · ${plural(run.names.length, "name")}`,
      run.ranks.length > 1 && ` · ${run.ranks.length} ranks`),
  ]);
}

/** Draws the training curves after `others`, or only moves the step if they are drawn already. */
export async function drawTraining(others) {
  const run = model.run, now = selection(get());
  if (!run) return;
  const key = `${run.id} ${now.theme} ${now.rank}`;
  if (key === drawn) return markStep($("training"), now.step);
  drawn = key;
  const figure = await request("training", { run: run.id, theme: now.theme, rank: now.rank })
    .catch((error) => { if (error.status !== 404) throw error; }); // no room draws them
  if (!figure) return;
  await others;
  // lists, because plotly cannot add points to arrays that came as bytes
  for (const line of figure.data) for (const axis of "xy") line[axis] = decodeArray(line[axis]);
  // else the legend takes two lines, and covers the curves
  for (const line of innerWidth < 640 ? figure.data : []) line.name = line.name?.replace(/ \(mean .*/, "");
  await draw($("training"), figure, {
    height: 104, step: now.step, keep: key, config: { displayModeBar: false },
    layout: { margin: { l: 52, r: figure.data.length > 1 ? 52 : 16, t: 20, b: 20 } },
  });
  onStepClick($("training"), goToStep);
}

/** Adds new points to the training curves. */
export async function addTraining(points) {
  if (!Object.keys(points).length) return;
  // drawn anew if a mean over ranks may still change, or if there are marks for NaN and Inf
  const isFinite = Object.values(points).every(([, y]) => decodeArray(y).every(Number.isFinite));
  if (model.run?.ranks.length > 1 || !isFinite || !(await extendLines($("training"), points))) {
    invalidateTraining();
    await drawTraining();
  }
}

export const invalidateTraining = () => void (drawn = "");

export function clearTraining() {
  invalidateTraining();
  clear($("training"));
  fill($("training"));
}

/** Shows the step in the scrubber. */
export function drawStep() {
  const all = steps(), step = currentStep(), scrubber = $("scrubber");
  scrubber.max = String(Math.max(0, all.length - 1));
  scrubber.disabled = $("play").disabled = $("step").disabled = all.length < 2;
  scrubber.value = String(step === null ? 0 : stepIndex(all, step));
  scrubber.setAttribute("aria-valuetext", step === null ? "no step" : `step ${step}`);
  if (document.activeElement !== $("step")) $("step").value = step === null ? "" : String(step);
  $("range").textContent = all.length ? `${count(all[0])} – ${count(all.at(-1))}` : "no steps";
  $("follow").checked = isFollowing();
}

/** Goes to a step, and stops following. */
export const goToStep = (step) => set({ step: nearestStep(steps(), step), follow: false });

/** Goes forward by a number of captured steps. */
export function moveSteps(by) {
  const all = steps(), step = currentStep();
  if (step === null) return;
  goToStep(all[Math.max(0, Math.min(all.length - 1, stepIndex(all, step) + by))]);
}

export function togglePlay() {
  if (playing) return pause();
  const all = steps();
  if (all.length < 2) return;
  if (currentStep() === all[all.length - 1]) goToStep(all[0]);
  // a long run takes half a minute
  const stride = Math.max(1, Math.round(all.length / 300));
  $("play").setAttribute("aria-pressed", "true");
  playing = window.setInterval(() => {
    const step = currentStep();
    if (step === null || stepIndex(steps(), step) >= steps().length - 1) return pause();
    moveSteps(stride);
  }, 100);
}

function pause() {
  clearInterval(playing);
  playing = 0;
  $("play").setAttribute("aria-pressed", "false");
}

/** Whether the page shows the newest step: by choice, or by default while training runs. */
function isFollowing() {
  const isGrowing = ["training", "live"].includes(model.run?.state ?? "");
  return get().step === null && (get().follow || isGrowing);
}

export function toggleFollow() {
  const follow = !isFollowing();
  set({ follow, step: follow ? null : currentStep() });
}

export function startTop() {
  const scrubber = $("scrubber"), step = $("step");
  scrubber.addEventListener("input", () => goToStep(steps()[Number(scrubber.value)] ?? null));
  step.addEventListener("change", () => step.value !== "" && goToStep(Number(step.value)));
  $("play").addEventListener("click", togglePlay);
  $("follow").addEventListener("change", toggleFollow);
}
