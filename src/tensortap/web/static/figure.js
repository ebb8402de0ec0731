// Draws the figures of the server with plotly; none is made here.
import { array } from "./api.js";
import { empty, fill } from "./dom.js";

/** @type {any} */
const plotly = () => /** @type {any} */ (window).Plotly;

const CONFIG = {
  displaylogo: false, responsive: true, scrollZoom: false, doubleClick: "reset",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toImage"],
  // nothing of plotly's may leave this machine
  showEditInChartStudio: false, showSendToCloud: false, plotlyServerURL: "", topojsonURL: "",
};

/**
 * Draws a figure into an element; one that is empty is a sentence.
 * @param {any} into @param {any} figure @param {{height?: number, step?: number | null, layout?: any, config?: any, keep?: string}} [how]
 */
export async function draw(into, figure, how = {}) {
  const said = figure.layout?.meta?.empty;
  if (said) {
    clear(into);
    fill(into, empty(figure.layout.annotations?.[0]?.text ?? "Nothing here"));
    return;
  }
  if (!into.classList.contains("js-plotly-plot")) fill(into);
  const layout = { ...figure.layout, ...how.layout };
  if (how.height) layout.height = how.height;
  // zoom survives new data as long as this stays the same
  layout.uirevision = how.keep ?? "same";
  layout.shapes = [...(layout.shapes ?? []).filter((/** @type {any} */ s) => s.name !== "step"), ...lines(layout, how.step ?? null)];
  // of a figure that is hidden while it is drawn plotly may never say that it is done
  await Promise.race([plotly().react(into, figure.data, layout, { ...CONFIG, ...how.config }), new Promise((done) => setTimeout(done, 2000))]);
}

/** @param {any} into */
export function clear(into) {
  if (into.classList.contains("js-plotly-plot")) plotly().purge(into);
  into.classList.remove("js-plotly-plot");
  delete into.heard; // nobody listens to the next plot that is drawn here
}

/** A line at the step across every axis of steps. @param {any} layout @param {number | null} step */
function lines(layout, step) {
  if (step === null) return [];
  const axes = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key));
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
  return (axes.length ? axes : ["xaxis"]).map((key) => ({
    type: "line", name: "step", x0: step, x1: step, y0: 0, y1: 1, xref: key.replace("axis", ""),
    yref: "paper", line: { color: ink, width: 1.5 }, layer: "above",
  }));
}

/** Moves the line of the step. @param {any} into @param {number | null} step */
export function mark(into, step) {
  if (!into.classList.contains("js-plotly-plot") || !into.layout) return;
  const others = (into.layout.shapes ?? []).filter((/** @type {any} */ s) => s.name !== "step");
  plotly().relayout(into, { shapes: [...others, ...lines(into.layout, step)] });
}

/** Where a click was, in steps: of the nearest point, or of the place itself.
 * @param {any} into @param {(step: number, event: any) => void} call */
export function onStep(into, call) {
  on(into, "plotly_click", (/** @type {any} */ event) => {
    const x = event.points?.[0]?.x;
    if (Number.isFinite(Number(x))) call(Number(x), event);
  });
}

/** Listens once to an event of plotly. @param {any} into @param {string} name @param {(event: any) => void} call */
export function on(into, name, call) {
  into.heard ??= new Set();
  if (into.heard.has(name) || !into.on) return;
  into.heard.add(name);
  into.on(name, call);
}

/** Adds points to the lines of a figure. @param {any} into @param {Record<string, [any, any]>} points by the names of lines */
export async function extend(into, points) {
  if (!into.data) return false;
  /** @type {number[]} */
  const which = [];
  /** @type {any} */
  const added = { x: [], y: [] };
  for (const [name, [x, y]] of Object.entries(points)) {
    const number = into.data.findIndex((/** @type {any} */ t) => (t.meta?.name ?? t.name) === name);
    if (number < 0) return false;
    // the server may tell again of the last step that was known
    const known = into.data[number].x, last = known.length ? known[known.length - 1] : -Infinity;
    const at = array(x), values = array(y), from = at.findIndex((step) => step > last);
    if (from < 0) continue;
    which.push(number);
    added.x.push(at.slice(from));
    added.y.push(values.slice(from));
  }
  if (which.length) await plotly().extendTraces(into, added, which);
  return true;
}
