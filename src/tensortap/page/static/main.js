// The page: draws what is selected (state.js) of what is known (model.js), and follows the server.
import { RequestError, decodeArray, request, setVersionSource } from "./api.js";
import { $, button, empty, fill, h, segments, tools } from "./dom.js";
import { loadPlotly } from "./figure.js";
import { loadRun, model } from "./model.js";
import { Push } from "./push.js";
import { get, onChange, set } from "./state.js";
import {
  addTraining, clearTraining, drawStep, drawTitle, drawTraining, goToStep, invalidateTraining,
  moveSteps, startTop, toggleFollow, togglePlay,
} from "./top.js";
import { addBriefs, addSparklines, drawNames, drawRuns, refreshSparklines, startTree } from "./tree.js";

// A view is what a module exports as `tab`: an id, a title, and `mount(panel)`. `show(state)` draws.
// Views that name the same tab in `within` share it: one at a time, or below each other if they are
// `stacked`. `isUsed(run)` says whether a run has anything for it. `about` is the tooltip.
// `prepare(state)` requests what takes long the first time, `first` lets it do so before others.
// `light` says that it draws something before plotly is there. `receive(news)` gets the server's news. `alone` says that it
// has something to show without a run.
let VIEWS = [], TABS = [];
let later = []; // modules of views that are loaded after the summary is drawn
const LARGE = 1_000_000; // records: figures that nobody asked for would delay the next one
let push = null;
const connection = () => document.body.dataset.push; // "open" or "closed"; undefined at the start

const isUsed = (view) => !model.run || !view.isUsed || view.isUsed(model.run);
const usedViews = (tab) => tab.views.filter(isUsed);
const usedTabs = () => TABS.filter((tab) => usedViews(tab).length);
const currentView = () =>
  VIEWS.find((view) => view.id === get().tab && isUsed(view)) ?? VIEWS[0];
const currentTab = () => TABS.find((tab) => tab.views.includes(currentView()));
/** The views that are shown at once. */
const shownViews = () => (currentView().stacked ? usedViews(currentTab()) : [currentView()]);
const panelOf = (view) => $(`panel-${view.id}`);

/** Opens a tab at the view that was shown last. */
function openTab(tab) {
  const view = usedViews(tab).find((each) => each.id === tab.last) ?? usedViews(tab)[0];
  set({ tab: view.id }, true);
}

// -- drawing -------------------------------------------------------------------------------------

/** `changed` are keys of the state; "*run" is another run, "*data" new records. */
async function draw(changed) {
  applyTheme();
  const isOtherRun = changed.has("run") || changed.has("*run");
  if (isOtherRun) await openRun();
  drawRuns();
  drawTitle();
  drawControls();
  const tab = drawTab(), light = shownViews().every((view) => view.light);
  const training = drawTraining(light && tab).catch(showError); // both send their requests now
  if (light) await tab; // first: the browser does nothing else while plotly starts
  await addViews(later.splice(0));
  void loadPlotly();
  await Promise.all([tab, training]);
  if (isOtherRun) setTimeout(prepareTabs, 300);
}

/** Draws what needs no response of the server. */
function drawControls() {
  drawNames();
  drawStep();
  const current = currentTab(), shown = shownViews();
  current.last = currentView().id;
  for (const tab of TABS) {
    const isCurrent = tab === current, views = usedViews(tab);
    const strip = $(`tab-${tab.id}`);
    strip.hidden = !views.length;
    strip.setAttribute("aria-selected", String(isCurrent));
    strip.tabIndex = isCurrent ? 0 : -1;
    if (isCurrent) strip.scrollIntoView({ block: "nearest", inline: "nearest" });
    $(`tabpanel-${tab.id}`).hidden = !isCurrent;
    tab.choice?.choose(currentView().id);
    if (tab.choice) tab.choice.parentElement.hidden = views.length < 2;
    for (const view of tab.views) {
      panelOf(view).hidden = !shown.includes(view);
      tab.choice?.show(view.id, views.includes(view));
    }
  }
}

async function drawTab() {
  if (!model.run && !currentView().alone) return drawNothing();
  $("nothing").hidden = true;
  try {
    for (const view of shownViews()) await view.show(get());
    showNotice(lastingNotice());
  } catch (error) {
    showError(error);
  }
}

function drawNothing() {
  drawMessage(model.entries.length
    ? empty(model.error ? "This run cannot be shown" : "Nothing to see yet",
      `${model.error ? `${model.error}. ` : ""}Choose a run on the left.`)
    : empty("No runs yet", model.error || "Runs appear as they are written.", 'tap.init("runs")'));
}

/** Shows a message instead of the tab. */
function drawMessage(message) {
  fill($("nothing"), message);
  $("nothing").hidden = false;
  for (const tab of TABS) $(`tabpanel-${tab.id}`).hidden = true;
}

/** Requests what the other tabs will need, one after the other; of a large run only the first. */
async function prepareTabs() {
  const run = model.run;
  const used = VIEWS.filter(isUsed);
  const [first, others] = [used.filter((view) => view.first), used.filter((view) => !view.first)];
  for (const view of [...first, ...(run?.records > LARGE ? [] : others)]) {
    if (!run || model.run?.id !== run.id) return;
    // a view reports its errors when it is shown
    if (!shownViews().includes(view)) await view.prepare?.(get()).catch(() => undefined);
  }
}

