// The heatmap of the summary, and what Layers shows first: plotly takes longer to start than all else.
import { decodeArray } from "./api.js";
import { count, fill, h, number } from "./dom.js";

const PIXELS = 14; // per name beside the rows

/** Draws the cells of the server's heatmap, with the names of rows and a few steps. */
export function drawCells(element, { data, layout }, height = 210) {
  const [first] = data, { layers, tile } = layout.meta;
  const steps = decodeArray(first.x), columns = steps.length, rows = first.y.length;
  const canvas = h("canvas", { width: columns, height: rows });
  const image = new ImageData(columns, rows);
  const place = ([x, y]) => [(steps.findLastIndex((step) => step <= x) + 0.5) / columns,
    (first.y.indexOf(y) + 0.5) / rows];
  const marks = [];
  for (const trace of data) {
    if (trace.type === "heatmap") paint(image.data, trace);
    else trace.x.forEach((x, i) => x === null || marks.push([trace.marker, ...place([x, trace.y[i]])]));
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  const every = Math.ceil(rows / Math.floor(height / PIXELS));
  const names = first.y.map((_, row) => layers[row * tile]).filter((_, row) => row % every === 0);
  const numbers = { value: null }; // decoded when somebody points at a cell
  canvas.addEventListener("mousemove", ({ offsetX, offsetY }) => {
    numbers.value ??= decodeArray(first.customdata);
    const row = Math.floor((offsetY / canvas.clientHeight) * rows);
    const cell = 3 * (row * columns + Math.floor((offsetX / canvas.clientWidth) * columns));
    const [layer, step, value] = numbers.value.slice(cell, cell + 3);
    canvas.title = layer >= 0 ? `${layers[layer]}\nstep ${count(step)}\n${first.name} ${number(value)}` : "";
  });
  const { ticktext } = first.colorbar, colors = first.colorscale.map(([, color]) => color);
  fill(element, h("div", { class: "cell-map", style: `--height:${height}px` },
    h("div", { class: "cell-names" }, names.map((name) => h("span", { title: name }, h("bdi", {}, name)))),
    h("div", { class: "cells" }, canvas, marks.slice(0, 1000).map(([{ symbol, color }, x, y]) => h("i", {
      style: `left:${100 * x}%;top:${100 * y}%;color:${color}`,
    }, symbol === "square" ? "■" : "▲"))),
    h("div", { class: "cell-steps" }, h("span", {}, `step ${count(steps[0])}`), h("span", {},
      `${ticktext[0]} `, h("i", { style: `background:linear-gradient(90deg,${colors})` }),
      ` ${ticktext.at(-1)} the median of the row`), h("span", {}, count(steps.at(-1))))));
}

/** Colors the pixels of a trace: one per cell, in the colors of its scale. */
function paint(pixels, { z, zmin, zmax, colorscale }) {
  const scale = colorscale.map(([, color]) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)));
  const last = scale.length - 1;
  decodeArray(z).forEach((value, cell) => {
    if (Number.isNaN(value)) return;
    const at = Math.min(1, Math.max(0, (value - zmin) / (zmax - zmin))) * last;
    const low = Math.min(last - 1, Math.floor(at)), part = at - low;
    for (let i = 0; i < 3; i++) pixels[4 * cell + i] = scale[low][i] * (1 - part) + scale[low + 1][i] * part;
    pixels[4 * cell + 3] = 255;
  });
}
