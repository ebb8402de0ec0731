// Why: the operation behind an alert, its lines, its operands, and the operations before it.
import { request } from "/static/api.js";
import { button, card, dim, fill, h, plural, table } from "/static/dom.js";
import { draw } from "/static/figure.js";
import { model, selection } from "/static/model.js";
import { set } from "/static/state.js";

export const verdictCard = card();
verdictCard.classList.add("verdict");
verdictCard.hidden = true;
let drawn = "";

/** Draws the verdict that the address names: by its step, rank, kind and name. */
export async function drawVerdict(state) {
  verdictCard.hidden = !state.why;
  const { theme } = selection(state);
  const key = JSON.stringify([model.run.id, model.run.version, state.why, theme]);
  if (!state.why || key === drawn) return;
  const verdict = await request("why", { run: model.run.id, verdict: state.why, theme });
  const close = button("Close", () => set({ why: "" }, true));
  const title = h("div", { class: "title" }, h("h3", {}, "Why"), close);
  fill(verdictCard, title, h("p", {}, verdict.message));
  drawn = key;
  if (verdict.explanation) await drawExplanation(verdict.explanation, verdict.figures);
}

async function drawExplanation(found, figures) {
  const heading = (text) => h("h4", {}, text);
  const plots = figures.map(() => h("div", {}));
  const chain = found.chain.map(({ name, output, line, code }) =>
    [operationLink(name), mono(output), [mono(shortLine(line), line), h("div", { class: "dim" }, code)]]);
  const names = found.operands.map(({ name }) => name);
  const elements = found.elements.map(({ index, values }) =>
    [`[${index.join(", ")}]`, ...values].map((text) => mono(text)));
  const few = found.bad > elements.length ? `, the first ${elements.length}` : "";
  verdictCard.append(
    ...(found.source.length ? [heading([mono(`${found.file}:${found.line}`),
      found.function && dim(` in ${found.function}`)]), sourceLines(found)] : []),
    heading(["Operation ", operationLink(found.name), dim(` ${found.phase}: ${found.why}`)]),
    h("div", { class: "operands" }, plots),
    ...(elements.length ? [heading(`${plural(found.bad, "bad element")}${few}`),
      table(["Index", ...names], elements)] : []),
    ...(chain.length ? [heading("What led there"),
      table(["Operation", "Made", "Line"], chain)] : []));
  for (const [i, figure] of figures.entries()) {
    await draw(plots[i], figure, { config: { displayModeBar: false } });
  }
}

const mono = (text, title) => h("span", { class: "mono", title }, text);
const shortLine = (line) => line.split("/").at(-1);

/** The name of an operation; a click opens its record. */
const operationLink = (name) => h("a", {
  class: "mono", href: "#", onclick(event) {
    event.preventDefault();
    set({ tab: "exponents", kind: "Op", name: [name], over: "" }, true);
  },
}, name);

const sourceLines = ({ source, first_line: first, line }) => h("pre", {}, source.map((text, i) =>
  h("span", { class: first + i === line && "here" }, `${String(first + i).padStart(5)}  ${text}`)));
