// Provenance: what ran, what was modified, how to reproduce it.
import { request } from "../api.js";
import { card, copyButton, count, dim, emptyCard, fill, h, plural, table } from "../dom.js";
import { model } from "../model.js";

const MAX_PATCH_LINES = 4000;
const body = h("div", { class: "stack" });
let drawn = "";

/** @type {import("../main.js").Tab} */
export const provenance = {
  id: "provenance",
  title: "Provenance",
  mount: (panel) => panel.append(body),

  async show() {
    const run = model.run, info = await request("provenance", { run: run.id });
    const key = JSON.stringify([run.id, run.version]);
    if (key === drawn) return; // a patch that is open stays open
    drawn = key;
    if (info.live) return fill(body, clients(info.clients));
    if (!info.command.full_command && !Object.keys(info.git).length) {
      return fill(body, emptyCard("This run has no provenance", "Runs that tap.init() created record what ran."));
    }
    fill(body, whatRan(info), reproduction(info), modifications(info), surroundings(info));
  },
};

function clients(rows) {
  if (!rows.length) return emptyCard("No client is connected", "Training processes on this machine that call tap.catch() or tap.track() connect by themselves.");
  return card(h("h3", {}, "Clients"), table(["Program", "Host", "Process", "Rank", "Records", "Transport", "State"], rows.map((client) => [
    client.program, client.host, client.pid, `${client.rank} of ${client.world_size}`, count(client.records), client.path,
    client.connected ? "connected" : "disconnected"])));
}

/** @param {[string, any][]} pairs */
const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
const mono = (text) => text && h("span", { class: "mono" }, text);

const whatRan = (info) => card(h("h3", {}, "What ran"), facts([
  ["command", mono(info.command.launcher || info.command.full_command)],
  ["folder", mono(info.working_directory)],
  ["host", [info.host, ...info.devices].filter(Boolean).join(" · ")],
  ["started", info.run.started], ["ended", info.run.ended ?? "not yet, or it was killed"],
  ["Python", info.python], ["system", info.platform], ["ranks", String(info.run.world_size)],
  ["seeds", Object.entries(info.seeds).filter(([, seed]) => seed !== null).map(([name, seed]) => `${name} ${seed}`).join(" · ")],
]));

const reproduction = (info) => card(h("h3", {}, "How to run it again"),
  h("div", { class: "copy" }, h("pre", {}, info.reproduce), copyButton(() => info.reproduce)),
  h("p", { class: "dim" }, "Creates a folder with the code, packages and environment of this run, and a script that starts it."));

function modifications(info) {
  const { git } = info;
  return card(h("h3", {}, "What was modified"), facts([
    ["commit", mono(git.commit_id)], ["branch", git.branch], ["remote", git.remote],
    ["state", git.status === "dirty" ? "uncommitted changes" : git.status],
    ["patched at run time", Object.keys(info.modifications).join(", ") || "nothing"],
    ["changed during the run", info.changed_files.join(", ")],
  ]), info.patches.map((patch) => h("details", {}, h("summary", {}, `${patch.name} (${plural(patch.size, "character")})`), patchText(patch.text))));
}

const LINE_CLASSES = { "@": "at", "+": "plus", "-": "minus" };
/** @param {string} text */
const patchText = (text) => h("pre", {}, text.split("\n").slice(0, MAX_PATCH_LINES).map((line) => h("span", { class: LINE_CLASSES[line[0]] ?? "" }, `${line}\n`)));

function surroundings(info) {
  const rows = (values) => table([], Object.entries(values).map(([name, value]) => [mono(name), mono(String(value))]));
  const section = (noun, values) => h("details", {}, h("summary", {}, plural(Object.keys(values).length, noun)), rows(values));
  return card(h("h3", {}, "Environment"), section("package", info.packages), section("environment variable", info.environment));
}
