// Ranks: one statistic of every rank, by steps or by layers. Groups of the mesh open and close; a
// click on a cell opens the tensor of its rank.
import { request } from "/static/api.js";
import {
  $, button, count, dim, fill, grow, h, labelled, plural, segments, select, setOptions, tools,
} from "/static/dom.js";
import { draw, listen, markStep } from "/static/figure.js";
import { model, selection, statisticText } from "/static/model.js";
import { get, set } from "/static/state.js";
import { listenSpan, spanButton, spanLayout } from "/rooms/figures/figure_tab.js";

const TOP = 8, BOTTOM = 42, LABELS_BOTTOM = 118; // margins of the plot, as in figure.py
const SMALLEST = 14, LARGEST = 30; // pixels of a row

const metric = select("Statistic", (value) => set({ metric: value }));
const across = segments("Columns", [["", "By steps"], ["layers", "By layers"]],
  (value) => set({ across: value }));
const values = segments("Values", [["", "Values"], ["median", "− median rank"]],
  (value) => set({ median: value === "median" }));
const openAll = button("Open all", () => set({ open: "all" }));
const closeAll = button("Close all", () => set({ open: "none" }));
const subject = h("b", {}), far = h("div", { class: "chips", "aria-label": "Outliers" });
const alerted = h("div", { class: "chips", "aria-label": "Alerts about ranks" });
const zoomOut = spanButton();
const list = h("div", { class: "rank-rows", role: "tree", "aria-label": "Ranks" });
const plot = h("div", { class: "ranks" });
const figureCard = h("div", { class: "card figure rank-figure" }, list, plot);
// alerts about ranks, and the word for each
const ALERTS = { behind: "behind", replicas: "other replica", outlier: "far" };
const MOST_ALERTS = 12;
let drawn = "", rows = [], paths = {}, focused = 0;

export const tab = {
  id: "ranks",
  title: "Ranks",
  about: "Every rank side by side, and those that are unlike the others",
  isUsed: (run) => run.ranks.length > 1,
  mount: (panel) => panel.append(
    tools(labelled("Statistic", metric), across, values, zoomOut, grow(), openAll, closeAll),
    tools(subject, far, alerted), figureCard),

  async show(state) {
    const now = selection(state), isOverSteps = !state.across;
    if (now.metric === "auto") now.metric = "value";
    setOptions(metric, model.run.statistics.map((key) => [key, statisticText(key)]), now.metric);
    across.choose(state.across);
    values.choose(state.median ? "median" : "");
    zoomOut.classList.toggle("unused", !isOverSteps);
    const parameters = {
      run: model.run.id, kind: now.kind, metric: now.metric, theme: now.theme, open: state.open,
      across: state.across, median: state.median, q: isOverSteps ? "" : state.q,
      name: isOverSteps ? now.names.slice(0, 1) : [], step: isOverSteps ? null : now.step,
    };
    const key = JSON.stringify([model.run.version, state.span, parameters]);
    if (key === drawn) return isOverSteps ? markStep(plot, now.step) : undefined;
    const waiting = setTimeout(() => figureCard.classList.add("waiting"), 150);
    try {
      const figure = await request("ranks", parameters);
      await drawFigure(figure, state, now);
      drawn = key;
      void addAlerts(key);
    } finally {
      clearTimeout(waiting);
      figureCard.classList.remove("waiting");
    }
  },
};

async function drawFigure(figure, state, now) {
  const isOverSteps = !state.across, layout = figure.layout;
  ({ rows, paths = {} } = figure);
  const bottom = isOverSteps ? BOTTOM : LABELS_BOTTOM;
  const room = $("panels").clientHeight - 110 - TOP - bottom;
  const size = Math.floor(Math.max(SMALLEST, Math.min(LARGEST, room / Math.max(1, rows.length))));
  const columns = isOverSteps ? "step" : "layer";
  fill(subject, isOverSteps ? now.names[0] ?? "" : `${now.kind.replaceAll("_", " ")} at step ${count(figure.step)}`);
  drawOutliers(figure, columns);
  drawRows(size);
  openAll.hidden = closeAll.hidden = !rows.some((row) => !row.leaf);
  for (const trace of figure.data.slice(0, 1)) {
    if (!isOverSteps) trace.text = rows.map(() => layout.meta.labels);
  }
  await draw(plot, figure, {
    height: rows.length ? rows.length * size + TOP + bottom : 260,
    step: isOverSteps ? now.step : null,
    keep: JSON.stringify([model.run.id, state.across, state.span]),
    layout: {
      ...(isOverSteps ? spanLayout(layout) : {}), margin: { ...layout.margin, b: bottom },
    },
  });
  if (isOverSteps) listenSpan(plot);
  listen(plot, "plotly_click", (event) => void openCell(event));
}

// -- outliers ------------------------------------------------------------------------------------

function drawOutliers({ outliers = [], limits = "", columns: shown, of_columns: all }, columns) {
  const chip = ({ rank, columns: times, place }) => button(`rank ${rank}`, () => reveal(rank), {
    class: "chip toggle outlier", title: [place, `far in ${plural(times, columns)}`].filter(Boolean).join(": "),
  });
  fill(far, outliers.length ? [dim("far from the others:"), outliers.map(chip)]
    : dim(limits || "no rank is far from the others"),
    shown < all && dim(`${count(shown)} of ${count(all)} ${columns}s: those at which a rank is farthest`));
}

