// Compaction: offers to sort a large run, so that the page reads little of it.
import { request } from "/static/api.js";
import { button, card, count, dim, fill, h, plural } from "/static/dom.js";
import { model } from "/static/model.js";

const LARGE = 1_000_000; // records
const body = h("div", { class: "stack" });
let job = "";

export const tab = {
  id: "compaction",
  title: "Compaction",
  within: "Run",
  stacked: true,
  isUsed: (run) => run.what === "run" && run.records > LARGE,
  mount: (panel) => panel.append(body),

  async show() {
    if (job) return;
    const { windows } = await request("compact", { run: model.run.id });
    const size = `This run has ${count(model.run.records)} records`;
    if (windows) return show(`${size}, sorted into ${plural(windows, "window")}.`);
    return show(`${size}. Sorted by tensors, the page reads little of it; its files stay.`,
      button("Compact", start, { class: "primary" }));
  },

  receive(news) {
    if (job && news.jobs?.[job]) follow(news.jobs[job]);
  },
};

const show = (text, ...more) => fill(body, card(h("h3", {}, "Compaction"), h("p", {}, dim(text)), more));

async function start() {
  const started = await request("compact/start", { run: model.run.id }, { method: "POST" });
  job = started.job;
  follow(started);
}

function follow({ state, error }) {
  if (state === "running") {
    return show("A process of its own sorts the run. You can go on.",
      h("progress", { "aria-label": "Progress of the compaction" }));
  }
  job = "";
  if (state === "failed") return show(`The run cannot be compacted: ${error}`);
  return void tab.show();
}
