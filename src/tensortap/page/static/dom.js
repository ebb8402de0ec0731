// Elements, and numbers as people read them. Texts of others only ever become text, never markup.

/**
 * An element with attributes, listeners (`onclick`) and children; null, undefined and false are
 * skipped.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : String(child));
  }
}

/** Replaces the children of an element. */
export function fill(parent, ...children) {
  parent.replaceChildren();
  append(parent, children);
}

export const $ = (id) => document.getElementById(id);

// -- parts of tabs -------------------------------------------------------------------------------

export const tools = (...children) => h("div", { class: "tools" }, children);
export const card = (...children) => h("section", { class: "card" }, children);
export const dim = (...children) => h("span", { class: "dim" }, children);
export const grow = () => h("span", { class: "grow" });
export const button = (text, onclick, attributes = {}) =>
  h("button", { type: "button", onclick, ...attributes }, text);
export const labelled = (text, control) => h("label", {}, h("span", {}, text), control);

/** A sentence in place of content. */
export const empty = (title, why, code) => h("div", { class: "empty" },
  h("b", {}, title), why && h("span", {}, why), code && h("code", {}, code));
export const emptyCard = (title, why, code) => card(empty(title, why, code));

/** A table; `numeric` are the columns that are aligned to the right. */
export function table(headings, rows, numeric = []) {
  const line = (tag, cells) => h("tr", {}, cells.map((content, i) => h(tag, {
    class: numeric.includes(i) ? "num" : "", scope: tag === "th" && "col",
  }, content)));
  return h("table", {}, headings.length > 0 && h("thead", {}, line("th", headings)),
    h("tbody", {}, rows.map((row) => (row instanceof Node ? row : line("td", row)))));
}

/** A select; `change` receives the chosen value. */
export const select = (label, change) =>
  h("select", { "aria-label": label, onchange: (event) => change(event.target.value) });

/** Sets the options of a select, texts or [value, text], unless they are the same already. */
export function setOptions(element, options, value) {
  const pairs = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  const key = JSON.stringify(pairs);
  if (element.dataset.key !== key) {
    fill(element, pairs.map(([each, text]) => h("option", { value: each }, text)));
    element.dataset.key = key;
  }
  element.value = value;
}

/** Buttons of which one is pressed: `choose` presses it, `allow` enables one, `show` shows one. */
export function segments(label, options, change) {
  const create = ([value, text]) => [value, button(text, () => change(value))];
  const buttons = new Map(options.map(create));
  const attributes = { class: "segments", role: "group", "aria-label": label };
  const group = h("div", attributes, ...buttons.values());
  group.allow = (value, allowed, reason) =>
    Object.assign(buttons.get(value), { disabled: !allowed, title: allowed ? "" : reason });
  group.show = (value, shown) => {
    buttons.get(value).hidden = !shown;
    group.hidden = [...buttons.values()].filter((each) => !each.hidden).length < 2;
  };
  group.choose = (chosen) => buttons.forEach((each, value) =>
    each.setAttribute("aria-pressed", String(value === chosen)));
  return group;
}

/** A small line: an SVG path in a box of the given size, which stretches. */
export function svgLine(d, width, height) {
  const create = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const svg = create("svg"), path = create("path");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", d);
  svg.append(path);
  return svg;
}

/** A button that copies a text. */
export function copyButton(text, label = "Copy") {
  const element = button(label, async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      // no permission, or no https beyond this machine
      const area = h("textarea", {});
      area.value = text();
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    element.textContent = "Copied";
    setTimeout(() => (element.textContent = label), 1200);
  });
  return element;
}

// -- numbers -------------------------------------------------------------------------------------

export const count = (n) => n.toLocaleString("en");
/** "1 name", "2 names" */
export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
/** "Weight Gradient", "Optimizer State: exp_avg" */
export function kindText(kind) {
  const [name, state] = kind.split(/\.(.*)/s);
  return name.replaceAll("_", " ").replace("Optimiser", "Optimizer") + (state ? `: ${state}` : "");
}

export function number(x) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return count(x);
  const size = Math.abs(x);
  return size >= 1e-3 && size < 1e6 ? String(Number(x.toPrecision(6))) : x.toExponential(4);
}

export function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024) return `${n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}

/** How long ago a time was, in seconds since 1970. */
export function age(time) {
  const hours = Math.max(0, Date.now() / 1000 - time) / 3600;
  if (hours < 1 / 60) return "just now";
  if (hours < 1) return `${Math.round(hours * 60)} min ago`;
  return hours < 48 ? `${Math.round(hours)} h ago` : `${Math.round(hours / 24)} days ago`;
}

export function seconds(s) {
  if (s >= 5400) return `${(s / 3600).toFixed(1)} h`;
  if (s >= 90) return `${(s / 60).toFixed(1)} min`;
  if (s === 0) return "0 s";
  if (s >= 1) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  return s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} µs`;
}
