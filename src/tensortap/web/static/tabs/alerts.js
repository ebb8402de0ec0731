// Alerts: what was wrong, where, since when; a click goes there.
import { ask } from "../api.js";
import { $, choose, count, empty, fill, h } from "../dom.js";
import { model } from "../model.js";
import { set } from "../state.js";

/** @type {any} */ let body;
/** @type {any} */ let rule;
/** @type {any} */ let said;
let badged = "";

/** How many there are, on the tab. @param {number} total */
function badge(total) {
  const tab = $("tab-alerts");
  tab.querySelector(".badge")?.remove();
  if (total) tab.append(h("span", { class: "badge" }, count(total)));
}

/** @type {import("../main.js").Tab} */
export const alerts = {
  id: "alerts",
  title: "Alerts",

  mount(panel) {
    rule = h("select", { "aria-label": "Rule", onchange: () => set({ rule: rule.value }) });
    said = h("span", { class: "dim" });
    body = h("div", { class: "card" });
    panel.append(h("div", { class: "tools" }, h("label", {}, h("span", {}, "Rule"), rule), said), body);
  },

  async show(state) {
    const run = model.run;
    if (!run) return;
    const found = await ask("alerts", { run: run.id });
    badge(found.total);
    const rules = [...new Set(found.alerts.map((/** @type {any} */ a) => a.rule))].sort();
    choose(rule, [["", "all"], ...rules.map((r) => /** @type {[string, string]} */ ([r, r]))], rules.includes(state.rule) ? state.rule : "");
    const shown = found.alerts.filter((/** @type {any} */ a) => !state.rule || a.rule === state.rule);
    said.textContent = found.total > found.alerts.length ? `the first and the last ${count(found.alerts.length / 2)} of ${count(found.total)}` : `${count(shown.length)} ${shown.length === 1 ? "alert" : "alerts"}`;
    rule.parentElement.parentElement.hidden = !found.total;
    if (!found.total) return fill(body, empty("No alerts", "Nothing was wrong, or nobody watched: alerts are for runs that were tracked with", "tap.track(model, alerts=True)"));
    fill(body, h("table", {}, h("thead", {}, h("tr", {}, ...["Step", "Rule", "Name", "What"].map((w, i) => h("th", { scope: "col", class: i ? "" : "num" }, w)))),
      h("tbody", {}, ...shown.map(row))));
  },

  async hear(news) {
    const run = model.run;
    if (!run || !(news.run || badged !== run.id)) return;
    badged = run.id;
    try {
      badge((await ask("alerts", { run: run.id })).total);
    } catch {
      badge(0); // the tab itself says what is wrong
    }
  },
};

/** @param {any} alert */
function row(alert) {
  const metric = alert.kind === "Metric";
  const go = () => set({ tab: metric ? "overview" : "exponents", step: alert.step, follow: false, ...(metric ? {} : { name: [alert.name], kind: alert.kind, over: "" }) }, true);
  return h("tr", { class: "goes", tabindex: "0", onclick: go, onkeydown: (/** @type {KeyboardEvent} */ e) => e.key === "Enter" && go() },
    h("td", { class: "num" }, count(alert.step)),
    h("td", {}, h("span", { class: "rule" }, alert.rule)),
    h("td", {}, alert.name, h("div", { class: "dim" }, alert.kind.replaceAll("_", " ") + (alert.rank ? ` · rank ${alert.rank}` : ""))),
    h("td", {}, alert.message, alert.origin && h("div", { class: "dim" }, `began in ${alert.origin}`), alert.again > 0 && h("div", { class: "dim" }, `and ${count(alert.again)} times more before`)));
}
