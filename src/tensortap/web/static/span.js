// The steps that are zoomed into: the same ones in all figures over steps, and in the address.
import { h } from "./dom.js";
import { on } from "./figure.js";
import { get, listen, set } from "./state.js";

/** What is added to a layout so that it shows these steps. @param {any} layout */
export function spanned(layout) {
  const span = get().span.split(",").map(Number);
  return span.length === 2 && span.every(Number.isFinite) && span[0] < span[1]
    ? { xaxis: { ...layout.xaxis, range: span, autorange: false } } : {};
}

/** What zooms out again; there while something is zoomed into. */
export function spanButton() {
  const button = h("button", { type: "button", hidden: true, onclick: () => set({ span: "" }) }, "All steps");
  listen(() => (button.hidden = !get().span));
  button.hidden = !get().span;
  return button;
}

/** Listens to zooming; a double click goes back. @param {any} plot */
export function listenSpan(plot) {
  on(plot, "plotly_relayout", (/** @type {any} */ e) => {
    if (e["xaxis.autorange"]) set({ span: "" });
    else if (e["xaxis.range[0]"] !== undefined) set({ span: [e["xaxis.range[0]"], e["xaxis.range[1]"]].map((n) => Number(Number(n).toFixed(3))).join(",") });
  });
  on(plot, "plotly_doubleclick", () => set({ span: "" }));
}
