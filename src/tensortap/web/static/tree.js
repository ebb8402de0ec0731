// The left: runs, and the tree of names; only the rows that are in sight are in the page.
import { ask } from "./api.js";
import { $, choose, count, fill, h } from "./dom.js";
import { chosen, model } from "./model.js";
import { get, set } from "./state.js";

const HEIGHT = 26, AROUND = 12;

/** @typedef {{label: string, path: string, depth: number, name: string | null, children: number, open: boolean}} Row */

/** @type {Row[]} */
let rows = [];
/** @type {Set<string>} */
const closed = new Set();
let at = 0; // the row that the keyboard is on
let drawn = ""; // what the rows were made of
/** @type {Map<string, {d: string, bad: boolean}>} */
let sparks = new Map();
let sparkKey = "";
let asking = false;

/** The list of runs. */
export function drawRuns() {
  const state = get();
  fill($("runs"), ...model.shown.map((shown) =>
    h("li", {
      role: "option", tabindex: "0", "aria-selected": String(shown.id === state.run), title: shown.where,
      onclick: () => pick(shown.id),
      onkeydown: (/** @type {KeyboardEvent} */ e) => (e.key === "Enter" || e.key === " ") && (e.preventDefault(), e.stopPropagation(), pick(shown.id)),
    }, h("span", {}, shown.title), pill(shown.state))));
  if (!model.shown.length) fill($("runs"), h("li", {}, h("span", { class: "dim" }, "No run here yet")));
}

/** @param {string} id */
function pick(id) {
  if (id !== get().run) set({ run: id, step: null, span: "", name: [], leaf: "", at: "", axes: "", zoom: "" }, true);
}

/** @param {string} state */
export const pill = (state) => h("span", { class: `pill ${state.split(" ")[0]}` }, state);

/** Kinds, ranks and the tree. */
export function drawNames() {
  const run = model.run, state = get(), now = chosen(state);
  const kinds = run?.kinds ?? [];
  choose($("kind"), kinds.map((k) => [k, k.replaceAll("_", " ")]), now.kind);
  $("kind").disabled = !kinds.length;
  const ranks = run?.ranks ?? [];
  $("rank-label").hidden = ranks.length < 2;
  choose($("rank"), [["", "all"], ...ranks.map((r) => /** @type {[string, string]} */ ([String(r), String(r)]))], now.rank);
  if (document.activeElement !== $("search")) $("search").value = state.q;
  const key = JSON.stringify([run?.id, run?.names.length, run?.kinds.length, now.kind, state.q, [...closed]]);
  if (key !== drawn) {
    drawn = key;
    rows = arrange();
  }
  renderRows();
}

function arrange() {
  const run = model.run;
  if (!run) return [];
  const state = get(), kind = run.kinds.indexOf(chosen(state).kind);
  let wanted = null;
  $("search").removeAttribute("aria-invalid");
  if (state.q) {
    try {
      wanted = new RegExp(state.q, "i");
    } catch {
      $("search").setAttribute("aria-invalid", "true");
    }
  }
  const names = run.names.filter((name, i) => run.name_kinds[i].includes(kind) && (!wanted || wanted.test(name)));
  const all = run.name_kinds.filter((k) => k.includes(kind)).length;
  const invalid = $("search").getAttribute("aria-invalid") === "true";
  $("found").textContent = invalid ? "not a regular expression yet"
    : wanted ? `${count(names.length)} of ${count(all)} names` : `${count(all)} ${all === 1 ? "name" : "names"}`;
  return wanted ? names.map((name) => leaf(name, name, 0)) : flatten(grow(names), "", 0);
}

/** @param {string} name @param {string} label @param {number} depth @returns {Row} */
const leaf = (name, label, depth) => ({ label, path: name, depth, name, children: 0, open: false });

