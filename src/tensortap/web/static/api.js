// Asks the server. Answers are remembered with their version, and asked for again only by it.

/** @type {Map<string, {tag: string, data: any}>} */
const held = new Map();
const KEPT = 120;

/** @type {(run: string) => number | null} */
let versionOf = () => null;

/** Who knows the version of a run for certain, as long as the server tells of news. @param {(run: string) => number | null} know */
export const knowing = (know) => void (versionOf = know);

export class Failed extends Error {
  /** @param {string} message @param {number} status */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The address of a question. @param {string} what @param {Record<string, any>} about */
export function address(what, about) {
  const said = new URLSearchParams();
  for (const [key, value] of Object.entries(about)) {
    if (value === null || value === undefined || value === "" || value === false) continue;
    if (Array.isArray(value)) for (const each of value) said.append(key, each);
    else said.set(key, value === true ? "1" : String(value));
  }
  return `/api/${what}?${said}`;
}

/**
 * The answer to a question; throws `Failed` with the server's sentence.
 * @param {string} what @param {Record<string, any>} [about] @param {{signal?: AbortSignal, method?: string}} [how]
 */
export async function ask(what, about = {}, how = {}) {
  const url = address(what, about);
  const known = how.method ? undefined : held.get(url);
  // its version is the run's: there is nothing to ask
  if (known && !about.other && about.run && known.tag.split("-")[1] === `${versionOf(about.run)}"`) return known.data;
  let answer;
  try {
    answer = await fetch(url, { ...how, headers: known ? { "If-None-Match": known.tag } : {}, cache: "no-store" });
  } catch (error) {
    if (how.signal?.aborted) throw error;
    throw new Failed("The server does not answer: it was ended, or is busy.", 0);
  }
  if (answer.status === 304 && known) return known.data;
  if (answer.status === 401) throw new Failed(await answer.text(), 401);
  const data = await answer.json();
  if (!answer.ok) throw new Failed(data.error ?? `The server said ${answer.status}.`, answer.status);
  const tag = answer.headers.get("etag");
  if (tag) {
    held.delete(url);
    held.set(url, { tag, data });
    if (held.size > KEPT) held.delete(/** @type {string} */ (held.keys().next().value));
  }
  return data;
}

const TYPES = /** @type {any} */ ({ f8: Float64Array, f4: Float32Array, i4: Int32Array, u4: Uint32Array, i2: Int16Array, u2: Uint16Array, i1: Int8Array, u1: Uint8Array });

/** An array of the server: a list, or bytes in base 64. @param {any} value @returns {number[]} */
export function array(value) {
  if (Array.isArray(value)) return value;
  if (!value?.bdata) return [];
  const raw = atob(value.bdata), held = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) held[i] = raw.charCodeAt(i);
  return Array.from(new TYPES[value.dtype](held.buffer));
}
