// All that is chosen lies in the address, behind the #: reload and share restore it.

/**
 * @typedef {object} State
 * @property {string} run @property {string} tab @property {number | null} step
 * @property {boolean} follow @property {string} q @property {string} kind @property {string} rank
 * @property {string} metric @property {string[]} name @property {string[]} stat
 * @property {string} scale @property {string} by @property {string} dtype @property {string} over
 * @property {string} axes @property {string} at @property {string} leaf @property {string} zoom
 * @property {string} minus @property {string} other @property {string} otherstep
 * @property {string} otherrank @property {string} atol @property {string} rtol
 * @property {string} span @property {string} names @property {string} steps @property {string} rule @property {string} theme
 */

/** @type {State} */
const NOTHING = {
  run: "", tab: "overview", step: null, follow: false, q: "", kind: "", rank: "", metric: "",
  name: [], stat: [], scale: "", by: "", dtype: "", over: "", axes: "", at: "", leaf: "", zoom: "",
  minus: "", other: "", otherstep: "", otherrank: "", atol: "", rtol: "", span: "", names: "", steps: "", rule: "", theme: "",
};

/** @returns {State} */
function read() {
  const said = new URLSearchParams(location.hash.slice(1));
  /** @type {any} */
  const found = { ...NOTHING };
  for (const key of Object.keys(NOTHING)) {
    if (!said.has(key)) continue;
    const plain = /** @type {string} */ (said.get(key));
    if (key === "step") found.step = /^-?\d+$/.test(plain) ? Number(plain) : null;
    else if (key === "follow") found.follow = plain === "1";
    else if (key === "name" || key === "stat") found[key] = said.getAll(key);
    else found[key] = plain;
  }
  return found;
}

/** @param {State} state */
function write(state) {
  const said = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (Array.isArray(value)) for (const each of value) said.append(key, each);
    else if (value === true) said.set(key, "1");
    else if (value !== null && value !== "" && value !== false && value !== /** @type {any} */ (NOTHING)[key]) said.set(key, String(value));
  }
  return "#" + said.toString().replaceAll("%2F", "/").replaceAll("%3A", ":").replaceAll("%2C", ",");
}

/** @type {State} */
let now = read();
/** @type {((state: State, changed: Set<string>) => void)[]} */
const listeners = [];

export const get = () => now;

/** Calls back whenever something is chosen. @param {(state: State, changed: Set<string>) => void} call */
export const listen = (call) => void listeners.push(call);

/** Chooses. What the user goes to (`go`) can be gone back from. @param {Partial<State>} patch */
export function set(patch, go = false) {
  const next = { ...now, ...patch };
  const changed = differences(now, next);
  if (!changed.size) return;
  now = next;
  if (go) history.pushState(null, "", write(now));
  else later();
  tell(changed);
}

// browsers refuse an address that changes a hundred times a second, as it does while playing
let timer = 0;
function later() {
  if (!timer) timer = window.setTimeout(flush, 150);
}
function flush() {
  clearTimeout(timer);
  timer = 0;
  if (write(now) !== location.hash) history.replaceState(null, "", write(now));
}
addEventListener("pagehide", flush);
addEventListener("beforeunload", flush);

/** @param {State} a @param {State} b */
function differences(a, b) {
  return new Set(Object.keys(NOTHING).filter((k) => JSON.stringify(/** @type {any} */ (a)[k]) !== JSON.stringify(/** @type {any} */ (b)[k])));
}

/** @param {Set<string>} changed */
function tell(changed) {
  for (const call of listeners) call(now, changed);
}

addEventListener("popstate", () => {
  const next = read();
  const changed = differences(now, next);
  now = next;
  if (changed.size) tell(changed);
});
