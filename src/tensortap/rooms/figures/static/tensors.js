// Tensors: a slice of a captured tensor, its values and histogram.
import { request } from "/static/api.js";
import {
  button, bytes, card, count, dim, empty, fill, h, kindText, labelled, number, select,
  setOptions, tools,
} from "/static/dom.js";
import { clear, draw, listen } from "/static/figure.js";
import { STATISTICS, model, selection } from "/static/model.js";
import { WHOLE_TENSOR, get, set } from "/static/state.js";

const LISTED = [
  "count", "zeros", "nans", "posinfs", "neginfs", "min", "max", "mean", "std", "rm2", "min_abs",
  "max_abs",
];
const NONFINITE = { nans: "NaN", posinfs: "+Inf", neginfs: "−Inf" };

const kept = select("Tensor", (value) => {
  const [name, kind] = JSON.parse(value);
  set({ name: [name], kind, ...WHOLE_TENSOR });
});
const heading = h("div", { class: "tools grow" });
const zoomOut = button("Whole slice", () => set({ zoom: "" }), { hidden: true });
const save = h("a", { class: "button", download: "" },
  button("Download .npy", undefined, { tabindex: "-1" }));
const plot = h("div", { class: "tensor" }), histogram = h("div", {});
const axes = h("div", { class: "axes" }), axesCard = card(axes);
const stats = h("div", {}), statsCard = card(stats);
const histogramCard = h("section", { class: "card figure" }, histogram);
const split = h("div", { class: "split" }, h("div", { class: "card figure" }, plot),
  h("div", { class: "column" }, axesCard, statsCard, histogramCard));
const message = card();
let drawn = "";
const bar = tools(heading, zoomOut, save);

export const tab = {
  id: "tensors",
  title: "Tensors",
  about: "The values of tensors that were kept whole",
  mount: (panel) => panel.append(tools(labelled("Tensor", kept)), bar, split, message),
  prepare: () => request("tensor_steps", { run: model.run.id }),

  async show(state) {
    const run = model.run, now = selection(state);
    const { tensors: all } = await request("tensor_steps", { run: run.id });
    const tensor = selectedTensor(all, now, state);
    drawTools(all, tensor, state);
    if (!tensor) {
      return showMessage("No tensors were kept",
        "This run has only statistics. To see tensors, keep some of them:",
        'tap.track(model, tensors=r"^head$")   or   tap.catch(x, "x")');
    }
    const { leaf, axes: drawnAxes, at, zoom } = state;
    const { name, kind } = tensor, { step, theme } = now, rank = now.rank.replace("all", "");
    const parameters = {
      run: run.id, name, kind, step, rank, leaf, axes: drawnAxes, at, zoom, theme,
    };
    const key = JSON.stringify([parameters, run.version]);
    if (key === drawn) return;
    try {
      const slice = await request("tensor", parameters);
      await drawSlice(slice, zoom, step, key);
      drawn = key;
    } catch (error) {
      drawn = "";
      showMessage("Nothing to draw", error.message);
    }
  },
};

function showMessage(...texts) {
  split.hidden = bar.hidden = true;
  message.hidden = false;
  fill(message, empty(...texts));
}

/** The kept tensor that is selected, or else the closest one. */
function selectedTensor(all, now, state) {
  const matching = all.filter((tensor) => now.names.includes(tensor.name));
  const ofKind = (wanted) => matching.find(({ kind }) => kind === wanted);
  const best = ofKind(state.kind) ?? ofKind(now.kind) ?? matching[0];
  if (best || !state.name.length) return best ?? all[0];
  // the server says why there is nothing
  return all.length ? { name: now.names[0], kind: now.kind } : null;
}

function drawTools(all, tensor, state) {
  const key = ({ name, kind }) => JSON.stringify([name, kind]);
  const options = all.map((each) =>
    [key(each), `${each.name} · ${kindText(each.kind)} (${count(each.steps.length)})`]);
  if (tensor && !all.some((each) => key(each) === key(tensor))) {
    options.unshift([key(tensor), `${tensor.name} · only statistics`]);
  }
  setOptions(kept, options.length ? options : [["", "none"]], tensor ? key(tensor) : "");
  kept.disabled = !options.length;
  zoomOut.hidden = !state.zoom;
}

// -- the slice -----------------------------------------------------------------------------------

async function drawSlice(slice, zoom, step, key) {
  message.hidden = true;
  split.hidden = bar.hidden = false;
  save.href = slice.download;
  drawHeading(slice, step);
  drawAxes(slice);
  statsCard.hidden = histogramCard.hidden = !slice.figure;
  if (!slice.figure) {
    clear(plot);
    return fill(plot, empty("No elements", slice.empty));
  }
  const { shape, all_statistics: all } = slice;
  fill(stats, shape.length > 2 && h("h3", {}, `Slice of ${shape.length} axes`),
    statisticsList(slice.statistics), all && h("details", {},
      h("summary", {}, `All ${count(all.count)} elements`), statisticsList(all)));
  const [top, bottom, left, right] = slice.region, layout = {};
  if (zoom) {
    const zoomed = (axis, range) => ({ ...slice.figure.layout[axis], range, autorange: false });
    layout.xaxis = zoomed("xaxis", [left - 0.5, right - 0.5]);
    if (slice.axes[0] >= 0) layout.yaxis = zoomed("yaxis", [bottom - 0.5, top - 0.5]);
  }
  const height = Math.max(340, split.parentElement.clientHeight - 138);
  await draw(plot, slice.figure, { height, keep: key, layout });
  listenZoom(slice.whole);
  if (!slice.histogram) return fill(histogram);
  await draw(histogram, slice.histogram, {
    height: 160, keep: key, config: { displayModeBar: false },
    layout: { margin: { l: 40, r: 8, t: 26, b: 24 } },
  });
}

