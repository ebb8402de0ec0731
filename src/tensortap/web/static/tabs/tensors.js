// Tensors: a slice of a captured tensor, closer and closer; what it is minus another.
import { address, ask } from "../api.js";
import { bytes, choose, copyButton, count, empty, figure as number, fill, h, segments } from "../dom.js";
import { clear, draw, on } from "../figure.js";
import { chosen, model } from "../model.js";
import { get, set } from "../state.js";

/** @type {any} */ let plot;
/** @type {any} */ let bars;
/** @type {any} */ let card;
/** @type {any} */ let head;
/** @type {any} */ let line;
/** @type {any} */ let axes;
/** @type {any} */ let stats;
/** @type {any} */ let minus;
/** @type {any} */ let other;
/** @type {any} */ let kept;
/** @type {any} */ let tools;
/** @type {any} */ let split;
/** @type {any} */ let none;
/** @type {any} */ let save;
/** @type {any} */ let out;
let python = "";
let drawn = "";
let zoomed = 0;
let reset = -1000; // when it was zoomed out of: plotly goes back to where it began, which may be a part
/** @type {number[]} */ let whole = [0, 0]; // rows and columns of the slice

/** @type {import("../main.js").Tab} */
export const tensors = {
  id: "tensors",
  title: "Tensors",

  mount(panel) {
    kept = h("select", { "aria-label": "Tensor that was kept", onchange: pick });
    minus = segments("Minus", [["", "As it is"], ["step", "− step"], ["rank", "− rank"], ["run", "− run"]], (v) => set({ minus: v, zoom: "" }));
    other = h("span", { class: "tools" });
    head = h("div", { class: "tools", style: "flex: 1" });
    save = h("a", { class: "button", download: "" }, h("button", { type: "button", tabindex: "-1" }, "Download .npy"));
    tools = h("div", { class: "tools" }, h("label", {}, h("span", {}, "Kept"), kept), minus, other);
    plot = h("div", { class: "tensor" });
    bars = h("div", {});
    axes = h("div", { class: "axes" });
    stats = h("div", {});
    card = h("div", { class: "card figure" }, plot);
    split = h("div", { class: "split" }, card,
      h("div", { class: "column" },
        h("div", { class: "card", "aria-label": "Axes" }, axes), h("div", { class: "card", "aria-label": "Statistics" }, stats),
        h("div", { class: "card figure", "aria-label": "Histogram" }, bars)));
    none = h("div", { class: "card" });
    out = h("button", { type: "button", hidden: true, onclick: () => set({ zoom: "" }) }, "Whole slice");
    line = h("div", { class: "tools" }, head, out, save, copyButton(() => python, "Copy as Python"));
    panel.append(tools, line, split, none);
  },

  async show(state) {
    const run = model.run, now = chosen(state);
    if (!run) return;
    const held = await ask("held", { run: run.id });
    const name = choosable(held, now, state);
    drawTools(held, name, state);
    if (!name) {
      split.hidden = line.hidden = true;
      none.hidden = false;
      fill(none, empty("No tensor was kept whole", "Statistics are there; to see tensors themselves, keep some of them:", "tap.track(model, tensors=r\"^head$\")   or   tap.catch(x, \"x\")"));
      return;
    }
    const about = {
      run: run.id, name: name.name, kind: name.kind, step: now.step, rank: now.rank, axes: state.axes, at: state.at,
      leaf: state.leaf, minus: state.minus, otherstep: state.otherstep, otherrank: otherRank(state),
      other: state.minus === "run" ? state.other : "", zoom: state.zoom, theme: now.theme,
    };
    save.href = address("tensor.npy", { run: run.id, name: name.name, kind: name.kind, step: now.step, rank: now.rank, leaf: state.leaf });
    const key = JSON.stringify([about, run.version]);
    if (key === drawn) return;
    let found;
    try {
      found = await ask("tensor", about);
    } catch (error) {
      drawn = "";
      split.hidden = line.hidden = true;
      none.hidden = false;
      return fill(none, empty("Nothing to draw", /** @type {Error} */ (error).message));
    }
    none.hidden = true;
    split.hidden = line.hidden = false;
    python = found.python;
    drawHead(found, now.step);
    drawAxes(found);
    if (!found.figure) {
      clear(plot);
      fill(plot, empty("No elements", found.empty));
      clear(bars);
      fill(bars);
      fill(stats);
      stats.parentElement.hidden = bars.parentElement.hidden = true;
      drawn = key;
      return;
    }
    stats.parentElement.hidden = bars.parentElement.hidden = false;
    drawStats(found);
    const room = card.parentElement.parentElement.clientHeight - 138;
    const [top, bottom, left, right] = found.region;
    whole = found.whole;
    const part = state.zoom !== "";
    const layout = /** @type {any} */ ({});
    if (part && found.axes[0] >= 0) {
      layout.xaxis = { ...found.figure.layout.xaxis, range: [left - 0.5, right - 0.5], autorange: false };
      layout.yaxis = { ...found.figure.layout.yaxis, range: [bottom - 0.5, top - 0.5], autorange: false };
    } else if (part) layout.xaxis = { ...found.figure.layout.xaxis, range: [left - 0.5, right - 0.5], autorange: false };
    await draw(plot, found.figure, { height: Math.max(340, room), keep: key, layout });
    on(plot, "plotly_relayout", (/** @type {any} */ e) => zoom(e));
    on(plot, "plotly_doubleclick", () => {
      clearTimeout(zoomed);
      reset = performance.now();
      set({ zoom: "" });
    });
    if (found.histogram) await draw(bars, found.histogram, { height: 160, keep: key, config: { displayModeBar: false }, layout: { margin: { l: 40, r: 8, t: 26, b: 24 } } });
    else fill(bars);
    drawn = key;
  },
};

