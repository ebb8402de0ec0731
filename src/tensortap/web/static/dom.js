// Elements from words. Strings of others only ever become text, never markup.

/**
 * An element with attributes, listeners (`onclick`) and children.
 * @param {string} tag
 * @param {Record<string, any>} [with_]
 * @param {...(Node | string | number | null | undefined | false)} children
 * @returns {any}
 */
export function h(tag, with_ = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(with_)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name in made && typeof value !== "string") /** @type {any} */ (made)[name] = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  put(made, ...children);
  return made;
}

/** Replaces what is in an element. @param {Element} parent @param {...any} children */
export function fill(parent, ...children) {
  parent.replaceChildren();
  put(parent, ...children);
}

/** @param {Element} parent @param {...any} children */
function put(parent, ...children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : String(child));
  }
}

/** @param {string} id @returns {any} */
export const $ = (id) => document.getElementById(id);

/** The options of a select; it stays as it is where they are the same.
 * @param {HTMLSelectElement} select @param {(string | [string, string])[]} options @param {string} value */
export function choose(select, options, value) {
  const pairs = options.map((o) => (Array.isArray(o) ? o : [o, o]));
  const key = JSON.stringify(pairs);
  if (select.dataset.key !== key) {
    fill(select, ...pairs.map(([v, text]) => h("option", { value: v }, text)));
    select.dataset.key = key;
  }
  select.value = value;
}

/** What stands where nothing is to be seen. @param {string} title @param {string} [why] @param {string} [code] */
export const empty = (title, why, code) =>
  h("div", { class: "empty" }, h("b", {}, title), why && h("span", {}, why), code && h("code", {}, code));

/** Buttons of which one is pressed.
 * @param {string} label @param {[string, string][]} options @param {(value: string) => void} change */
export function segments(label, options, change) {
  const buttons = options.map(([value, text]) =>
    h("button", { type: "button", "data-value": value, onclick: () => change(value) }, text));
  const made = h("div", { class: "segments", role: "group", "aria-label": label }, ...buttons);
  made.allow = (/** @type {string} */ value, /** @type {boolean} */ may, /** @type {string} */ why) => {
    const button = /** @type {any} */ (buttons.find((b) => b.dataset.value === value));
    button.disabled = !may;
    button.title = may ? "" : why;
  };
  made.choose = (/** @type {string} */ value) => {
    for (const b of buttons) b.setAttribute("aria-pressed", String(b.dataset.value === value));
  };
  return made;
}

/** @param {() => string} text */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      // no permission, or no https beyond this machine: the old way
      const area = h("textarea", {});
      area.value = text();
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1200);
  });
  return button;
}

// -- numbers as people read them ---------------------------------------------------------------
/** @param {number} n */
export const count = (n) => n.toLocaleString("en");
/** @param {any} x */
export function figure(x) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return count(x);
  const size = Math.abs(x);
  return size >= 1e-3 && size < 1e6 ? String(Number(x.toPrecision(6))) : x.toExponential(4);
}
/** @param {number} n */
export function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024) return `${n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}
/** @param {number} s */
export function seconds(s) {
  if (s >= 5400) return `${(s / 3600).toFixed(1)} h`;
  if (s >= 90) return `${(s / 60).toFixed(1)} min`;
  if (s >= 1) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  return s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} µs`;
}