function drawHeading(slice, step) {
  const choose = (leaf) => set({ ...WHOLE_TENSOR, leaf });
  const leaves = slice.leaves.length > 1 && select("Part of the value", choose);
  if (leaves) setOptions(leaves, slice.leaves.map((path) => [path, path || "value"]), slice.leaf);
  const facts = [
    kindText(slice.kind), `step ${count(slice.step)}`, slice.rank && `rank ${slice.rank}`,
    slice.call && `call ${slice.call}`, `[${slice.shape.join(", ")}] ${slice.dtype}`,
    bytes(slice.nbytes),
  ];
  const isOther = step !== null && slice.step !== step;
  fill(heading, h("h3", {}, slice.name), leaves, dim(facts.filter(Boolean).join(" · ")),
    isOther && h("span", { class: "pill silent" }, `not kept at step ${count(step)}`));
}

function statisticsList(values) {
  const isShown = (name) => name in values && (values[name] || !(name in NONFINITE));
  return h("dl", { class: "stats" }, LISTED.filter(isShown).map((name) => [
    h("dt", { title: STATISTICS[name]?.[1] }, NONFINITE[name] ?? (name === "rm2" ? "RMS" : name)),
    h("dd", { class: name in NONFINITE ? "bad" : "" }, number(values[name]))]));
}

/** Draws which axes are shown, and a slider for each of the others. */
function drawAxes({ shape, axes: drawnAxes, at }) {
  axesCard.hidden = shape.length < 2;
  const key = JSON.stringify([shape, drawnAxes]);
  const isDragging = axes.contains(document.activeElement) && axes.dataset.key === key;
  axes.dataset.key = key;
  if (isDragging) { // the slider must stay; only its number changes
    for (const slider of axes.querySelectorAll("input")) {
      slider.nextElementSibling.textContent = at[Number(slider.dataset.axis)];
    }
    return;
  }
  const pickers = ["Rows", "Columns"].map((label, which) => {
    const picker = select(`${label}: which axis`, (value) => {
      const next = [...drawnAxes], axis = Number(value);
      if (next[1 - which] === axis) next[1 - which] = next[which];
      next[which] = axis;
      set({ axes: next.join(","), zoom: "" });
    });
    const options = shape.map((size, axis) => [String(axis), `${axis} (${count(size)})`]);
    setOptions(picker, options, String(drawnAxes[which]));
    return h("label", { class: "dim" }, label, picker);
  });
  const sliders = shape.map((size, axis) => {
    if (drawnAxes.includes(axis)) return null;
    const slider = h("input", {
      type: "range", min: "0", max: String(Math.max(0, size - 1)), disabled: size < 2,
      "data-axis": String(axis), "aria-label": `Index on axis ${axis}`,
    });
    slider.value = String(at[axis]);
    slider.addEventListener("input", () => {
      const indices = get().at ? get().at.split(",").map(Number) : [...at];
      indices[axis] = Number(slider.value);
      set({ at: shape.map((_, i) => indices[i] ?? 0).join(",") });
    });
    return [dim(`axis ${axis}`), slider, h("span", { class: "num" }, at[axis])];
  });
  fill(axes, h("div", { class: "pickers" }, pickers), sliders);
}

// -- zoom: the server draws the visible part in finer tiles ---------------------------------------

let zoomTimer = 0, zoomedOutAt = -1000, sliceShape = [0, 0];

function listenZoom(shape) {
  sliceShape = shape;
  listen(plot, "plotly_relayout", onRelayout);
  listen(plot, "plotly_doubleclick", () => {
    clearTimeout(zoomTimer);
    zoomedOutAt = performance.now();
    set({ zoom: "" });
  });
}

function onRelayout(event) {
  // after a double click plotly returns to the initial ranges, which may be a part
  if (performance.now() - zoomedOutAt < 500) return;
  if (event["xaxis.autorange"] || event["yaxis.autorange"]) {
    return event.autosize ? undefined : set({ zoom: "" });
  }
  if (!Object.keys(event).some((key) => /^[xy]axis\.range/.test(key))) return;
  const cells = ({ range: [a, b] }) => [
    Math.max(0, Math.floor(Math.min(a, b) + 0.5)), Math.max(0, Math.ceil(Math.max(a, b) + 0.5)),
  ];
  const isLine = plot.data[0].type !== "heatmap";
  const [left, right] = cells(plot.layout.xaxis);
  const [top, bottom] = isLine ? [0, 1] : cells(plot.layout.yaxis);
  const isWhole = top <= 0 && left <= 0 && bottom >= sliceShape[0] && right >= sliceShape[1];
  clearTimeout(zoomTimer);
  const zoom = isWhole ? "" : [top, bottom, left, right].join(",");
  zoomTimer = window.setTimeout(() => set({ zoom }), 120);
}
