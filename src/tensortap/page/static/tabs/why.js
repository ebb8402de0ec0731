// Why: the operation behind an alert, its lines, its operands, and the operations before it.
import { request } from "/static/api.js";
import { button, card, dim, fill, h, table } from "/static/dom.js";
import { model } from "/static/model.js";
import { set } from "/static/state.js";

export const verdictCard = card();
verdictCard.classList.add("verdict");
verdictCard.hidden = true;
let drawn = "";

/** Draws the verdict that the address names: by its step, rank, kind and name. */
export async function drawVerdict(state) {
  verdictCard.hidden = !state.why;
  const key = JSON.stringify([model.run.id, model.run.version, state.why]);
  if (!state.why || key === drawn) return;
  const verdict = await request("why", { run: model.run.id, verdict: state.why });
  const close = button("Close", () => set({ why: "" }, true));
  const title = h("div", { class: "title" }, h("h3", {}, "Why"), close);
  fill(verdictCard, title, h("p", {}, verdict.message));
  drawn = key;
  if (verdict.explanation) drawExplanation(verdict.explanation);
}

function drawExplanation(found) {
  const heading = (text) => h("h4", {}, text);
  const chain = found.chain.map(({ name, output, line, code }) =>
    [operationLink(name), mono(output), [mono(shortLine(line), line), h("div", { class: "dim" }, code)]]);
  const operands = found.operands.map(({ name, values }) => [mono(name), mono(values)]);
  verdictCard.append(
    ...(found.source.length ? [heading([mono(`${found.file}:${found.line}`),
      found.function && dim(` in ${found.function}`)]), sourceLines(found)] : []),
    heading(["Operation ", operationLink(found.name), dim(` ${found.phase}: ${found.why}`)]),
    ...(operands.length ? [table(["Tensor", "Values"], operands)] : []),
    ...(chain.length ? [heading("What led there"),
      table(["Operation", "Made", "Line"], chain)] : []));
}

const mono = (text, title) => h("span", { class: "mono", title }, text);
const shortLine = (line) => line.split("/").at(-1);

/** The name of an operation; a click opens its record. */
const operationLink = (name) => h("a", {
  class: "mono", href: "#", onclick(event) {
    event.preventDefault();
    set({ tab: "exponents", kind: "Op", name: [name] }, true);
  },
}, name);

const sourceLines = ({ source, first_line: first, line }) => h("pre", {}, source.map((text, i) =>
  h("span", { class: first + i === line && "here" }, `${String(first + i).padStart(5)}  ${text}`)));
