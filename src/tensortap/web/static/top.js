// The top: the curve of the loss, the scrubber, play, follow.
import { array, ask } from "./api.js";
import { $, count, fill, h } from "./dom.js";
import { clear, draw, extend, mark, onStep } from "./figure.js";
import { chosen, model, nearest, place } from "./model.js";
import { get, set } from "./state.js";
import { pill } from "./tree.js";

let playing = 0;
let drawn = "";

/** What is shown, in the bar. */
export function drawHere() {
  const run = model.run;
  document.title = run ? `${run.title} · tensortap` : "tensortap";
  if (!run) return fill($("here"));
  fill($("here"), h("b", { title: run.where }, run.title), pill(run.state),
    h("span", { class: "dim" }, `${count(run.records)} records · ${count(run.names.length)} names` + (run.ranks.length > 1 ? ` · ${run.ranks.length} ranks` : "")));
}

/** The curve; only when it is another one, points that are new are added. */
export async function drawTraining() {
  const run = model.run, now = chosen(get());
  if (!run) return;
  const key = `${run.id} ${now.theme} ${now.rank}`;
  if (key === drawn) return mark($("training"), now.step);
  drawn = key;
  const figure = await ask("training", { run: run.id, theme: now.theme, rank: now.rank });
  // plain lists: plotly cannot add points to arrays that came as bytes
  for (const line of figure.data) Object.assign(line, { x: array(line.x), y: array(line.y) });
  await draw($("training"), figure, {
    height: 104, step: now.step, keep: key, config: { displayModeBar: false },
    layout: { margin: { l: 52, r: figure.data.length > 1 ? 52 : 16, t: 20, b: 20 } },
  });
  onStep($("training"), (step) => go(step));
}

/** @param {Record<string, [any, any]>} points */
export async function addTraining(points) {
  if (!Object.keys(points).length) return;
  // a mean over ranks may still change, and what is not finite has marks of its own: drawn anew
  const plain = (model.run?.ranks.length ?? 1) < 2 && Object.values(points).every(([, y]) => array(y).every(Number.isFinite));
  if (!plain || !(await extend($("training"), points))) {
    redoTraining();
    await drawTraining();
  }
}

export function redoTraining() {
  drawn = "";
}

/** Nothing is shown. */
export function clearTop() {
  drawn = "";
  clear($("training"));
  fill($("training"));
}

/** The scrubber, at the step. */
export function drawStep() {
  const steps = model.run?.steps ?? [], step = chosen(get()).step;
  const scrubber = $("scrubber");
  scrubber.max = String(Math.max(0, steps.length - 1));
  scrubber.disabled = $("play").disabled = $("step").disabled = steps.length < 2;
  scrubber.value = String(step === null ? 0 : place(steps, step));
  scrubber.setAttribute("aria-valuetext", step === null ? "no step" : `step ${step}`);
  if (document.activeElement !== $("step")) $("step").value = step === null ? "" : String(step);
  $("range").textContent = steps.length ? `${count(steps[0])} – ${count(steps[steps.length - 1])}` : "no steps";
  $("follow").checked = following();
}

/** Goes to a step; whoever does so does not follow any more. @param {number | null} step */
export function go(step) {
  set({ step: nearest(model.run?.steps ?? [], step), follow: false });
}

/** So many steps on, of those that there are. @param {number} by */
export function move(by) {
  const steps = model.run?.steps ?? [], step = chosen(get()).step;
  if (step === null) return;
  go(steps[Math.max(0, Math.min(steps.length - 1, place(steps, step) + by))]);
}

export function togglePlay() {
  if (playing) return stop();
  const steps = model.run?.steps ?? [], step = chosen(get()).step;
  if (steps.length < 2) return;
  if (step === steps[steps.length - 1]) go(steps[0]);
  // a long run in half a minute, a short one not faster than the eye
  const stride = Math.max(1, Math.round(steps.length / 300));
  $("play").setAttribute("aria-pressed", "true");
  playing = window.setInterval(() => {
    const all = model.run?.steps ?? [], now = chosen(get()).step;
    if (now === null || place(all, now) >= all.length - 1) return stop();
    move(stride);
  }, 100);
}

function stop() {
  clearInterval(playing);
  playing = 0;
  $("play").setAttribute("aria-pressed", "false");
}

/** Whether the newest step is shown, whichever it is: asked for, or while a training runs. */
function following() {
  const state = get(), moves = ["open", "live"].includes(model.run?.state ?? "");
  return state.step === null && (state.follow || moves);
}

export function toggleFollow() {
  const follow = !following();
  set({ follow, ...(follow ? { step: null } : { step: chosen(get()).step }) });
}

export function startTop() {
  $("scrubber").addEventListener("input", () => go((model.run?.steps ?? [])[Number($("scrubber").value)] ?? null));
  $("step").addEventListener("change", () => $("step").value !== "" && go(Number($("step").value)));
  $("play").addEventListener("click", togglePlay);
  $("follow").addEventListener("change", toggleFollow);
}
