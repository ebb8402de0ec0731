// Alerts: what was wrong, where, and since when. A click opens the tensor at that step.
import { request } from "../api.js";
import { $, card, count, dim, empty, fill, h, kindText, labelled, plural, select, setOptions, table, tools } from "../dom.js";
import { model } from "../model.js";
import { set } from "../state.js";

const rule = select("Rule", (value) => set({ rule: value }));
const summary = dim();
const bar = tools(labelled("Rule", rule), summary);
const body = card();
let countedRun = "";

/** Shows the number of alerts on the tab. @param {number} total */
function showBadge(total) {
  $("tab-alerts").querySelector(".badge")?.remove();
  if (total) $("tab-alerts").append(h("span", { class: "badge" }, count(total)));
}

/** @type {import("../main.js").Tab} */
export const alerts = {
  id: "alerts",
  title: "Alerts",
  mount: (panel) => panel.append(bar, body),

  async show(state) {
    const { total, alerts: all } = await request("alerts", { run: model.run.id });
    showBadge(total);
    const rules = [...new Set(all.map((alert) => alert.rule))].sort();
    setOptions(rule, [["", "all"], ...rules], rules.includes(state.rule) ? state.rule : "");
    const shown = all.filter((alert) => !state.rule || alert.rule === state.rule);
    fill(summary, total > all.length ? `the first and the last ${count(all.length / 2)} of ${count(total)}` : plural(shown.length, "alert"));
    bar.hidden = !total;
    fill(body, total ? table(["Step", "Rule", "Name", "Message"], shown.map(alertRow), [0])
      : empty("No alerts", "No rule raised an alert, or none was active. Rules are active in runs tracked with", "tap.track(model, alerts=True)"));
  },

  async receive(news) {
    const run = model.run;
    if (!run || !(news.run || countedRun !== run.id)) return;
    countedRun = run.id;
    // the tab reports errors itself
    showBadge((await request("alerts", { run: run.id }).catch(() => ({ total: 0 }))).total);
  },
};

function alertRow(alert) {
  const isMetric = alert.kind === "Metric";
  const target = isMetric ? { tab: "overview" } : { tab: "exponents", name: [alert.name], kind: alert.kind, over: "" };
  const open = () => set({ ...target, step: alert.step, follow: false }, true);
  const detail = (text) => h("div", { class: "dim" }, text);
  return h("tr", { class: "clickable", tabindex: "0", onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
    h("td", { class: "num" }, count(alert.step)),
    h("td", {}, h("span", { class: "rule" }, alert.rule)),
    h("td", {}, alert.name, detail(kindText(alert.kind) + (alert.rank ? ` · rank ${alert.rank}` : ""))),
    h("td", {}, alert.message, alert.origin && detail(`began in ${alert.origin}`), alert.again > 0 && detail(`raised ${plural(alert.again, "time")} before`)));
}
