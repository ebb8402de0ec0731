// What the user has chosen. It is kept in the address behind the #, so that reloading and sharing restore it.

/**
 * @typedef {object} State
 * @property {string} run @property {string} tab @property {number | null} step @property {boolean} follow
 * @property {string} q the search @property {string} kind @property {string} rank @property {string} metric
 * @property {string[]} name @property {string[]} stat @property {string} span zoomed steps
 * @property {string} scale @property {string} by @property {string} dtype @property {string} over
 * @property {string} axes @property {string} at @property {string} leaf @property {string} zoom
 * @property {string} minus @property {string} other @property {string} otherstep @property {string} otherrank
 * @property {string} atol @property {string} rtol @property {string} names @property {string} steps
 * @property {string} rule @property {string} theme
 */

/** @type {State} */
const DEFAULTS = {
  run: "", tab: "overview", step: null, follow: false, q: "", kind: "", rank: "", metric: "",
  name: [], stat: [], scale: "", by: "", dtype: "", over: "", axes: "", at: "", leaf: "", zoom: "",
  minus: "", other: "", otherstep: "", otherrank: "", atol: "", rtol: "", span: "", names: "", steps: "", rule: "", theme: "",
};
/** Resets which part of a tensor is shown. */
export const WHOLE_TENSOR = { leaf: "", at: "", axes: "", zoom: "" };

/** @returns {State} */
function readAddress() {
  const query = new URLSearchParams(location.hash.slice(1));
  const state = { ...DEFAULTS };
  for (const [key, standard] of Object.entries(DEFAULTS)) {
    if (!query.has(key)) continue;
    const text = query.get(key);
    if (key === "step") state.step = /^-?\d+$/.test(text) ? Number(text) : null;
    else if (typeof standard === "boolean") state[key] = text === "1";
    else state[key] = Array.isArray(standard) ? query.getAll(key) : text;
  }
  return state;
}

/** @param {State} state */
function addressOf(state) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (Array.isArray(value)) for (const each of value) query.append(key, each);
    else if (value !== null && value !== "" && value !== false && value !== DEFAULTS[key]) query.set(key, value === true ? "1" : value);
  }
  return "#" + query.toString().replaceAll("%2F", "/").replaceAll("%3A", ":").replaceAll("%2C", ",");
}

let current = readAddress();
/** @type {((changed: Set<string>) => void)[]} */
const listeners = [];

export const get = () => current;

/** Calls back with the changed keys whenever the state changes. @param {(changed: Set<string>) => void} callback */
export const onChange = (callback) => void listeners.push(callback);

/** Changes the state; with `navigate`, the back button returns to the state before. @param {Partial<State>} patch */
export function set(patch, navigate = false) {
  if (!apply({ ...current, ...patch })) return;
  if (navigate) history.pushState(null, "", addressOf(current));
  else if (!timer) timer = window.setTimeout(writeAddress, 150);
}

/** @param {State} next */
function apply(next) {
  const changed = Object.keys(DEFAULTS).filter((key) => JSON.stringify(current[key]) !== JSON.stringify(next[key]));
  if (!changed.length) return false;
  current = next;
  for (const callback of listeners) callback(new Set(changed));
  return true;
}

// delayed: browsers reject an address that changes a hundred times per second, as it would while playing
let timer = 0;
function writeAddress() {
  clearTimeout(timer);
  timer = 0;
  if (addressOf(current) !== location.hash) history.replaceState(null, "", addressOf(current));
}
addEventListener("pagehide", writeAddress);
addEventListener("beforeunload", writeAddress);
addEventListener("popstate", () => apply(readAddress()));
