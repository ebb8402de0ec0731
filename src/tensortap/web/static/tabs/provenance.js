// Provenance: what ran, what was changed, how to run it again.
import { ask } from "../api.js";
import { copyButton, count, empty, fill, h } from "../dom.js";
import { model } from "../model.js";

/** @type {any} */ let body;
let drawn = "";

/** @type {import("../main.js").Tab} */
export const provenance = {
  id: "provenance",
  title: "Provenance",

  mount(panel) {
    body = h("div", { style: "display: grid; gap: 12px" });
    panel.append(body);
  },

  async show() {
    const run = model.run;
    if (!run) return;
    const found = await ask("provenance", { run: run.id });
    const key = JSON.stringify([run.id, run.version]);
    if (key === drawn) return;
    drawn = key;
    if (found.live) return fill(body, programs(found.programs));
    if (!found.command.full_command && !Object.keys(found.git).length) {
      return fill(body, h("div", { class: "card" }, empty("This run does not say what ran", "Runs that tap.init started do.")));
    }
    fill(body, ran(found), again(found), changed(found), around(found));
  },
};

/** @param {any[]} rows */
function programs(rows) {
  if (!rows.length) return h("div", { class: "card" }, empty("Nobody sends", "A training program that calls tap.catch or tap.track on this machine finds the session by itself."));
  return h("div", { class: "card" }, h("h3", {}, "Programs that send"), h("table", {},
    h("thead", {}, h("tr", {}, ...["Program", "Host", "Process", "Rank", "Records", "Way", "State"].map((w) => h("th", { scope: "col" }, w)))),
    h("tbody", {}, ...rows.map((p) => h("tr", {}, ...[p.program, p.host, p.pid, `${p.rank} of ${p.world_size}`, count(p.records), p.path, p.connected ? "connected" : "gone"].map((w) => h("td", {}, w)))))));
}

/** @param {[string, any][]} pairs */
const facts = (pairs) => h("dl", { class: "facts" }, ...pairs.filter(([, v]) => v !== undefined && v !== null && v !== "").flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, v)]));

/** @param {any} found */
function ran(found) {
  const command = found.command.launcher || found.command.full_command;
  return h("section", { class: "card" }, h("h3", {}, "What ran"), facts([
    ["command", h("span", { class: "mono" }, command)],
    ["in", h("span", { class: "mono" }, found.working_directory)],
    ["on", [found.host, ...found.devices].filter(Boolean).join(" · ")],
    ["started", found.run.started], ["ended", found.run.ended ?? "not yet, or it was cut off"],
    ["Python", found.python], ["system", found.platform],
    ["ranks", String(found.run.world_size)],
    ["seeds", Object.entries(found.seeds).filter(([, v]) => v !== null).map(([k, v]) => `${k} ${v}`).join(" · ")],
  ]));
}

/** @param {any} found */
function again(found) {
  return h("section", { class: "card" }, h("h3", {}, "How to run it again"),
    h("div", { class: "copy" }, h("pre", {}, found.reproduce), copyButton(() => found.reproduce)),
    h("p", { class: "dim", style: "margin: 8px 0 0" }, "Makes a folder with the code as it was, the packages it had, its environment, and a script that starts it."));
}

/** @param {any} found */
function changed(found) {
  const git = found.git, patched = Object.keys(found.modifications);
  return h("section", { class: "card" }, h("h3", {}, "What was changed"), facts([
    ["commit", git.commit_id && h("span", { class: "mono" }, git.commit_id)], ["branch", git.branch], ["remote", git.remote],
    ["state", git.status === "dirty" ? "with changes that were not committed" : git.status],
    ["patched at run time", patched.length ? patched.join(", ") : "nothing"],
    ["changed on the way", found.changed_on_the_way.length ? found.changed_on_the_way.join(", ") : ""],
  ]), ...found.patches.map((/** @type {any} */ p) => h("details", { style: "margin-top: 10px" }, h("summary", {}, `${p.name} (${count(p.size)} characters)`), patch(p.text))));
}

/** @param {string} text */
function patch(text) {
  const made = h("pre", {});
  for (const line of text.split("\n").slice(0, 4000)) {
    const kind = line.startsWith("@@") ? "at" : line.startsWith("+") ? "plus" : line.startsWith("-") ? "minus" : "";
    made.append(h("span", { class: kind }, `${line}\n`));
  }
  return made;
}

/** @param {any} found */
function around(found) {
  const packages = Object.entries(found.packages), variables = Object.entries(found.environment);
  /** @param {[string, any][]} pairs */
  const rows = (pairs) => h("table", {}, h("tbody", {}, ...pairs.map(([k, v]) => h("tr", {}, h("td", { class: "mono" }, k), h("td", { class: "mono" }, String(v))))));
  return h("section", { class: "card" }, h("h3", {}, "Around it"),
    h("details", {}, h("summary", {}, `${count(packages.length)} packages`), rows(packages)),
    h("details", { style: "margin-top: 8px" }, h("summary", {}, `${count(variables.length)} environment variables`), rows(variables)));
}
