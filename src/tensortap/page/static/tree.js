// The left: the list of runs, and the tree of names, of which only visible rows are elements.
import { request } from "./api.js";
import {
  $, age, count, dim, fill, h, kindText, number, plural, seconds, setOptions, svgLine,
} from "./dom.js";
import { kindsOf, model, selection } from "./model.js";
import { WHOLE_TENSOR, get, set } from "./state.js";

const ROW_HEIGHT = 26, EXTRA_ROWS = 12, INDENT = 13;
// not in RE2, the engine of the server
const UNSUPPORTED = /\(\?<?[=!]|\\[1-9]/;
const MAX_BRIEFS = 50; // runs of which the list shows the loss and the alerts
const MAX_SPARKLINES = 100, MAX_QUERY = 16_000; // names and characters per request

/** Functions of a name that return an element for its row, or nothing; rooms add to them. */
export const rowExtras = [];

let rows = [];
const closedPaths = new Set();
let focusedRow = 0;
let arranged = ""; // what the rows were made of
let sparklines = new Map(), visibleNames = [];
let sparklineKey = "", requesting = false, refreshed = 0;

const STATES = {
  live: "a live session", closed: "the live session has closed", training: "its process is alive",
  ended: "it ran to its end", crashed: "an exception or a signal ended it", deleted: "its files are gone",
  silent: "it did not end, and its process is on another machine", unreadable: "it cannot be read",
};
export const pill = (state) => h("span", { class: `pill ${state}`, title: STATES[state] }, state);

// what the list of runs can be sorted by: a text, and the key of an entry; the smallest comes first
const SORTS = {
  "": ["newest", null], name: ["name", (entry) => entry.title], duration: ["longest", (entry) => -(entry.seconds ?? 0)],
  loss: ["loss", (entry) => Number(entry.brief?.loss?.[0]?.value ?? NaN)],
  alerts: ["alerts", (entry) => -(entry.brief?.alerts ?? -1)],
};

function sortedEntries() {
  const key = SORTS[get().sort]?.[1];
  if (!key) return model.entries;
  const before = (a, b) => (a === b ? 0 : Number.isNaN(a) || a > b ? 1 : -1); // NaN comes last
  const live = (entry) => (entry.what === "live" ? 0 : 1);
  return [...model.entries].sort((a, b) => live(a) - live(b) || before(key(a), key(b)));
}

/** Age, duration, last loss and alerts of a run, in few words. */
function briefLine({ id, started, seconds: time, brief }) {
  const alerts = model.problems.get(id) ?? brief?.alerts;
  const [metric] = brief?.loss ?? [], last = Number(metric?.value).toPrecision(3);
  return dim([
    started && age(started), time > 0 && seconds(time),
    metric && `${metric.name} ${typeof metric.value === "number" ? number(Number(last)) : metric.value}`,
    alerts > 0 && plural(alerts, "alert"),
  ].filter(Boolean).join(" · "));
}

/** Requests what the list shows of each run, one after the other; nothing waits for it. */
async function requestBriefs() {
  for (const entry of model.entries.slice(0, MAX_BRIEFS)) {
    if (entry.what !== "run" || entry.brief?.version === entry.version) continue;
    const brief = await request("brief", { run: entry.id }).catch(() => ({}));
    entry.brief = { ...brief, version: entry.version };
    drawRuns();
  }
}
let briefs = null;
export const addBriefs = () => (briefs ??= requestBriefs().finally(() => (briefs = null)));

/** Draws the list of runs and live sessions. */
export function drawRuns() {
  setOptions($("sort"), Object.entries(SORTS).map(([key, [text]]) => [key, text]), get().sort);
  $("sort").hidden = model.entries.length < 2;
  fill($("runs"), sortedEntries().map((entry) => h("li", {
    role: "option", tabindex: "0", title: [entry.where, entry.notes].filter(Boolean).join("\n"),
    "aria-label": entry.title,
    "aria-selected": String(entry.id === get().run),
    onclick: () => selectRun(entry.id),
    onkeydown(event) {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      selectRun(entry.id);
    },
  }, h("span", {}, entry.title), pill(entry.state), briefLine(entry))));
  if (!model.entries.length) fill($("runs"), h("li", {}, dim("No run here yet")));
}

function selectRun(id) {
  if (id !== get().run) set({ run: id, step: null, span: "", why: "", name: [], ...WHOLE_TENSOR }, true);
}

/** Draws the filters and the tree. */
export function drawNames() {
  const run = model.run, state = get(), now = selection(state);
  const kinds = run ? kindsOf(run) : [], ranks = run?.ranks ?? [];
  setOptions($("kind"), kinds.map((kind) => [kind, kindText(kind)]), now.key ? `${now.kind}.${now.key}` : now.kind);
  $("kind").disabled = !kinds.length;
  $("rank-label").hidden = ranks.length < 2;
  setOptions($("rank"), [["", "whole"], ["all", "all"], ...ranks.map(String)], now.rank);
  if (document.activeElement !== $("search")) $("search").value = state.q;
  const parts = [run?.id, run?.names.length, kinds.length, now.kind, now.key, state.q, [...closedPaths]];
  const key = JSON.stringify(parts);
  if (key !== arranged) {
    arranged = key;
    rows = arrangeRows();
  }
  renderRows();
}

function arrangeRows() {
  const run = model.run;
  if (!run) return [];
  const search = get().q;
  let pattern = null, invalid = "";
  try {
    if (UNSUPPORTED.test(search)) invalid = "no lookaround, no backreferences";
    else pattern = search ? new RegExp(search, "i") : null;
  } catch {
    invalid = "not a regular expression yet";
  }
  $("search").setAttribute("aria-invalid", String(invalid !== ""));
  const all = run.names.filter(selection(get()).ofKind);
  const names = pattern ? all.filter((name) => pattern.test(name)) : all;
  const found = (pattern ? `${count(names.length)} of ` : "") + plural(all.length, "name");
  $("found").textContent = invalid || found;
  return pattern ? names.map((name) => leafRow(name, name, 0)) : flatten(buildTree(names), "", 0);
}

const leafRow = (name, label, depth) =>
  ({ label, path: name, depth, name, children: 0, open: false });

/** The branches of a name: modules, then the operation of a module, if it is one. */
function pathOf(name) {
  const operation = /^([^:]*):((?:(?:backward|recompute|optimizer):)?\d+:.*)$/s.exec(name);
  return operation ? [...operation[1].split("."), operation[2]] : name.split(".");
}

function buildTree(names) {
  const newBranch = () => ({ name: null, children: new Map(), size: 0 });
  const root = newBranch();
  for (const name of names) {
    let branch = root;
    for (const word of pathOf(name)) {
      branch.size++;
      if (!branch.children.has(word)) branch.children.set(word, newBranch());
      branch = branch.children.get(word);
    }
    branch.name = name;
    branch.size++;
  }
  return root;
}

function flatten(branch, path, depth) {
  return [...branch.children].flatMap(([label, child]) => {
    // a branch with a single child and no name of its own shares a row with it
    while (child.name === null && child.children.size === 1) {
      const [[word, only]] = child.children;
      label += `.${word}`;
      child = only;
    }
    if (!child.children.size) return [leafRow(child.name, label, depth)];
    const full = path ? `${path}.${label}` : label, open = !closedPaths.has(full);
    const children = child.size - (child.name === null ? 0 : 1);
    const row = { label, path: full, depth, name: child.name, children, open };
    return open ? [row, ...flatten(child, full, depth + 1)] : [row];
  });
}

/** Puts the visible rows into the page. */
function renderRows() {
  const tree = $("tree");
  $("rows").style.height = `${rows.length * ROW_HEIGHT}px`;
  const first = Math.max(0, Math.floor(tree.scrollTop / ROW_HEIGHT) - EXTRA_ROWS);
  const last = Math.ceil((tree.scrollTop + tree.clientHeight) / ROW_HEIGHT) + EXTRA_ROWS;
  const visible = rows.slice(first, last);
  const selected = new Set(selection(get()).names);
  focusedRow = Math.min(focusedRow, Math.max(0, rows.length - 1));
  fill($("rows"), visible.map((row, i) => rowElement(row, first + i, selected)));
  tree.setAttribute("aria-activedescendant", rows.length ? `row${focusedRow}` : "");
  visibleNames = visible.flatMap((row) => row.name ?? []);
  if (document.body.dataset.drawing !== "yes") void requestSparklines(visibleNames);
}

function rowElement(row, index, selected) {
  const isGroup = row.name === null, isSelected = !isGroup && selected.has(row.name);
  const isFocused = index === focusedRow && document.activeElement === $("tree");
  const sparkline = isGroup ? undefined : sparklines.get(row.name), bad = "contains NaN or Inf";
  const element = h("div", {
    id: `row${index}`, role: "treeitem", title: row.path, "aria-label": row.path,
    "aria-level": String(row.depth + 1), "aria-selected": String(isSelected),
    "aria-expanded": row.children ? String(row.open) : null,
    "aria-setsize": String(rows.length), "aria-posinset": String(index + 1),
    class: ["row", isGroup && "group", isSelected && "selected", isFocused && "focused"]
      .filter(Boolean).join(" "),
  },
    h("span", { class: "twisty" }, row.children ? "▶" : ""),
    h("span", { class: "label" }, row.label),
    isGroup && h("span", { class: "count" }, count(row.children)),
    sparkline?.bad && h("span", { class: "flag", title: bad, role: "img", "aria-label": bad }),
    !isGroup && rowExtras.map((extra) => extra(row.name)),
    !isGroup && svgLine(sparkline?.d ?? "", 37, 18));
  element.style.top = `${index * ROW_HEIGHT}px`;
  element.style.paddingLeft = `${2 + row.depth * INDENT}px`;
  return element;
}

// -- sparklines ----------------------------------------------------------------------------------

async function requestSparklines(names) {
  const run = model.run, { kind, metric, rank } = selection(get());
  if (!run) return;
  const key = `${run.id} ${kind} ${metric} ${rank}`;
  if (key !== sparklineKey) sparklines = new Map();
  sparklineKey = key;
  let room = MAX_QUERY;
  const fits = (name) => (room -= encodeURIComponent(name).length) > 0;
  const unknown = names.filter((name) => !sparklines.has(name));
  const missing = unknown.filter(fits).slice(0, MAX_SPARKLINES);
  if (!missing.length || requesting) return;
  requesting = true;
  // the tab reports what is wrong with a run
  const { lines } = await request("sparklines", { run: run.id, kind, metric, rank, name: missing })
    .catch(() => ({ lines: {} }));
  requesting = false;
  if (key === sparklineKey) for (const name of missing) sparklines.set(name, lines[name] ?? {});
  renderRows();
}

/** Requests sparklines that are missing: after the tab, which must not wait for them. */
export const addSparklines = () => void requestSparklines(visibleNames);

/** Requests the sparklines again, because records came; at most every two seconds. */
export function refreshSparklines() {
  if (performance.now() - refreshed < 2000 || requesting) return;
  refreshed = performance.now();
  sparklines = new Map();
  renderRows();
}

// -- mouse and keyboard --------------------------------------------------------------------------

function onMouseDown(event) {
  const box = $("rows").getBoundingClientRect();
  const index = Math.floor((event.clientY - box.top) / ROW_HEIGHT), row = rows[index];
  if (!row || event.button !== 0) return;
  focusedRow = index;
  const onTwisty = row.children && event.clientX - box.left < 24 + row.depth * INDENT;
  if (row.name === null || onTwisty) toggleRow(row);
  else selectName(row.name, event.ctrlKey || event.metaKey || event.shiftKey);
}

function selectName(name, add) {
  const names = add ? selection(get()).names : [];
  const next = names.includes(name) ? names.filter((each) => each !== name) : [...names, name];
  set({ name: next.length ? next : [name], ...WHOLE_TENSOR });
}

function toggleRow(row) {
  if (!closedPaths.delete(row.path)) closedPaths.add(row.path);
  drawNames();
}

function focusRow(index, add) {
  focusedRow = Math.max(0, Math.min(rows.length - 1, index));
  const tree = $("tree"), top = focusedRow * ROW_HEIGHT;
  tree.scrollTop = Math.min(top, Math.max(tree.scrollTop, top + ROW_HEIGHT - tree.clientHeight));
  const name = rows[focusedRow]?.name;
  if (name) selectName(name, add);
  renderRows();
}

function onKeyDown(event) {
  const row = rows[focusedRow], by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (by) focusRow(focusedRow + by, event.shiftKey);
  else if (event.key !== "Enter" || !row) return;
  else if (row.name === null) toggleRow(row);
  else selectName(row.name, event.ctrlKey || event.metaKey);
  event.preventDefault();
  event.stopPropagation();
}

export function startTree() {
  const tree = $("tree"), search = $("search");
  // on mousedown, because rows may be drawn anew before the button is released
  tree.addEventListener("mousedown", onMouseDown);
  tree.addEventListener("keydown", onKeyDown);
  tree.addEventListener("scroll", () => requestAnimationFrame(renderRows), { passive: true });
  new ResizeObserver(renderRows).observe(tree);
  for (const event of ["focus", "blur"]) tree.addEventListener(event, renderRows);
  search.addEventListener("input", () => set({ q: search.value }));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") search.blur();
    if (event.key === "Enter" && rows[0]?.name) selectName(rows[0].name, false);
  });
  const kind = $("kind");
  kind.addEventListener("change", () => set({ kind: kind.value, zoom: "", at: "", axes: "" }));
  $("rank").addEventListener("change", () => set({ rank: $("rank").value }));
  $("sort").addEventListener("change", () => set({ sort: $("sort").value }));
}
