// Requests to the server. Responses are cached with their version (ETag).

const cache = new Map();
const MAX_CACHED = 120;
let currentVersion = () => null;

/** Sets the function that knows the version of a run, as long as the server pushes changes. */
export const setVersionSource = (source) => void (currentVersion = source);

// The second secret beside the cookie: pages on other ports of this host cannot read it.
export const key = localStorage.getItem("tensortap-key") ?? "none";

/** A request that failed, with the server's message. */
export class RequestError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function apiUrl(what, parameters) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (value === null || value === undefined || value === "" || value === false) continue;
    for (const each of Array.isArray(value) ? value : [value]) {
      query.append(key, each === true ? "1" : each);
    }
  }
  return `/api/${what}?${query}`;
}

/** The response to a request; throws RequestError. */
export async function request(what, parameters = {}, options = {}) {
  const url = apiUrl(what, parameters);
  const cached = options.method ? undefined : cache.get(url);
  // the version is known to be current: no request is necessary
  const known = parameters.run && !parameters.other && `${currentVersion(parameters.run)}"`;
  if (cached && cached.tag.split("-")[1] === known) return cached.data;
  let response;
  try {
    const headers = { "X-Tensortap-Key": key, ...(cached && { "If-None-Match": cached.tag }) };
    response = await fetch(url, { ...options, headers, cache: "no-store" });
  } catch {
    throw new RequestError("The server does not respond: it was stopped, or is busy.");
  }
  if (response.status === 304 && cached) return cached.data;
  if (response.status === 401) throw new RequestError(await response.text());
  const data = await response.json().catch(() => ({})); // a room that is not installed
  if (!response.ok) throw new RequestError(data.error ?? `Status ${response.status}`, response.status);
  const tag = response.headers.get("etag");
  if (tag) {
    cache.delete(url);
    cache.set(url, { tag, data });
    if (cache.size > MAX_CACHED) cache.delete(cache.keys().next().value);
  }
  return data;
}

const TYPES = {
  f8: Float64Array, f4: Float32Array, i4: Int32Array, u4: Uint32Array, i2: Int16Array,
  u2: Uint16Array, i1: Int8Array, u1: Uint8Array,
};

/** An array of the server, a list or bytes in base 64, as a list. */
export function decodeArray(value) {
  if (Array.isArray(value)) return value;
  if (!value?.bdata) return [];
  const data = Uint8Array.from(atob(value.bdata), (character) => character.charCodeAt(0));
  return Array.from(new TYPES[value.dtype](data.buffer));
}