let early = {}; // the run that was requested before anything else
async function openRun() {
  const id = get().run;
  model.error = "";
  if (model.run?.id !== id) model.run = null;
  invalidateTraining();
  if (!id) return clearTraining();
  const reading = empty("Reading the run …", "The first time, this takes longer.");
  const waiting = setTimeout(() => model.run || drawMessage(reading), 300);
  try {
    model.run = await (early.id === id ? early.run : loadRun(id));
  } catch (error) {
    model.run = null;
    model.error = error.message;
    clearTraining();
  } finally {
    clearTimeout(waiting);
    early = {};
  }
  for (const view of VIEWS) view.receive?.({});
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
  setTimeout(addBriefs, 1000); // after what the tab needs
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
  for (const view of VIEWS) view.receive?.(news);
  if (news.catalog) await loadCatalog();
  const changed = [...(news.others ?? []), ...(news.run ? [news.run] : [])];
  for (const { id, state, version, seconds } of changed) {
    const entry = model.entries.find((each) => each.id === id);
    if (entry && state) Object.assign(entry, { state, version, seconds });
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

const loadEntries = async () => (await request("catalog")).entries;
const loadCatalog = async () => showCatalog(await loadEntries());

function showCatalog(entries) {
  const briefs = new Map(model.entries.map(({ id, brief }) => [id, brief]));
  model.entries = entries.map((entry) => ({ ...entry, brief: briefs.get(entry.id) }));
  if (!get().run && model.entries.length) set({ run: model.entries[0].id });
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
  // Enter ends typing, so that the next key is a shortcut again
  if (key === "Enter" && target.matches(".side input, .scrub input")) return target.blur();
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
  else if (usedTabs()[Number(key) - 1]) openTab(usedTabs()[Number(key) - 1]);
  else return;
  event.preventDefault();
}

function moveTab(by) {
  const tabs = usedTabs(), next = tabs.at((tabs.indexOf(currentTab()) + by) % tabs.length);
  openTab(next);
  $(`tab-${next.id}`).focus();
}

// -- start ---------------------------------------------------------------------------------------

async function start() {
  applyTheme();
  const isCurrent = (id) => model.run?.id === id && connection() === "open";
  setVersionSource((id) => (isCurrent(id) ? model.run.version : null));
  if (get().run) early = { id: get().run, run: loadRun(get().run) };
  early.run?.catch(() => undefined); // reported where it is awaited
  const catalog = loadEntries();
  const modules = [...document.querySelectorAll("link.tab")].map(({ href }) => href);
  if (get().tab === "summary") later = modules.splice(1);
  await addViews(modules);
  $("panels").append(h("div", { id: "nothing", class: "panel", hidden: true }));
  startTree();
  startTop();
  addEventListener("keydown", onKeyDown);
  const isDark = () => document.documentElement.dataset.theme === "dark";
  $("theme").addEventListener("click", () => set({ theme: isDark() ? "light" : "dark" }));
  $("help").addEventListener("click", () => $("keyboard").showModal());
  $("menu").addEventListener("click", () => showMenu(!document.body.classList.contains("menu")));
  document.querySelector("main").addEventListener("pointerdown", () => showMenu(false));
  $("home").addEventListener("click", (event) => {
    event.preventDefault();
    openTab(TABS[0]);
  });
  await catalog.then(showCatalog).catch((error) => (model.error = error.message));
  await update(["*run"]);
  push = new Push((news) => receive(news).catch(showError), onConnection);
  subscribe();
  document.body.dataset.ready = "yes";
}

async function addViews(modules) {
  if (!modules.length) return;
  const added = (await Promise.all(modules.map((href) => import(href)))).map(({ tab }) => tab);
  const known = TABS.length;
  for (const view of added) {
    const title = view.within ?? view.title, id = title.toLowerCase();
    const shared = TABS.find((tab) => tab.id === id);
    if (shared) shared.views.push(view);
    else TABS.push({ id, title, views: [view] });
  }
  TABS.slice(known).forEach(mountTab);
  VIEWS = [...VIEWS, ...added];
  if (!model.run) return;
  for (const view of added) view.receive?.({});
  drawControls();
}

/** Shows the list of runs and names, which is a drawer on narrow screens. */
function showMenu(shown) {
  document.body.classList.toggle("menu", shown);
  $("menu").setAttribute("aria-expanded", String(shown));
}

function mountTab(tab) {
  const [id, panelId, [first]] = [`tab-${tab.id}`, `tabpanel-${tab.id}`, tab.views];
  const attributes = { id, role: "tab", "aria-controls": panelId, title: tab.views.find((view) => view.about)?.about };
  $("tabs").append(button(tab.title, () => openTab(tab), attributes));
  if (tab.views.length > 1 && !first.stacked) {
    const options = tab.views.map((view) => [view.id, view.title]);
    tab.choice = segments("View", options, (view) => set({ tab: view }, true));
  }
  const panels = tab.views.map((view) => h("section", { class: "view", id: `panel-${view.id}` }));
  const panel = { class: "panel", id: panelId, role: "tabpanel", "aria-labelledby": id, hidden: true };
  $("panels").append(h("section", panel, tab.choice && tools(tab.choice), panels));
  tab.views.forEach((view, i) => view.mount(panels[i]));
}

function onConnection(open) {
  const isReconnected = open && connection() === "closed";
  document.body.dataset.push = open ? "open" : "closed";
  if (isReconnected) void loadCatalog().then(() => update(["*run"])).catch(showError);
  showNotice(lastingNotice());
}
void start();
