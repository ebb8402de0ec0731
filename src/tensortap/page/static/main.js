// The page: draws what is selected (state.js) of what is known (model.js), and follows the server.
import { RequestError, decodeArray, request, setVersionSource } from "./api.js";
import { $, button, empty, fill, h } from "./dom.js";
import { loadRun, model } from "./model.js";
import { Push } from "./push.js";
import { get, onChange, set } from "./state.js";
import {
  addTraining, clearTraining, drawStep, drawTitle, drawTraining, goToStep, invalidateTraining,
  moveSteps, startTop, toggleFollow, togglePlay,
} from "./top.js";
import { addSparklines, drawNames, drawRuns, refreshSparklines, startTree } from "./tree.js";

// A tab is what a module exports as `tab`: an id, a title, and `mount(panel)`. `show(state)` draws.
// `prepare(state)` requests what takes long the first time, `first` lets it do so before others.
// `receive(news)` gets the server's news. `alone` says that it has something to show without a run.
let TABS = [];
const LARGE = 1_000_000; // records: figures that nobody asked for would delay the next one
let push = null;
const connection = () => document.body.dataset.push; // "open" or "closed"; undefined at the start

const currentTab = () => TABS.find((tab) => tab.id === get().tab) ?? TABS[0];
const panelOf = (tab) => $(`panel-${tab.id}`);

// -- drawing -------------------------------------------------------------------------------------

/** `changed` are keys of the state; "*run" is another run, "*data" new records. */
async function draw(changed) {
  applyTheme();
  const isOtherRun = changed.has("run") || changed.has("*run");
  if (isOtherRun) await openRun();
  drawRuns();
  drawTitle();
  drawControls();
  await drawTraining().catch(showError);
  await drawTab();
  if (isOtherRun) setTimeout(prepareTabs, 300);
}

/** Draws what needs no response of the server. */
function drawControls() {
  drawNames();
  drawStep();
  for (const tab of TABS) {
    const isCurrent = tab === currentTab();
    $(`tab-${tab.id}`).setAttribute("aria-selected", String(isCurrent));
    $(`tab-${tab.id}`).tabIndex = isCurrent ? 0 : -1;
    panelOf(tab).hidden = !isCurrent;
  }
}

async function drawTab() {
  const tab = currentTab();
  if (!model.run && !tab.alone) return drawNothing();
  $("nothing").hidden = true;
  try {
    await tab.show(get());
    showNotice(lastingNotice());
  } catch (error) {
    showError(error);
  }
}

function drawNothing() {
  drawMessage(model.entries.length
    ? empty("Nothing to see yet", model.error || "Choose a run on the left.")
    : empty("No runs yet", model.error || "Runs appear as they are written.", 'tap.init("runs")'));
}

/** Shows a message instead of the tab. */
function drawMessage(message) {
  fill($("nothing"), message);
  $("nothing").hidden = false;
  for (const tab of TABS) panelOf(tab).hidden = true;
}

/** Requests what the other tabs will need, one after the other; of a large run only the first. */
async function prepareTabs() {
  const run = model.run;
  const [first, others] = [TABS.filter((tab) => tab.first), TABS.filter((tab) => !tab.first)];
  for (const tab of [...first, ...(run?.records > LARGE ? [] : others)]) {
    if (!run || model.run?.id !== run.id) return;
    // a tab reports its errors when it is shown
    if (tab !== currentTab()) await tab.prepare?.(get()).catch(() => undefined);
  }
}

async function openRun() {
  const id = get().run;
  model.error = "";
  if (model.run?.id !== id) model.run = null;
  invalidateTraining();
  if (!id) return clearTraining();
  const reading = empty("Reading the run …", "The first time, this takes longer.");
  const waiting = setTimeout(() => model.run || drawMessage(reading), 300);
  try {
    model.run = await loadRun(id);
  } catch (error) {
    model.run = null;
    model.error = error.message;
    clearTraining();
  } finally {
    clearTimeout(waiting);
  }
  for (const tab of TABS) tab.receive?.({});
  subscribe();
}

function subscribe() {
  const run = model.run;
  if (run) push?.show({ show: run.id, version: run.version, step: run.steps.at(-1) ?? -1 });
}

// -- one drawing at a time; changes in the meantime are drawn together after it ------------------

let pending = new Set();
const isDrawing = () => document.body.dataset.drawing === "yes";
async function update(changed) {
  for (const key of changed) pending.add(key);
  if (isDrawing()) return;
  document.body.dataset.drawing = "yes";
  try {
    while (pending.size) {
      const now = pending;
      pending = new Set();
      await draw(now);
    }
  } catch (error) {
    showError(error);
  } finally {
    document.body.dataset.drawing = "no";
  }
  addSparklines();
}

onChange((changed) => {
  if (!changed.has("run")) {
    applyTheme();
    drawControls(); // at once, however long a figure takes
  }
  void update(changed);
});

// -- errors --------------------------------------------------------------------------------------

function showError(error) {
  if (error instanceof RequestError) return showNotice(error.message);
  console.error(error);
  showNotice(`Error in the page: ${error?.message ?? error}`);
}