/** @typedef {{name: string | null, below: Map<string, Branch>, size: number}} Branch */
/** @param {string[]} names */
function grow(names) {
  /** @type {Branch} */
  const root = { name: null, below: new Map(), size: 0 };
  for (const name of names) {
    let branch = root;
    for (const word of name.split(".")) {
      let next = branch.below.get(word);
      if (!next) branch.below.set(word, (next = { name: null, below: new Map(), size: 0 }));
      branch.size++;
      branch = next;
    }
    branch.name = name;
    branch.size++;
  }
  return root;
}

/** @param {Branch} branch @param {string} path @param {number} depth @returns {Row[]} */
function flatten(branch, path, depth) {
  /** @type {Row[]} */
  const found = [];
  for (let [word, next] of branch.below) {
    let label = word, full = path ? `${path}.${word}` : word;
    // a branch with one child and nothing of its own is one row with it
    while (next.name === null && next.below.size === 1) {
      const [[more, only]] = next.below;
      label += `.${more}`;
      full += `.${more}`;
      next = only;
    }
    if (!next.below.size) {
      found.push(leaf(/** @type {string} */ (next.name), label, depth));
      continue;
    }
    const open = !closed.has(full);
    const inside = next.size - (next.name === null ? 0 : 1);
    found.push({ label, path: full, depth, name: next.name, children: inside, open });
    if (open) found.push(...flatten(next, full, depth + 1));
  }
  return found;
}

/** Puts the rows that are in sight into the page. */
export function renderRows() {
  const tree = $("tree"), room = $("room");
  room.style.height = `${rows.length * HEIGHT}px`;
  const first = Math.max(0, Math.floor(tree.scrollTop / HEIGHT) - AROUND);
  const last = Math.min(rows.length, Math.ceil((tree.scrollTop + tree.clientHeight) / HEIGHT) + AROUND);
  const names = new Set(chosen(get()).names);
  at = Math.min(at, Math.max(0, rows.length - 1));
  const focused = document.activeElement === tree;
  fill(room, ...rows.slice(first, last).map((row, i) => rowOf(row, first + i, names, focused)));
  tree.setAttribute("aria-activedescendant", rows.length ? `row${at}` : "");
  askSparks(rows.slice(first, last).flatMap((row) => (row.name === null ? [] : [row.name])));
}

/** @param {Row} row @param {number} number @param {Set<string>} names @param {boolean} focused */
function rowOf(row, number, names, focused) {
  const is = row.name !== null && names.has(row.name);
  const made = h("div", {
    id: `row${number}`, role: "treeitem", "aria-level": String(row.depth + 1), "aria-selected": String(is),
    "aria-expanded": row.children ? String(row.open) : null, "aria-label": row.path, title: row.path,
    "aria-setsize": String(rows.length), "aria-posinset": String(number + 1),
    class: `row${row.name === null ? " group" : ""}${is ? " chosen" : ""}${focused && number === at ? " at" : ""}`,
  },
    h("span", { class: "turn" }, row.children ? "▶" : ""), h("span", { class: "label" }, row.label),
    row.name === null && h("span", { class: "count" }, count(row.children)));
  made.style.top = `${number * HEIGHT}px`;
  made.style.paddingLeft = `${2 + row.depth * 13}px`;
  const spark = row.name === null ? undefined : sparks.get(row.name);
  if (spark?.bad) made.append(h("span", { class: "flag", title: "holds NaN or Inf", role: "img", "aria-label": "holds NaN or Inf" }));
  if (row.name !== null) made.append(line(spark?.d ?? ""));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";
/** @param {string} d */
function line(d) {
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 37 18");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", d);
  svg.append(path);
  return svg;
}

/** @param {MouseEvent} event */
function click(event) {
  const room = $("room").getBoundingClientRect();
  const number = Math.floor((event.clientY - room.top) / HEIGHT), row = rows[number];
  if (!row) return;
  at = number;
  const turned = event.clientX - room.left < 24 + row.depth * 13;
  if (row.name === null || (row.children && turned)) return toggle(row);
  choosing(row.name, event.ctrlKey || event.metaKey || event.shiftKey);
}

