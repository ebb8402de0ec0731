// Provenance: what ran, what was modified, how to reproduce it.
import { request } from "/static/api.js";
import { card, copyButton, emptyCard, fill, h, plural, table } from "/static/dom.js";
import { model } from "/static/model.js";

const MAX_PATCH_LINES = 4000;
const LINE_CLASSES = { "@": "at", "+": "plus", "-": "minus" };
const body = h("div", { class: "stack" });
let drawn = "";

export const tab = {
  id: "provenance",
  title: "Provenance",
  within: "Run",
  stacked: true,
  about: "What ran, how to run it again, and what capturing cost",
  mount: (panel) => panel.append(body),

  async show() {
    const run = model.run, info = await request("provenance", { run: run.id });
    const key = JSON.stringify([run.id, run.version]);
    if (key === drawn) return; // a patch that is open stays open
    drawn = key;
    const what = info.live ? "live session" : "run";
    if (info.live || (!info.command.full_command && !Object.keys(info.git).length)) {
      const why = "Runs that tap.init() created record what ran.";
      return fill(body, emptyCard(`This ${what} has no provenance`, why));
    }
    fill(body, whatRan(info), reproduction(info), modifications(info), surroundings(info));
  },
};

const mono = (text) => text && h("span", { class: "mono" }, text);
const fold = (title, content) => h("details", {}, h("summary", {}, title), content);
const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => value)
  .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

function whatRan(info) {
  const seeds = Object.entries(info.seeds).filter(([, seed]) => seed !== null);
  const { notes, config } = model.run;
  return card(h("h3", {}, "What ran"), facts([
    ["notes", notes], ["config", Object.keys(config ?? {}).length > 0 && mono(JSON.stringify(config, null, 1))],
    ["command", mono(info.command.launcher || info.command.full_command)],
    ["folder", mono(info.working_directory)],
    ["host", [info.host, ...info.devices].filter(Boolean).join(" · ")],
    ["started", info.run.started], ["ended", info.run.ended ?? (model.run.state === "crashed" ? "its process is gone" : "not yet")],
    ["Python", info.python], ["system", info.platform], ["ranks", String(info.run.world_size)],
    ["seeds", seeds.map(([name, seed]) => `${name} ${seed}`).join(" · ")],
  ]));
}

const reproduction = (info) => card(h("h3", {}, "How to run it again"),
  h("div", { class: "copy" }, h("pre", {}, info.reproduce), copyButton(() => info.reproduce)),
  h("p", { class: "dim" }, "Creates a folder with the code, packages and environment of this run, "
    + "and a script that starts it."));

function modifications({ git, modifications: patched, changed_files: changed, patches }) {
  return card(h("h3", {}, "What was modified"), facts([
    ["commit", mono(git.commit_id)], ["branch", git.branch], ["remote", git.remote],
    ["state", git.status === "dirty" ? "uncommitted changes" : git.status],
    ["patched at run time", Object.keys(patched).join(", ") || "nothing"],
    ["changed during the run", changed.join(", ")],
  ]), patches.map(({ name, size, text }) =>
    fold(`${name} (${plural(size, "character")})`, patchText(text))));
}

const patchText = (text) => h("pre", {}, text.split("\n").slice(0, MAX_PATCH_LINES)
  .map((line) => h("span", { class: LINE_CLASSES[line[0]] ?? "" }, `${line}\n`)));

function surroundings({ packages, environment }) {
  const section = (noun, values) => fold(plural(Object.keys(values).length, noun),
    table([], Object.entries(values).map(([name, value]) => [mono(name), mono(String(value))])));
  return card(h("h3", {}, "Environment"),
    section("package", packages), section("environment variable", environment));
}