/** The tensor that is meant, or else the one that is nearest to what is chosen.
 * @param {any} held @param {any} now @param {any} state */
function choosable(held, now, state) {
  const fits = held.held.filter((/** @type {any} */ t) => now.names.includes(t.name));
  return fits.find((/** @type {any} */ t) => t.kind === state.kind) ?? fits.find((/** @type {any} */ t) => t.kind === now.kind) ?? fits[0]
    ?? (state.name.length ? null : held.held[0]) ?? (state.name.length && held.held.length ? { name: now.names[0], kind: now.kind, steps: [] } : null);
}

function pick() {
  const [name, kind] = JSON.parse(kept.value);
  set({ name: [name], kind, leaf: "", at: "", axes: "", zoom: "" });
}

/** @param {any} held @param {any} name @param {any} state */
function drawTools(held, name, state) {
  const options = held.held.map((/** @type {any} */ t) => [JSON.stringify([t.name, t.kind]), `${t.name} · ${t.kind.replaceAll("_", " ")} (${count(t.steps.length)})`]);
  const mine = name ? JSON.stringify([name.name, name.kind]) : "";
  if (name && !options.some((/** @type {any} */ o) => o[0] === mine)) options.unshift([mine, `${name.name} · statistics only`]);
  choose(kept, options.length ? options : [["", "none"]], mine);
  kept.disabled = !options.length;
  kept.style.maxWidth = "300px";
  minus.choose(state.minus);
  minus.allow("rank", (model.run?.ranks.length ?? 0) > 1 || state.minus === "rank", "There is one rank only");
  minus.allow("run", model.shown.length > 1 || state.minus === "run", "There is one run only");
  save.hidden = !name;
  out.hidden = !state.zoom;
  if (state.minus === "step") {
    const input = h("input", { type: "number", value: state.otherstep, placeholder: "the step before", "aria-label": "The other step", style: "width: 110px", onchange: () => set({ otherstep: input.value }) });
    input.value = state.otherstep;
    fill(other, input);
  } else if (state.minus === "rank") {
    const select = h("select", { "aria-label": "The other rank", onchange: () => set({ otherrank: select.value }) });
    choose(select, (model.run?.ranks ?? []).map((r) => /** @type {[string, string]} */ ([String(r), `rank ${r}`])), otherRank(state));
    fill(other, select);
  } else if (state.minus === "run") {
    const select = h("select", { "aria-label": "The other run", onchange: () => set({ other: select.value }) });
    choose(select, [["", "choose a run"], ...model.shown.filter((s) => s.id !== model.run?.id).map((s) => /** @type {[string, string]} */ ([s.id, s.title]))], state.other);
    fill(other, select);
  } else fill(other);
}

/** The rank that is taken away: the one that is chosen, or the first that is another. @param {any} state */
function otherRank(state) {
  const ranks = (model.run?.ranks ?? []).map(String), mine = chosen(state).rank || ranks[0];
  return ranks.includes(state.otherrank) ? state.otherrank : ranks.find((r) => r !== mine) ?? "";
}

/** @param {any} found @param {number | null} step */
function drawHead(found, step) {
  const leaves = found.leaves.length > 1 && h("select", { "aria-label": "Part of the value" });
  if (leaves) {
    choose(leaves, found.leaves.map((/** @type {string} */ l) => [l, l || "value"]), found.leaf);
    leaves.addEventListener("change", () => set({ leaf: leaves.value, at: "", axes: "", zoom: "" }));
  }
  fill(head, h("h3", {}, found.name), leaves,
    h("span", { class: "dim" }, `${found.kind.replaceAll("_", " ")} · step ${count(found.step)}${found.rank ? ` · rank ${found.rank}` : ""}${found.call ? ` · call ${found.call}` : ""} · [${found.shape.join(", ")}] ${found.dtype} · ${bytes(found.nbytes)}`),
    found.minus && h("span", { class: "pill" }, `minus ${found.minus}`),
    step !== null && found.step !== step && h("span", { class: "pill cut" }, `not kept at step ${count(step)}`));
}

