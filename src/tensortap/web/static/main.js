// The page: what is chosen (state.js) of what there is (model.js), drawn by the parts below.
import { Failed, array, ask, knowing } from "./api.js";
import { $, empty, fill, h } from "./dom.js";
import { load, model } from "./model.js";
import { Push } from "./push.js";
import { get, listen, set } from "./state.js";
import { addTraining, clearTop, drawHere, drawStep, drawTraining, go, move, redoTraining, startTop, toggleFollow, togglePlay } from "./top.js";
import { drawNames, drawRuns, refreshSparks, startTree } from "./tree.js";
import { alerts } from "./tabs/alerts.js";
import { compare } from "./tabs/compare.js";
import { exponents } from "./tabs/exponents.js";
import { lines } from "./tabs/lines.js";
import { overview } from "./tabs/overview.js";
import { provenance } from "./tabs/provenance.js";
import { receipt } from "./tabs/receipt.js";
import { tensors } from "./tabs/tensors.js";

/**
 * A tab: what it is called, how it begins, and how it shows what is chosen. `news` is the server's.
 * @typedef {object} Tab
 * @property {string} id @property {string} title @property {(panel: HTMLElement) => void} mount
 * @property {(state: import("./state.js").State, changed: Set<string>) => void | Promise<void>} show
 * @property {(news: any) => void} [hear] @property {(state: any) => [string, any]} [question]
 */
/** @type {Tab[]} */
const TABS = [overview, lines, exponents, tensors, compare, alerts, provenance, receipt];
/** @type {Map<string, HTMLElement>} */
const panels = new Map();
/** @type {Push | null} */
let push = null;

const tabNow = () => TABS.find((tab) => tab.id === get().tab) ?? TABS[0];

// -- drawing -------------------------------------------------------------------------------------

/** Draws what has changed; one after the other, the last word wins. @param {Set<string>} changed */
async function show(changed) {
  applyTheme();
  if (changed.has("run") || changed.has("*run")) await openRun();
  drawRuns();
  drawHere();
  drawNames();
  drawStep();
  drawTabs();
  await drawTraining().catch(said);
  await showTab(changed);
  if (changed.has("run") || changed.has("*run")) setTimeout(prepare, 300);
}

/** What takes long the first time is asked for before somebody wants to see it, one after the other. */
async function prepare() {
  const run = model.run;
  /** @type {(() => [string, any])[]} */
  const questions = TABS.flatMap((tab) => (tab.question && tab !== tabNow() ? [() => /** @type {any} */ (tab.question)(get())] : []));
  for (const question of [...questions, () => ["held", { run: run?.id }]]) {
    if (!run || model.run?.id !== run.id) return;
    // what is wrong with it is said where it is shown
    await ask(...question()).catch(() => undefined);
  }
}

function drawTabs() {
  for (const tab of TABS) {
    const on = tab === tabNow();
    const button = $(`tab-${tab.id}`);
    button.setAttribute("aria-selected", String(on));
    button.tabIndex = on ? 0 : -1;
    /** @type {HTMLElement} */ (panels.get(tab.id)).hidden = !on;
  }
}

/** @param {Set<string>} changed */
async function showTab(changed) {
  const tab = tabNow(), panel = /** @type {HTMLElement} */ (panels.get(tab.id));
  panel.dataset.ready = "no";
  try {
    if (!model.run && tab.id !== "compare") return nothing();
    $("nothing").hidden = true;
    await tab.show(get(), changed);
    notice(standing());
  } catch (error) {
    said(error);
  } finally {
    panel.dataset.ready = "yes";
  }
}

function nothing() {
  const why = model.error || (model.shown.length ? "Choose a run on the left." : "Runs appear here as soon as they are written.");
  fill($("nothing"), empty(model.shown.length ? "Nothing to see yet" : "No runs yet", why, model.shown.length ? "" : 'tap.init("runs")'));
  $("nothing").hidden = false;
  for (const panel of panels.values()) panel.hidden = true;
}

/** @param {any} error */
function said(error) {
  if (error?.name === "AbortError") return;
  if (!(error instanceof Failed)) console.error(error);
  notice(error instanceof Failed ? error.message : `Something went wrong in the page: ${error?.message ?? error}`);
}

/** What stays true, whatever is drawn. */
function standing() {
  if (document.body.dataset.push === "closed") return "The server does not answer: it was ended, or is busy. This page tries again by itself.";
  if (model.run?.state !== "gone") return "";
  return model.run.what === "run" ? "The run was deleted while it was shown; what you see is what was read of it." : "The live session has gone; what you see is what it had sent.";
}

/** @param {string} words */
function notice(words) {
  $("notice").hidden = !words;
  fill($("notice"), h("span", {}, words));
}

async function openRun() {
  const id = get().run;
  model.error = "";
  if (model.run?.id !== id) model.run = null;
  redoTraining();
  if (!id) return clearTop();
  try {
    model.run = await load(id);
  } catch (error) {
    model.run = null;
    model.error = error instanceof Failed ? error.message : String(error);
    clearTop();
  }
  for (const tab of TABS) tab.hear?.({});
  tellPush();
}

function tellPush() {
  const run = model.run;
  if (run) push?.say({ show: run.id, version: run.version, step: run.steps[run.steps.length - 1] ?? -1 });
}

// -- choosing ------------------------------------------------------------------------------------

