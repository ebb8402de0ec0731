// Alerts: what was wrong, where, and since when. A click opens the tensor at that step, "Why" the
// operation behind it.
import { request } from "/static/api.js";
import {
  $, button, card, count, dim, empty, fill, h, kindText, labelled, plural, select, setOptions, table, tools,
} from "/static/dom.js";
import { model } from "/static/model.js";
import { set } from "/static/state.js";
import { drawRuns } from "/static/tree.js";
import { drawVerdict, verdictCard } from "./why.js";

const rule = select("Rule", (value) => set({ rule: value }));
const summary = dim();
const bar = tools(labelled("Rule", rule), summary);
const body = card();
const RANK_RULES = ["replicas", "outlier", "behind"]; // the ranks side by side show why
let countedRun = "";

/** Shows the number of alerts on the tab, without those that only say what could not be seen. */
function showBadge(total) {
  $("tab-problems").querySelector(".badge")?.remove();
  if (total) $("tab-problems").append(h("span", { class: "badge" }, count(total)));
}

/** Shows it in the list of runs, too, which has only what training raised: no comparison of ranks. */
function showCount(problems) {
  showBadge(problems);
  model.problems.set(model.run.id, problems);
  drawRuns();
}

export const tab = {
  id: "alerts",
  title: "Alerts",
  within: "Problems",
  stacked: true,
  about: "What is wrong, where, since when, and what to do",
  first: true,
  mount: (panel) => panel.append(bar, verdictCard, body),

  async show(state) {
    const { total, problems, alerts: all } = await request("alerts", { run: model.run.id });
    showCount(problems);
    const rules = [...new Set(all.map((alert) => alert.rule))].sort();
    setOptions(rule, [["", "all"], ...rules], rules.includes(state.rule) ? state.rule : "");
    const shown = all.filter((alert) => !state.rule || alert.rule === state.rule);
    fill(summary, total === all.length ? plural(shown.length, "alert")
      : `the first and the last ${count(all.length / 2)} of ${count(total)}`);
    bar.hidden = !total;
    const none = "No rule raised an alert, or none was active: rules need runs tracked with";
    fill(body, total ? table(["Step", "Rule", "Name", "Message"], shown.map(alertRow), [0])
      : empty("No alerts", none, "tap.track(model, alerts=True)"));
    await drawVerdict(state);
  },

  async prepare() {
    const run = model.run;
    // the tab reports errors itself
    const { problems } = await request("alerts", { run: run.id }).catch(() => ({ problems: 0 }));
    if (model.run?.id === run.id) showCount(problems);
  },

  async receive(news) {
    if (countedRun !== model.run?.id) showBadge(0); // until they have been counted
    countedRun = model.run?.id;
    if (news.run && model.run) await tab.prepare();
  },
};

function alertRow(alert) {
  const { name, kind, step, rank, origin, again } = alert;
  const isMetric = kind === "Metric";
  const target = RANK_RULES.includes(alert.rule)
    ? { tab: "ranks", across: "", ...(isMetric ? {} : { name: [name], kind }) }
    : isMetric ? { tab: "overview" } : { tab: "exponents", name: [name], kind };
  const open = () => set({ ...target, step, follow: false }, true);
  const onkeydown = (event) => event.key === "Enter" && open();
  const detail = (text) => h("div", { class: "dim" }, text);
  return h("tr", { class: "clickable", tabindex: "0", onclick: open, onkeydown },
    h("td", { class: "num" }, count(step)), h("td", {}, h("span", { class: "rule" }, alert.rule)),
    h("td", {}, name, detail(kindText(kind) + (rank ? ` · rank ${rank}` : ""))),
    h("td", {}, alert.why && whyButton(alert), alert.message, origin && detail(`began in ${origin}`),
      again > 0 && detail(`raised ${plural(again, "time")} before`)));
}

function whyButton({ why, step }) {
  const open = (event) => {
    event.stopPropagation(); // the row opens the tensor
    set({ why }, true);
  };
  const onkeydown = (event) => event.stopPropagation();
  return button("Why", open, { class: "why", onkeydown, "aria-label": `Why, step ${step}` });
}
