"use strict";
// Draws the figures of a report, each when it comes into sight, in the colours that the reader has.
(() => {
  const { figures, colours } = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Set();

  /** A copy of a figure in dark colours: only colours are replaced, never what names say.
   * @param {any} part @param {string} key */
  function recoloured(part, key) {
    if (Array.isArray(part)) return part.map((each) => recoloured(each, key));
    if (part && typeof part === "object") {
      return Object.fromEntries(Object.entries(part).map(([k, v]) => [k, recoloured(v, k)]));
    }
    if (typeof part !== "string") return part;
    if (/color|sequential|diverging/.test(key)) return colours[part] ?? part;
    // text from a run has no "<": this is markup that tensortap itself has made
    if (key === "text") return part.replace(/(<span style="color:)(#[0-9a-f]{6})/g, (_, a, c) => a + (colours[c] ?? c));
    return part;
  }

  /** @param {HTMLElement} place */
  function draw(place) {
    const figure = figures[place.id];
    const { data, layout } = dark.matches ? recoloured(figure, "") : structuredClone(figure);
    drawn.add(place);
    const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
    return Plotly.react(place, data, layout, options);
  }

  const places = [...document.querySelectorAll(".figure")];
  const sight = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      sight.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "600px" });
  places.forEach((place) => sight.observe(place));
  dark.addEventListener("change", () => drawn.forEach(draw));
  addEventListener("beforeprint", () => places.filter((p) => !drawn.has(p)).forEach(draw));

  for (const tabs of document.querySelectorAll(".tabs")) {
    const buttons = [...tabs.querySelectorAll(":scope > .bar > button")];
    const panes = [...tabs.querySelectorAll(":scope > .pane")];
    buttons.forEach((button, chosen) => button.addEventListener("click", () => {
      buttons.forEach((each, i) => each.setAttribute("aria-pressed", String(i === chosen)));
      panes.forEach((pane, i) => { pane.hidden = i !== chosen; });
      panes[chosen].querySelectorAll(".figure").forEach((place) => drawn.has(place) && Plotly.Plots.resize(place));
    }));
  }
})();