/** What stays true, whatever is drawn. */
function lastingNotice() {
  if (connection() === "closed") return "The server does not respond. The page keeps trying.";
  return {
    deleted: "The run was deleted while it was shown. You see what had been read of it.",
    closed: "The live session has closed. You see what it had sent.",
  }[model.run?.state] ?? "";
}

function showNotice(text) {
  $("notice").hidden = !text;
  fill($("notice"), h("span", {}, text));
}

// -- news of the server --------------------------------------------------------------------------

async function receive(news) {
  for (const tab of TABS) tab.receive?.(news);
  if (news.catalog) await loadCatalog();
  const changed = [...(news.others ?? []), ...(news.run ? [news.run] : [])];
  for (const { id, state, version } of changed) {
    const entry = model.entries.find((each) => each.id === id);
    if (entry && state) Object.assign(entry, { state, version });
  }
  if (news.others) drawRuns();
  if (news.run && news.run.id === model.run?.id) await receiveRun(news.run, model.run);
}

async function receiveRun(news, run) {
  if (news.error) {
    run.state = news.state ?? run.state;
    drawTitle();
    return showNotice(lastingNotice() || news.error);
  }
  if (news.reset || news.version < run.version) return update(["*run"]);
  const hasNewNames = news.names !== run.total;
  run.steps.push(...decodeArray(news.steps));
  const { version, state, records, names: total } = news;
  Object.assign(run, { version, state, records, total });
  if (hasNewNames) model.run = { ...(await loadRun(run.id)), total: news.names };
  await addTraining(news.training);
  refreshSparklines();
  void update(["*data"]); // not awaited: a slow tab must not delay the next news
}

async function loadCatalog() {
  model.entries = (await request("catalog")).entries;
  const isKnown = model.entries.some((entry) => entry.id === get().run);
  if (!isKnown && model.entries.length) set({ run: model.entries[0].id });
  drawRuns();
}

// -- theme and keyboard --------------------------------------------------------------------------

const systemTheme = matchMedia("(prefers-color-scheme: dark)");
function applyTheme() {
  document.documentElement.dataset.theme = get().theme || (systemTheme.matches ? "dark" : "light");
}
systemTheme.addEventListener("change", () => void update(["theme"]));

function onKeyDown(event) {
  const { key, target } = event;
  const typing = "input:not([type=range]):not([type=checkbox]), select, textarea, dialog[open]";
  if (target.closest(typing) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (key === "ArrowRight" || key === "ArrowLeft") {
    if (target.matches("input[type=range]:not(#scrubber)")) return; // moves that slider
    const by = key === "ArrowRight" ? 1 : -1;
    if (target.closest("[role=tablist]")) moveTab(by);
    else moveSteps(event.shiftKey ? 10 * by : by);
  } else if (key === "Home") goToStep(model.run?.steps[0] ?? null);
  else if (key === "End") goToStep(null);
  else if (key === " " && !target.closest("button, summary, [role=option], input")) togglePlay();
  else if (key === "f") toggleFollow();
  else if (key === "/") $("search").focus();
  else if (key === "?") $("keyboard").showModal();
  else if (/^[0-9]$/.test(key)) set({ tab: TABS[(Number(key) + 9) % 10].id }, true);
  else return;
  event.preventDefault();
}

function moveTab(by) {
  const next = TABS[(TABS.indexOf(currentTab()) + by + TABS.length) % TABS.length];
  set({ tab: next.id }, true);
  $(`tab-${next.id}`).focus();
}

// -- start ---------------------------------------------------------------------------------------

async function start() {
  applyTheme();
  const isCurrent = (id) => model.run?.id === id && connection() === "open";
  setVersionSource((id) => (isCurrent(id) ? model.run.version : null));
  const modules = await request("tabs");
  TABS = (await Promise.all(modules.map((address) => import(address)))).map(({ tab }) => tab);
  for (const tab of TABS) {
    const [id, panelId] = [`tab-${tab.id}`, `panel-${tab.id}`];
    const open = () => set({ tab: tab.id }, true);
    $("tabs").append(button(tab.title, open, { id, role: "tab", "aria-controls": panelId }));
    $("panels").append(h("section", {
      class: "panel", id: panelId, role: "tabpanel", "aria-labelledby": id, hidden: true,
    }));
    tab.mount($(panelId));
  }
  $("panels").append(h("div", { id: "nothing", class: "panel", hidden: true }));
  startTree();
  startTop();
  addEventListener("keydown", onKeyDown);
  const isDark = () => document.documentElement.dataset.theme === "dark";
  $("theme").addEventListener("click", () => set({ theme: isDark() ? "light" : "dark" }));
  $("help").addEventListener("click", () => $("keyboard").showModal());
  $("home").addEventListener("click", (event) => {
    event.preventDefault();
    set({ tab: TABS[0].id }, true);
  });
  await loadCatalog().catch((error) => (model.error = error.message));
  await update(["*run"]);
  push = new Push((news) => receive(news).catch(showError), onConnection);
  subscribe();
  document.body.dataset.ready = "yes";
}

function onConnection(open) {
  const isReconnected = open && connection() === "closed";
  document.body.dataset.push = open ? "open" : "closed";
  if (isReconnected) void loadCatalog().then(() => update(["*run"])).catch(showError);
  showNotice(lastingNotice());
}
void start();
