// Receipt: what capturing cost, what was dropped, how fast records came.
import { request } from "/static/api.js";
import { bytes, card, count, dim, emptyCard, fill, h, seconds, table } from "/static/dom.js";
import { model } from "/static/model.js";

const body = h("div", { class: "stack" });

export const tab = {
  id: "receipt",
  title: "Receipt",
  within: "Run",
  stacked: true,
  mount: (panel) => panel.append(body),

  async show() {
    const info = await request("receipt", { run: model.run.id });
    if (info.live) fill(body, sessionFigures(info), cost(info), clients(info.clients));
    else fill(body, runFigures(info), cost(info), dropped(info));
  },
};

/** Large numbers with their names; the third of each triple is a class. */
const figures = (triples) => h("dl", { class: "figures" }, triples.map(([name, text, kind]) =>
  h("div", { class: kind ?? "" }, h("dt", {}, name), h("dd", {}, text))));
const warnIf = (n, kind = "warn") => (n ? kind : "");
const rate = (n, time) => (time > 0 ? `${count(Number((n / time).toPrecision(3)))} / s` : "–");
const nonzero = (counts) => Object.entries(counts).filter(([, n]) => n);

const runFigures = (info) => figures([
  ["records", count(info.records)], ["ranks", `${info.ranks} of ${info.world_size}`],
  ["steps", count(info.steps)], ["time", seconds(info.seconds)],
  ["record rate", rate(info.records, info.seconds)],
  ["step rate", rate(info.steps, info.seconds)],
  ["tables", bytes(info.nbytes.records)], ["tensors", bytes(info.nbytes.tensors)],
  ["dropped", count(info.dropped), warnIf(info.dropped, "bad")],
  ...(info.truncated ? [["truncated", bytes(info.truncated), "warn"]] : []),
]);

const sessionFigures = (info) => figures([
  ["records", count(info.records)], ["received", bytes(info.nbytes)],
  ["in memory", `${bytes(info.held_nbytes)} of ${bytes(info.bound)}`],
  ["record rate", rate(info.records, info.seconds)], ["uptime", seconds(info.seconds)],
  ["evicted", count(info.evicted), warnIf(info.evicted)],
  ...nonzero(info.rejected).map(([reason, n]) => [`rejected: ${reason}`, count(n), "warn"]),
]);

function cost({ live, cost: bill }) {
  const why = live ? "Print tap.receipt() in the training process." : "Recorded when a run ends.";
  if (!bill) return card(h("h3", {}, "Cost"), dim(why));
  const rank = bill.rank != null && ` of rank ${bill.rank}, which paid most`;
  const activities = nonzero(bill.activities).sort((a, b) => b[1] - a[1]);
  return card(h("h3", {}, "Cost for the training thread", rank), figures([
    ["total", seconds(bill.seconds)],
    ["per step", bill.steps ? seconds(bill.seconds_per_step) : "–"],
    ["share of the steps", bill.stepping ? percent(share(bill)) : "–"],
    ["memory", bytes(bill.memory)],
    ["captured", count(bill.captured)], ["tracked", count(bill.tracked)],
    ["skipped", count(bill.skipped)], ["dropped", count(bill.dropped), warnIf(bill.dropped, "bad")],
    ...nonzero(bill.reasons).map(([reason, n]) => [`dropped: ${reason}`, count(n), "bad"]),
  ]), h("div", { class: "narrow" },
    table([], activities.map(([name, time]) => [name, seconds(time)]), [1])), looks(bill.probes ?? []));
}

/** How often each name was looked at, and what that cost; the dearest first. */
function looks(probes) {
  const rows = probes.map(([name, kind, , , seen, spent]) => [name, kind.replaceAll("_", " "), seen, spent / 1e9])
    .sort((a, b) => b[3] - a[3]);
  if (!rows.length) return "";
  return h("details", {}, h("summary", {}, `${count(rows.length)} names were looked at`),
    table(["Name", "Kind", "Looks", "Time", "Each"],
      rows.slice(0, 200).map(([name, kind, n, time]) => [name, kind, count(n), seconds(time), seconds(time / n)]),
      [2, 3, 4]));
}

function share({ seconds: total, activities, stepping }) {
  return Math.min(1, (total - (activities.connecting ?? 0)) / stepping); // it connects once
}

function percent(part) {
  return `${(100 * part).toFixed(2)} %`;
}

function dropped({ dropped: total, dropped_names: names }) {
  if (!total) return emptyCard("Nothing was dropped", "Every captured value is in the run.");
  return card(h("h3", {}, "Dropped records"),
    table(["Name", "Records"], names.map(([name, n]) => [name, count(n)]), [1]));
}

function clients(all) {
  if (!all.length) return emptyCard("No client is connected", "Training processes on this machine "
    + "that call tap.catch() or tap.track() connect by themselves.");
  const headings = ["Program", "Host", "Process", "Rank", "State", "Transport", "Records", "Bytes",
    "Dropped", "Reasons"];
  return card(h("h3", {}, "Clients"), table(headings, all.map((client) => [
    client.program, client.host, client.pid, `${client.rank} of ${client.world_size}`,
    client.connected ? "connected" : "disconnected", client.path,
    count(client.records), bytes(client.nbytes), count(client.dropped),
    nonzero(client.reasons).map(([reason, n]) => `${count(n)} ${reason}`).join(", "),
  ]), [6, 7, 8, 9]));
}