/** Draws the alerts once they are known: to compare the ranks of a large run takes a while. */
async function addAlerts(key) {
  fill(alerted, dim("comparing ranks …"));
  alerted.hidden = false;
  // their tab reports errors
  const { alerts: all } = await request("alerts", { run: model.run.id }).catch(() => ({ alerts: [] }));
  if (key === drawn) drawAlerts(all);
}

/** Names the ranks about which there are alerts, and marks their rows. */
function drawAlerts(all) {
  const found = all.filter(({ rule, rank }) => ALERTS[rule] && paths[rank] !== undefined);
  const chip = ({ rule, rank, name, message }) => button(
    `rank ${rank}: ${ALERTS[rule]}${name === `rank ${rank}` ? "" : ` · ${name}`}`, () => reveal(rank),
    { class: "chip toggle outlier", title: message });
  fill(alerted, found.length > 0 && dim("alerts:"), found.slice(0, MOST_ALERTS).map(chip),
    found.length > MOST_ALERTS && dim(`and ${count(found.length - MOST_ALERTS)} more`));
  alerted.hidden = !found.length;
  for (const [index, element] of [...list.children].entries()) {
    const row = rows[index], own = row.open ? [] : found.filter(({ rank }) => row.ranks.includes(rank));
    if (!own.length) continue;
    element.title = own.map(({ message }) => message).join("\n");
    element.append(h("span", { class: "flag" }, [...new Set(own.map(({ rule }) => ALERTS[rule]))].join(", ")));
  }
}

/** Opens the groups in which a rank is. */
function reveal(rank) {
  const own = paths[rank].split(".").map(Number);
  const holds = (key) => key.split(".").every((part, i) => {
    const [low, high] = part.split("-").map(Number);
    return own[i] >= low && own[i] <= (high ?? low);
  });
  const opened = rows.filter((row) => row.open).map((row) => row.key);
  const blocks = rows.filter((row) => !row.leaf && holds(row.key)).map((row) => row.key);
  const parents = own.slice(0, -1).map((_, i) => own.slice(0, i + 1).join("."));
  set({ open: [...new Set([...opened, ...blocks, ...parents])].join(",") });
}

// -- rows ----------------------------------------------------------------------------------------

function drawRows(size) {
  const hadFocus = list.contains(document.activeElement);
  focused = Math.min(focused, Math.max(0, rows.length - 1));
  list.style.paddingTop = `${TOP}px`;
  fill(list, rows.map((row, index) => {
    const element = h("div", {
      class: ["rank-row", row.leaf && "leaf", row.outliers > 0 && "outlier"].filter(Boolean).join(" "),
      role: "treeitem", tabindex: index === focused ? "0" : "-1",
      "aria-level": String(row.depth + 1), "aria-expanded": row.leaf ? null : String(row.open),
      title: row.leaf ? row.label : `${row.label}: ${plural(row.ranks.length, "rank")}`,
      onclick: () => toggle(index), onkeydown: (event) => onKeyDown(event, index),
    },
      h("span", { class: "twisty" }, row.leaf ? "" : "▶"), h("span", { class: "label" }, row.label),
      !row.leaf && h("span", { class: "count" }, count(row.ranks.length)));
    element.style.height = `${size}px`;
    element.style.paddingLeft = `${row.depth * 12}px`;
    return element;
  }));
  if (hadFocus) list.children[focused]?.focus();
}

function toggle(index) {
  const row = rows[index];
  focused = index;
  if (row.leaf) return set({ rank: String(row.ranks[0]) });
  const opened = rows.filter((each) => each.open && each !== row).map((each) => each.key);
  if (!row.open) opened.push(row.key);
  set({ open: opened.join(",") || "none" });
}

function onKeyDown(event, index) {
  const row = rows[index], by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const closes = event.key === "ArrowLeft" && row.open, opens = event.key === "ArrowRight" && !row.open;
  if (by) {
    focused = Math.max(0, Math.min(rows.length - 1, index + by));
    for (const [i, element] of [...list.children].entries()) element.tabIndex = i === focused ? 0 : -1;
    list.children[focused].focus();
  } else if (event.key === "Enter" || (!row.leaf && (closes || opens))) toggle(index);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

/** Opens the tensor of a cell: itself if it was kept, else its exponents. */
async function openCell(event) {
  const cell = event.points?.find((point) => point.customdata?.length > 3);
  if (!cell || !Number.isFinite(cell.customdata[0])) return;
  const [rank, column] = cell.customdata, state = get(), now = selection(state);
  const names = plot.layout.meta.names;
  const name = state.across ? names[cell.x] : now.names[0];
  const step = state.across ? now.step : column;
  const { tensors } = await request("tensor_steps", { run: model.run.id });
  const isKept = tensors.some((each) => each.name === name && each.kind === now.kind && each.steps.includes(step));
  set({
    tab: isKept ? "tensors" : "exponents", name: [name], kind: now.kind, rank: String(rank), step,
    follow: false,
  }, true);
}