/** Which axes are drawn, and where the others are cut. @param {any} found */
function drawAxes(found) {
  const [rows, columns] = found.axes;
  const parent = axes.parentElement;
  parent.hidden = found.shape.length < 2;
  if (parent.hidden) return;
  // a slider that is held must stay: only what it says changes
  const held = document.activeElement?.closest?.(".axes") && axes.dataset.key === JSON.stringify([found.shape, found.axes]);
  axes.dataset.key = JSON.stringify([found.shape, found.axes]);
  const choices = found.shape.map((/** @type {number} */ n, /** @type {number} */ i) => [String(i), `${i} (${count(n)})`]);
  if (held) {
    for (const slider of axes.querySelectorAll("input")) slider.nextElementSibling.textContent = found.at[Number(slider.dataset.axis)];
    return;
  }
  const pickers = [["Rows", rows, 0], ["Columns", columns, 1]].flatMap(([label, value, which]) => {
    const select = h("select", { "aria-label": `${label}: which axis` });
    choose(select, choices, String(value));
    select.addEventListener("change", () => {
      const next = [rows, columns], to = Number(select.value);
      if (next[1 - Number(which)] === to) next[1 - Number(which)] = next[Number(which)];
      next[Number(which)] = to;
      set({ axes: next.join(","), zoom: "" });
    });
    return [h("label", { class: "dim" }, String(label), select)];
  });
  const sliders = found.shape.flatMap((/** @type {number} */ size, /** @type {number} */ axis) => {
    if (axis === rows || axis === columns) return [];
    const slider = h("input", { type: "range", min: "0", max: String(Math.max(0, size - 1)), "data-axis": String(axis), "aria-label": `Index on axis ${axis}` });
    slider.value = String(found.at[axis]);
    slider.disabled = size < 2;
    slider.addEventListener("input", () => {
      const now = get().at ? get().at.split(",").map(Number) : [...found.at];
      for (let i = now.length; i < found.shape.length; i++) now.push(0);
      now[axis] = Number(slider.value);
      set({ at: now.join(",") });
    });
    return [h("span", { class: "dim" }, `axis ${axis}`), slider, h("span", { class: "num" }, found.at[axis])];
  });
  fill(axes, h("div", { class: "pickers" }, ...pickers), ...sliders);
}

const SAID = ["count", "zeros", "nans", "posinfs", "neginfs", "min", "max", "mean", "std", "rm2", "min_abs", "max_abs"];
const WORDS = /** @type {any} */ ({ nans: "NaN", posinfs: "+Inf", neginfs: "−Inf" });
/** @param {any} found */
function drawStats(found) {
  const slice = found.shape.length > 2;
  fill(stats, slice && h("h3", {}, `This slice of ${found.shape.length} axes`), table(found.statistics ?? {}),
    found.of_all && h("details", {}, h("summary", {}, `All ${count(found.of_all.count)} elements`), table(found.of_all)));
}

/** @param {any} said */
const table = (said) => h("dl", { class: "stats" }, ...SAID.filter((key) => key in said && !(key in WORDS && !said[key])).flatMap((key) => [
  h("dt", {}, WORDS[key] ?? key), h("dd", { class: key in WORDS ? "bad" : "" }, number(said[key]))]));

/** The part that is in sight; the server gives it in finer tiles. @param {any} e */
function zoom(e) {
  if (performance.now() - reset < 500) return;
  if (e["xaxis.autorange"] || e["yaxis.autorange"] || (e.autosize && !e["xaxis.range[0]"])) {
    if (!e.autosize && get().zoom) set({ zoom: "" });
    return;
  }
  if (!Object.keys(e).some((k) => k.startsWith("xaxis.range") || k.startsWith("yaxis.range"))) return;
  const { xaxis, yaxis } = plot.layout;
  const line = plot.data[0].type !== "heatmap";
  const [left, right] = order(xaxis.range), [top, bottom] = line ? [0, 1] : order(yaxis.range);
  const next = [Math.floor(top + 0.5), Math.ceil(bottom + 0.5), Math.floor(left + 0.5), Math.ceil(right + 0.5)].map((n) => Math.max(0, n));
  if (line) next[1] = 1;
  const all = next[0] <= 0 && next[2] <= 0 && next[1] >= whole[0] && next[3] >= whole[1];
  clearTimeout(zoomed);
  zoomed = window.setTimeout(() => set({ zoom: all ? "" : next.join(",") }), 120);
}

/** @param {[number, number]} range */
const order = ([a, b]) => (a < b ? [a, b] : [b, a]);
