// What the user has chosen, kept in the address behind the #: reloading and sharing restore it.

// sort: of the list of runs; q: the search; span: the zoomed steps; other: the compared run; across, median and
// open: the layers, the difference and the groups of the tab of ranks; why: a verdict;
// module: the modules that show their operations
const DEFAULTS = {
  run: "", tab: "summary", step: null, follow: false, q: "", kind: "", rank: "", metric: "", colors: "",
  name: [], stat: [], scale: "", by: "", dtype: "", axes: "", at: "", leaf: "", zoom: "",
  other: "", atol: "", rtol: "", span: "", names: "",
  steps: "", rule: "", why: "", module: [], theme: "", sort: "", across: "", median: false, open: "",
};
/** Resets which part of a tensor is shown. */
export const WHOLE_TENSOR = { leaf: "", at: "", axes: "", zoom: "" };

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

function addressOf(state) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (Array.isArray(value)) for (const each of value) query.append(key, each);
    else if (value === true) query.set(key, "1");
    else if (![null, "", false, DEFAULTS[key]].includes(value)) query.set(key, value);
  }
  const readable = { "%2F": "/", "%3A": ":", "%2C": "," };
  return "#" + query.toString().replace(/%(2F|3A|2C)/g, (code) => readable[code]);
}

let current = readAddress();
const listeners = [];

export const get = () => current;

/** Calls back with the changed keys whenever the state changes. */
export const onChange = (callback) => void listeners.push(callback);

/** Changes the state; with `navigate`, the back button returns to the state before. */
export function set(patch, navigate = false) {
  if (!apply({ ...current, ...patch })) return;
  if (navigate) history.pushState(null, "", addressOf(current));
  else if (!timer) timer = window.setTimeout(writeAddress, 150);
}

function apply(next) {
  const isChanged = (key) => JSON.stringify(current[key]) !== JSON.stringify(next[key]);
  const changed = Object.keys(DEFAULTS).filter(isChanged);
  if (!changed.length) return false;
  current = next;
  for (const callback of listeners) callback(new Set(changed));
  return true;
}

// delayed: browsers reject an address that changes a hundred times per second, as while playing
let timer = 0;
function writeAddress() {
  clearTimeout(timer);
  timer = 0;
  if (addressOf(current) !== location.hash) history.replaceState(null, "", addressOf(current));
}
addEventListener("pagehide", writeAddress);
addEventListener("beforeunload", writeAddress);
addEventListener("popstate", () => apply(readAddress()));