/** @param {string} name @param {boolean} more */
function choosing(name, more) {
  const names = more ? chosen(get()).names : [];
  const next = names.includes(name) ? names.filter((n) => n !== name) : [...names, name];
  set({ name: next.length ? next : [name], leaf: "", at: "", axes: "", zoom: "" });
}

/** @param {Row} row */
function toggle(row) {
  if (!closed.delete(row.path)) closed.add(row.path);
  drawNames();
}

/** @param {string[]} names */
async function askSparks(names) {
  const run = model.run, now = chosen(get());
  if (!run) return;
  const key = `${run.id} ${now.kind} ${now.metric} ${now.rank}`;
  if (key !== sparkKey) sparks = new Map();
  sparkKey = key;
  // an address may have 64 KiB
  let room = 16_000;
  const lacking = names.filter((name) => !sparks.has(name) && (room -= encodeURIComponent(name).length) > 0).slice(0, 100);
  if (!lacking.length || asking) return;
  asking = true;
  try {
    const { lines } = await ask("sparklines", { run: run.id, kind: now.kind, metric: now.metric, rank: now.rank, name: lacking });
    if (key === sparkKey) for (const name of lacking) sparks.set(name, lines[name] ?? { d: "", bad: false });
  } catch {
    for (const name of lacking) sparks.set(name, { d: "", bad: false }); // the tab says what is wrong
  } finally {
    asking = false;
  }
  renderRows();
}

let refreshed = 0;
/** New records came: the lines in sight are asked for again, not too often. */
export function refreshSparks() {
  if (performance.now() - refreshed < 2000 || asking) return;
  refreshed = performance.now();
  sparks = new Map();
  renderRows();
}

/** Listens to the user. */
export function startTree() {
  const tree = $("tree");
  // when pressed, not when released: rows may be drawn anew between the two
  tree.addEventListener("mousedown", (/** @type {MouseEvent} */ e) => e.button === 0 && click(e));
  tree.addEventListener("scroll", () => requestAnimationFrame(renderRows), { passive: true });
  new ResizeObserver(renderRows).observe(tree);
  tree.addEventListener("focus", renderRows);
  tree.addEventListener("blur", renderRows);
  tree.addEventListener("keydown", (/** @type {KeyboardEvent} */ e) => {
    const row = rows[at];
    if (e.key === "ArrowDown" || e.key === "ArrowUp") move(at + (e.key === "ArrowDown" ? 1 : -1), e.shiftKey);
    else if (e.key === "Enter" && row) row.name === null ? toggle(row) : choosing(row.name, e.ctrlKey || e.metaKey);
    else return;
    e.preventDefault();
    e.stopPropagation();
  });
  $("search").addEventListener("input", () => set({ q: $("search").value }));
  $("search").addEventListener("keydown", (/** @type {KeyboardEvent} */ e) => {
    if (e.key === "Escape") $("search").blur();
    if (e.key === "Enter" && rows[0]?.name) choosing(rows[0].name, false);
  });
  $("kind").addEventListener("change", () => set({ kind: $("kind").value, zoom: "", at: "", axes: "" }));
  $("rank").addEventListener("change", () => set({ rank: $("rank").value }));
}

/** @param {number} to @param {boolean} more */
function move(to, more) {
  at = Math.max(0, Math.min(rows.length - 1, to));
  const tree = $("tree"), top = at * HEIGHT;
  if (top < tree.scrollTop) tree.scrollTop = top;
  if (top + HEIGHT > tree.scrollTop + tree.clientHeight) tree.scrollTop = top + HEIGHT - tree.clientHeight;
  const name = rows[at]?.name;
  if (name !== null && name !== undefined) choosing(name, more);
  renderRows();
}