/** @type {Set<string>} */
let pending = new Set();
let busy = false;
/** @param {Iterable<string>} changed */
async function update(changed) {
  for (const each of changed) pending.add(each);
  if (busy) return;
  busy = true;
  try {
    while (pending.size) {
      const now = pending;
      pending = new Set();
      await show(now);
    }
  } catch (error) {
    said(error);
  } finally {
    busy = false;
  }
}
listen((_, changed) => {
  // what needs no answer of the server follows at once, however long a figure takes
  if (!changed.has("run")) {
    applyTheme();
    drawStep();
    drawTabs();
    drawNames();
  }
  void update(changed);
});

// -- news ----------------------------------------------------------------------------------------

/** @param {any} news */
async function hear(news) {
  for (const tab of TABS) tab.hear?.(news);
  if (news.library) await loadLibrary();
  for (const other of news.others ?? []) {
    const known = model.shown.find((s) => s.id === other.id);
    if (known) Object.assign(known, other);
  }
  if (news.others) drawRuns();
  const said = news.run;
  if (!said || said.id !== model.run?.id) return;
  const run = model.run;
  const known = model.shown.find((s) => s.id === said.id);
  if (known && said.state) Object.assign(known, { state: said.state, version: said.version });
  if (said.error) {
    run.state = said.state ?? run.state;
    drawHere();
    return notice(standing() || said.error);
  }
  if (said.reset || said.version < run.version) return update(["*run"]);
  const grown = said.names !== run.total;
  run.steps.push(.../** @type {number[]} */ array(said.steps));
  Object.assign(run, { version: said.version, state: said.state, records: said.records, total: said.names });
  if (grown) {
    const fresh = await load(run.id);
    model.run = { ...fresh, total: said.names };
  }
  await addTraining(said.training);
  refreshSparks();
  // not waited for: a tab that takes long must not hold up the next news
  void update(["*data"]);
}

async function loadLibrary() {
  model.shown = (await ask("library")).shown;
  const known = model.shown.some((shown) => shown.id === get().run);
  if (!known && model.shown.length) set({ run: model.shown[0].id });
  drawRuns();
}

// -- the look ------------------------------------------------------------------------------------

const system = matchMedia("(prefers-color-scheme: dark)");
function applyTheme() {
  const theme = get().theme || (system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
}
system.addEventListener("change", () => void update(["theme"]));

// -- the keyboard --------------------------------------------------------------------------------

/** @param {KeyboardEvent} e */
function key(e) {
  const inside = /** @type {HTMLElement} */ (e.target);
  const typing = inside.closest("input:not([type=range]):not([type=checkbox]), select, textarea, dialog[open]");
  if (typing || e.ctrlKey || e.metaKey || e.altKey) return;
  const many = e.shiftKey ? 10 : 1;
  const scrubbing = inside.id === "scrubber";
  if (e.key === "ArrowRight" || e.key === "ArrowLeft") {
    if (inside.matches("input[type=range]") && !scrubbing) return; // a slider of its own
    if (inside.closest("[role=tablist]")) return turn(e);
    move(e.key === "ArrowRight" ? many : -many);
  } else if (e.key === "Home") go(model.run?.steps[0] ?? null);
  else if (e.key === "End") go(null);
  else if (e.key === " " && !inside.closest("button, summary, [role=option], input")) togglePlay();
  else if (e.key === "f") toggleFollow();
  else if (e.key === "/") $("search").focus();
  else if (e.key === "?") $("helping").showModal();
  else if (/^[1-8]$/.test(e.key)) set({ tab: TABS[Number(e.key) - 1].id }, true);
  else return;
  e.preventDefault();
}

/** @param {KeyboardEvent} e */
function turn(e) {
  const by = e.key === "ArrowRight" ? 1 : -1;
  const next = TABS[(TABS.indexOf(tabNow()) + by + TABS.length) % TABS.length];
  set({ tab: next.id }, true);
  $(`tab-${next.id}`).focus();
  e.preventDefault();
}

// -- the start -----------------------------------------------------------------------------------

async function start() {
  applyTheme();
  knowing((id) => (model.run?.id === id && document.body.dataset.push === "open" ? model.run.version : null));
  for (const tab of TABS) {
    const panel = h("section", { class: "panel", id: `panel-${tab.id}`, role: "tabpanel", "aria-labelledby": `tab-${tab.id}`, hidden: true });
    panels.set(tab.id, panel);
    $("panels").append(panel);
    $("tabs").append(h("button", {
      id: `tab-${tab.id}`, role: "tab", type: "button", "aria-controls": `panel-${tab.id}`,
      onclick: () => set({ tab: tab.id }, true),
    }, tab.title));
    tab.mount(panel);
  }
  $("panels").append(h("div", { id: "nothing", class: "panel", hidden: true }));
  startTree();
  startTop();
  addEventListener("keydown", key);
  $("theme").addEventListener("click", () => set({ theme: document.documentElement.dataset.theme === "dark" ? "light" : "dark" }));
  $("help").addEventListener("click", () => $("helping").showModal());
  document.querySelector(".brand")?.addEventListener("click", (e) => { e.preventDefault(); set({ tab: "overview" }, true); });
  try {
    await loadLibrary();
  } catch (error) {
    model.error = error instanceof Failed ? error.message : String(error);
  }
  await update(["*run"]);
  push = new Push((news) => hear(news).catch(said), (open) => {
    document.body.dataset.push = open ? "open" : "closed";
    if (open && push?.lost) void loadLibrary().then(() => update(["*run"])).catch(said);
    if (push) push.lost = !open;
    notice(standing());
  });
  tellPush();
  document.body.dataset.ready = "yes";
}
void start();
