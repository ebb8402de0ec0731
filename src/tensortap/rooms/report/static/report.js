"use strict";
// Draws the figures of a report, each when it comes into view, in the reader's color scheme.
(() => {
  const { figures, colors } = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Set();

  /** Returns a copy of a figure in dark colors. Only colors are replaced, never names. */
  function darkened(part, key) {
    if (Array.isArray(part)) return part.map((each) => darkened(each, key));
    if (part && typeof part === "object") {
      return Object.fromEntries(Object.entries(part).map(([k, v]) => [k, darkened(v, k)]));
    }
    if (typeof part !== "string") return part;
    if (/color|sequential|diverging/.test(key)) return colors[part] ?? part;
    // names are escaped, so a "<" is always markup of tensortap itself
    if (key !== "text") return part;
    return part.replace(/(<span style="color:)(#[0-9a-f]{6})/g, (_, a, c) => a + (colors[c] ?? c));
  }

  function draw(element) {
    const figure = figures[element.id];
    const { data, layout } = dark.matches ? darkened(figure, "") : structuredClone(figure);
    const isNew = !drawn.has(element);
    drawn.add(element);
    const done = Plotly.react(element, data, layout, {
      responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"],
    });
    if (isNew) element.on("plotly_click", ({ points: [point] }) => open(element, point));
    return done;
  }

  /** Unfolds the details of a cell of a heatmap, if there are any. */
  function open(element, { pointNumber }) {
    const found = document.querySelector(`details[data-at="${element.id}:${pointNumber}"]`);
    if (!found) return;
    found.open = true;
    found.scrollIntoView({ block: "center" });
  }

  const elements = [...document.querySelectorAll(".figure")];
  const observer = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      observer.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "600px" });
  elements.forEach((element) => observer.observe(element));
  dark.addEventListener("change", () => drawn.forEach(draw));
  addEventListener("beforeprint", () => elements.filter((e) => !drawn.has(e)).forEach(draw));

  for (const tabs of document.querySelectorAll(".tabs")) {
    const buttons = [...tabs.querySelectorAll(":scope > .bar > button")];
    const panes = [...tabs.querySelectorAll(":scope > .pane")];
    buttons.forEach((button, chosen) => button.addEventListener("click", () => {
      buttons.forEach((each, i) => each.setAttribute("aria-pressed", String(i === chosen)));
      panes.forEach((pane, i) => { pane.hidden = i !== chosen; });
      for (const each of panes[chosen].querySelectorAll(".figure")) {
        if (drawn.has(each)) Plotly.Plots.resize(each);
      }
    }));
  }
})();
