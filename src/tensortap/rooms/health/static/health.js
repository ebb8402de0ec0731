// Health: one row per rule that found something, with a light, where and since when, and what to do.
import { request } from "/static/api.js";
import { card, count, dim, fill, h, kindText, plural, table } from "/static/dom.js";
import { model } from "/static/model.js";
import { set } from "/static/state.js";

const STATES = { problem: "problem", hint: "hint", fine: "fine", blind: "could not look", unknown: "not active" };
const rules = card();

export const tab = {
  id: "health",
  title: "Health",
  within: "Problems",
  stacked: true,
  mount: (panel) => panel.append(rules),

  async show() {
    const found = await request("health", { run: model.run.id });
    const raised = found.rules.filter((row) => row.alerts);
    const looked = found.rules.some((row) => row.state === "fine");
    const none = looked ? "No rule found a problem" : "No rule looked at this run";
    fill(rules, h("h3", {}, raised.length ? "Rules that found something" : none),
      raised.length > 0 && table(["", "Rule", "Where", "Since", "What to do"], raised.map(ruleRow), [3]),
      quiet(found.rules, "fine", "found nothing"),
      quiet(found.rules, "blind", "could not look"),
      quiet(found.rules, "unknown", "not active: they need tap.track(model, optimizer, alerts=True)"));
  },
};

/** Rules without a finding, as one line that unfolds. */
function quiet(all, state, words) {
  const rows = all.filter((row) => row.state === state);
  const light = h("span", { class: `light ${state}`, role: "img", "aria-label": STATES[state] });
  return rows.length > 0 && h("details", { class: state }, h("summary", {}, light, ` ${plural(rows.length, "rule")} ${words}`),
    table([], rows.map((row) => [row.rule, dim(row.message || row.looks_for)])));
}

const detail = (text) => h("div", { class: "dim detail" }, text);

function ruleRow(row) {
  const { rule, state, alerts, name, kind, step, rank, message } = row;
  const open = () => set({ tab: "alerts", rule }, true);
  const onkeydown = (event) => event.key === "Enter" && open();
  const light = h("span", { class: `light ${state}`, role: "img", "aria-label": STATES[state] });
  const facts = [kindText(kind), rank && `rank ${rank}`, alerts > 1 && plural(alerts, "alert")];
  return h("tr", { class: "clickable", tabindex: "0", onclick: open, onkeydown },
    h("td", { class: "lights" }, light), h("td", {}, rule), h("td", {}, name, detail(facts.filter(Boolean).join(" · "))),
    h("td", { class: "num" }, count(step)), h("td", {}, message, detail(row.remedy)));
}
