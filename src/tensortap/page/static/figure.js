// Draws the figures of the server with plotly.
import { decodeArray } from "./api.js";
import { $, empty, fill, h } from "./dom.js";

const plotly = () => window.Plotly;
let loading = null;

/** Starts plotly, which takes longer than everything else: requests are sent before. */
export function loadPlotly() {
  return loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: $("plotly").href, onload: resolve });
    script.addEventListener("error", () => reject(new Error("plotly cannot be loaded")));
    document.head.append(script);
  });
}

const CONFIG = {
  displaylogo: false, responsive: true, scrollZoom: false, doubleClick: "reset",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toImage"],
  // plotly must not contact any server
  showEditInChartStudio: false, showSendToCloud: false, plotlyServerURL: "", topojsonURL: "",
};

/**
 * Draws a figure into an element; for an empty figure, its message. Zoom survives as long as
 * `keep` stays the same. Other options: height, step, layout, config; `preview` draws the figure
 * until plotly has started.
 */
export async function draw(element, figure, options = {}) {
  sizes.observe(element);
  if (figure.layout?.meta?.empty) {
    clear(element);
    return fill(element, empty(figure.layout.annotations?.[0]?.text ?? "Nothing here"));
  }
  if (!plotly() && options.preview) {
    options.preview(element, figure, options.height - 30);
    element.parentElement.classList.remove("waiting");
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve))); // it is seen
  }
  await loadPlotly();
  if (!element.classList.contains("js-plotly-plot")) fill(element);
  const layout = { ...figure.layout, ...options.layout, uirevision: options.keep ?? "same" };
  if (options.height) layout.height = options.height;
  layout.shapes = withStepLine(layout, options.step ?? null);
  const drawing = plotly().react(element, figure.data, layout, { ...CONFIG, ...options.config });
  // plotly may never finish a figure that is hidden while it is drawn
  await Promise.race([drawing, new Promise((resolve) => setTimeout(resolve, 2000))]);
}

// plotly follows the window only, and gets the size of a hidden tab wrong
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect: { width } } of entries) {
    const drawn = target._fullLayout?.width ?? width;
    if (width && Math.abs(drawn - width) > 1) plotly().Plots.resize(target);
  }
});

/** Removes the figure and its listeners from an element. */
export function clear(element) {
  if (element.classList.contains("js-plotly-plot")) plotly().purge(element);
  element.classList.remove("js-plotly-plot");
  delete element.listenedEvents;
}

/** The shapes of a layout, with a line at the step across every x axis. */
function withStepLine(layout, step) {
  const others = (layout.shapes ?? []).filter((shape) => shape.name !== "step");
  if (step === null) return others;
  const axes = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key));
  const color = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
  return [...others, ...(axes.length ? axes : ["xaxis"]).map((key) => ({
    type: "line", name: "step", x0: step, x1: step, y0: 0, y1: 1, xref: key.replace("axis", ""),
    yref: "paper", line: { color, width: 1.5 }, layer: "above",
  }))];
}

/** Moves the line at the step. */
export function markStep(element, step) {
  if (!element.classList.contains("js-plotly-plot") || !element.layout) return;
  plotly().relayout(element, { shapes: withStepLine(element.layout, step) });
}

/** Adds one listener per event of plotly. */
export function listen(element, event, callback) {
  element.listenedEvents ??= new Set();
  if (element.listenedEvents.has(event) || !element.on) return;
  element.listenedEvents.add(event);
  element.on(event, callback);
}

/** Calls back with the step of a clicked point. */
export function onStepClick(element, callback) {
  listen(element, "plotly_click", (event) => {
    const x = Number(event.points?.[0]?.x);
    if (Number.isFinite(x)) callback(x);
  });
}

/** Adds points to lines, by their names; false if there is no such line. */
export async function extendLines(element, points) {
  if (!element.data) return false;
  const traces = [], added = { x: [], y: [] };
  for (const [name, [x, y]] of Object.entries(points)) {
    const trace = element.data.findIndex((each) => (each.meta?.name ?? each.name) === name);
    if (trace < 0) return false;
    // the server may repeat the last known step
    const last = element.data[trace].x.at(-1) ?? -Infinity;
    const steps = decodeArray(x), start = steps.findIndex((step) => step > last);
    if (start < 0) continue;
    traces.push(trace);
    added.x.push(steps.slice(start));
    added.y.push(decodeArray(y).slice(start));
  }
  if (traces.length) await plotly().extendTraces(element, added, traces);
  return true;
}
