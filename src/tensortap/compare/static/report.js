"use strict";
// Text from runs enters the page as text nodes, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const NONE = 0, SAME = 1, CLOSE = 2, ONLY_B = 104, ONLY_A = 105, EXPECTED = 106, DIFFERS = 110;
  const ROW = 18, HEAD = 22, dark = matchMedia("(prefers-color-scheme: dark)");

  function add(parent, tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined && text !== null) made.textContent = text;
    if (className) made.className = className;
    parent.append(made);
    return made;
  }
  const count = (n) => n.toLocaleString("en");
  function figure(x) {
    if (typeof x !== "number") return x === "Infinity" ? "∞" : x === "-Infinity" ? "-∞" : String(x);
    if (Number.isInteger(x) && Math.abs(x) < 1e15) return count(x);
    return Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5 ? String(Number(x.toPrecision(5))) : x.toExponential(2);
  }
  const rankOf = (d) => (d.rank < 0 ? "all ranks" : `rank ${d.rank}`);
  const placeOf = (d) => `step ${d.step}${d.call ? ` call ${d.call}` : ""} · ${rankOf(d)}`;
  function bytes(text) {
    const raw = atob(text), found = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
    return found;
  }

  // -- colors ------------------------------------------------------------------------------
  const mix = (stops, t) => {
    const at = Math.min(0.9999, Math.max(0, t)) * (stops.length - 1), i = Math.floor(at), f = at - i;
    return stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * f));
  };
  const css = (c) => `rgb(${c[0]} ${c[1]} ${c[2]})`;
  const ramps = () => dark.matches
    ? { same: [24, 58, 44], close: [[29, 72, 56], [70, 110, 72]], bad: [[122, 92, 26], [214, 140, 38], [240, 84, 54], [255, 92, 158]],
        zero: [18, 22, 28], plus: [[18, 22, 28], [150, 54, 40], [255, 176, 120]], minus: [[18, 22, 28], [36, 84, 160], [140, 205, 255]],
        odd: [232, 70, 232], a: [92, 122, 200], b: [156, 110, 200], expected: [96, 102, 112] }
    : { same: [211, 239, 222], close: [[197, 232, 206], [214, 232, 160]], bad: [[255, 224, 130], [250, 160, 60], [222, 62, 44], [134, 12, 72]],
        zero: [250, 250, 251], plus: [[250, 250, 251], [240, 140, 108], [150, 16, 32]], minus: [[250, 250, 251], [112, 164, 226], [16, 52, 138]],
        odd: [214, 30, 214], a: [126, 154, 232], b: [186, 146, 232], expected: [190, 196, 206] };
  let ramp = ramps();
  function color(code) {
    if (code >= DIFFERS) return css(mix(ramp.bad, (code - DIFFERS) / 100));
    if (code === EXPECTED) return css(ramp.expected);
    if (code === ONLY_A) return css(ramp.a);
    if (code === ONLY_B) return css(ramp.b);
    if (code >= CLOSE) return css(mix(ramp.close, (code - CLOSE) / 100));
    return code === SAME ? css(ramp.same) : null;
  }
  const sizeOf = (level) => 10 ** (data.decades[0] + (level / 99) * (data.decades[1] - data.decades[0]));
  function said(code) {
    if (code >= DIFFERS) return code === DIFFERS + 100 ? "differs, no relative measure" : `differs, relative ≈ ${sizeOf(code - DIFFERS).toExponential(0)}`;
    if (code === EXPECTED) return "differs, as expected";
    if (code === ONLY_A) return "only in the first";
    if (code === ONLY_B) return "only in the second";
    if (code >= CLOSE) return code === CLOSE ? "agrees, but not bit for bit" : `agrees, relative ≈ ${sizeOf(code - CLOSE).toExponential(0)}`;
    return code === SAME ? "the same" : "no record";
  }

  // -- head ---------------------------------------------------------------------------------
  const counts = data.counts;
  document.title = `${data.agree ? "agree" : "differ"} · tensortap compare`;
  $("verdict").textContent = data.agree ? "✓ The runs agree" : "✗ The runs differ";
  $("verdict").className = data.agree ? "agree" : "differ";
  for (const [letter, title] of [["A", data.a], ["B", data.b]]) {
    add($("sides"), "span", letter, "tag");
    add($("sides"), "span", title, "mono");
  }
  for (const [label, value, className, always] of [
    ["records compared", counts.compared, "", true],
    ["equal bytes", counts.same],
    ["differ", counts.differ, counts.differ > counts.expected ? "bad" : "", true],
    ["of them expected", counts.expected],
    ["only in A", counts.only_a, data.allow_missing ? "" : "warn"],
    ["only in B", counts.only_b, data.allow_missing ? "" : "warn"],
    ["by statistics only", counts.by_statistics],
    ["ignored", counts.ignored],
  ]) {
    if (!value && !always) continue;
    const card = add($("counts"), "div", null, className);
    add(card, "dt", label);
    add(card, "dd", count(value));
  }
  if (data.first !== null) {
    const first = data.differences[data.first], box = $("first");
    box.hidden = false;
    add(box, "h2", "First difference");
    add(box, "div", first.name, "name");
    add(box, "div", `${first.kind} · ${placeOf(first)} · ${line(first)}`, "dim");
    if (data.culprit) add(box, "div", data.culprit);
    for (const why of first.why) add(box, "span", why, "why");
    box.onclick = () => show(data.first);
  }
  for (const text of [data.bitwise, data.tolerance]) {
    if (!text) continue;
    $("first").hidden = false;
    add($("first"), "div", text, "dim");
  }
  if (data.provenance.length) {
    const box = $("provenance"), table = box.querySelector("table");
    box.hidden = false;
    box.open = data.provenance.length <= 8;
    box.querySelector("summary").textContent = `${count(data.provenance.length)} ${data.provenance.length === 1 ? "difference" : "differences"} in the environment`;
    const head = add(table, "tr");
    for (const text of ["", "A", "B"]) add(head, "th", text);
    for (const [what, a, b] of data.provenance) {
      const row = add(table, "tr");
      add(row, "td", what);
      add(row, "td", a, "mono");
      add(row, "td", b, "mono");
    }
  }
  function line(d) {
    const f = d.figures, told = [];
    if (f.reason) told.push(f.reason);
    if (f.max_abs) told.push(`max|Δ| ${figure(f.max_abs)}`);
    if (f.rel_l2) told.push(`relative ${figure(f.rel_l2)}`);
    if (d.by !== "value") told.push(`by ${d.by}`);
    return told.join(", ");
  }

  // -- filters ------------------------------------------------------------------------------
  const cells = bytes(data.cells), width = data.steps.length;
  const allKinds = [...new Set(data.kinds)];
  const allRanks = [...new Set(data.differences.map((d) => d.rank))].sort((x, y) => x - y);
  const filter = { kinds: new Set(allKinds), rank: null, text: "", differing: false };
  const bar = $("filters");
  if (allKinds.length > 1) {
    for (const kind of allKinds) {
      const button = add(bar, "button", kind.replace("_", " "));
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.onclick = () => {
        if (filter.kinds.has(kind)) filter.kinds.delete(kind);
        else filter.kinds.add(kind);
        button.setAttribute("aria-pressed", String(filter.kinds.has(kind)));
        apply();
      };
    }
  }
  if (allRanks.length > 1) {
    const select = add(bar, "select");
    select.setAttribute("aria-label", "rank");
    add(select, "option", "any rank").value = "";
    for (const rank of allRanks) add(select, "option", rank < 0 ? "put together" : `rank ${rank}`).value = rank;
    select.onchange = () => { filter.rank = select.value === "" ? null : Number(select.value); apply(); };
  }
  if (data.names.length > 12) {
    const search = add(bar, "input");
    search.type = "search";
    search.placeholder = "name contains …";
    search.oninput = () => { filter.text = search.value.toLowerCase(); apply(); };
  }
  if (counts.differ || counts.only_a || counts.only_b) {
    const label = add(bar, "label"), box = add(label, "input");
    box.type = "checkbox";
    label.append(" only what differs");
    box.onchange = () => { filter.differing = box.checked; apply(); };
  }
  function columnOf(step) {
    let low = 0, high = width - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (data.steps[middle] <= step) low = middle; else high = middle - 1;
    }
    return low;
  }
  let rows = [], drawn = cells, shown = [];
  const inCell = new Map();
  function apply() {
    shown = data.differences.map((_, i) => i).filter((i) => {
      const d = data.differences[i];
      return filter.kinds.has(d.kind) && (filter.rank === null || d.rank === filter.rank)
        && d.name.toLowerCase().includes(filter.text);
    });
    inCell.clear();
    for (const i of shown) {
      const d = data.differences[i], at = d.row * width + columnOf(d.step);
      if (d.row < 0) continue;
      if (!inCell.has(at)) inCell.set(at, []);
      inCell.get(at).push(i);
    }
    if (filter.rank === null) drawn = cells;
    else {
      // only the differences of this rank; other ranks show as agreeing
      drawn = cells.map((code) => (code >= EXPECTED ? CLOSE : code));
      for (const [at, list] of inCell) {
        for (const i of list) {
          const d = data.differences[i];
          drawn[at] = Math.max(drawn[at], d.expected ? EXPECTED : DIFFERS + d.level);
        }
      }
    }
    rows = [];
    for (let r = 0; r < data.names.length; r++) {
      if (!filter.kinds.has(data.kinds[r]) || !data.names[r].toLowerCase().includes(filter.text)) continue;
      if (filter.differing && !drawn.subarray(r * width, (r + 1) * width).some((code) => code >= ONLY_B)) continue;
      rows.push(r);
    }
    layout();
    fillList(true);
  }

  // -- the timeline: draws only what is in view --------------------------------------------
  const view = $("view"), room = $("room"), canvas = $("cells"), pen = canvas.getContext("2d");
  let label = 200, cell = 10, chosen = null;
  function layout() {
    room.style.height = `${HEAD + rows.length * ROW}px`; // first: a scroll bar takes room
    pen.font = "12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
    const widest = rows.slice(0, 3000).reduce((w, r) => Math.max(w, pen.measureText(data.names[r].slice(-46)).width), 60);
    label = Math.min(Math.ceil(widest) + 34, 0.5 * view.clientWidth);
    cell = Math.max(4, Math.min(40, Math.floor((view.clientWidth - label - 8) / Math.max(1, width))));
    room.style.width = `${label + width * cell + 8}px`;
    draw();
  }
  const letters = { Activation: "A", Gradient: "G", Weight: "W", Weight_Gradient: "∂W", Optimiser_State: "S", Metric: "M", Local: "L", Op: "O", Value: "V", Alert: "!" };
  function draw() {
    const scale = devicePixelRatio || 1, w = view.clientWidth;
    const h = Math.min(760, Math.max(60, HEAD + rows.length * ROW));
    canvas.width = w * scale; canvas.height = h * scale;
    canvas.style.width = `${w}px`; canvas.style.height = `${h}px`;
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink"), dim = style.getPropertyValue("--dim"), card = style.getPropertyValue("--card");
    const accent = style.getPropertyValue("--accent");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.fillStyle = card; pen.fillRect(0, 0, w, h);
    pen.textBaseline = "middle";
    const top = view.scrollTop, left = view.scrollLeft, gap = cell > 6 ? 1 : 0;
    const r0 = Math.floor(top / ROW), r1 = Math.min(rows.length, Math.ceil((top + h) / ROW));
    const c0 = Math.max(0, Math.floor(left / cell)), c1 = Math.min(width, Math.ceil((left + w - label) / cell));
    for (let i = r0; i < r1; i++) {
      const y = HEAD + i * ROW - top, r = rows[i];
      for (let c = c0; c < c1; c++) {
        const code = drawn[r * width + c], fill = color(code), x = label + c * cell - left;
        if (!fill) continue;
        pen.fillStyle = fill;
        pen.fillRect(x, y + 1, cell - gap, ROW - 2);
        if (code === ONLY_A || code === ONLY_B) {
          pen.strokeStyle = card; pen.lineWidth = 1.4;
          pen.beginPath(); pen.moveTo(x, y + ROW - 2); pen.lineTo(x + cell - gap, y + 2); pen.stroke();
        }
        if (chosen && chosen[0] === r && chosen[1] === c) {
          pen.strokeStyle = accent; pen.lineWidth = 2;
          pen.strokeRect(x - 0.5, y + 0.5, cell, ROW - 1);
        }
      }
    }
    pen.fillStyle = card; pen.fillRect(0, 0, label, h);
    for (let i = r0; i < r1; i++) {
      const y = HEAD + i * ROW - top + ROW / 2, name = data.names[rows[i]];
      pen.font = "10px system-ui, sans-serif"; pen.fillStyle = dim;
      pen.textAlign = "left"; pen.fillText(letters[data.kinds[rows[i]]] || "", 6, y);
      pen.font = "12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
      pen.fillStyle = chosen && chosen[0] === rows[i] ? accent : ink;
      pen.textAlign = "right"; pen.fillText(fitted(name, label - 34), label - 8, y);
    }
    pen.fillStyle = card; pen.fillRect(0, 0, w, HEAD);
    pen.font = "11px system-ui, sans-serif"; pen.fillStyle = dim;
    pen.textAlign = "right"; pen.fillText(data.bucket > 1 ? `steps, ${data.bucket} a column` : "step", label - 8, HEAD / 2);
    pen.textAlign = "center";
    const least = Math.max(1, Math.ceil(44 / cell)), power = 10 ** Math.floor(Math.log10(least));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
    for (let c = c0; c < c1; c++) {
      const x = label + c * cell + cell / 2 - left;
      if (c % every === 0 && x > label + 4) pen.fillText(String(data.steps[c]), x, HEAD / 2);
    }
    if (!rows.length) { pen.textAlign = "left"; pen.fillText("nothing to show", 12, HEAD + 16); }
  }
  function fitted(name, space) {
    if (pen.measureText(name).width <= space) return name;
    let n = Math.max(3, Math.floor(space / 7.3) - 1);
    return `…${name.slice(-n)}`;
  }
  function under(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const row = rows[Math.floor((y - HEAD + view.scrollTop) / ROW)];
    const column = Math.floor((x - label + view.scrollLeft) / cell);
    if (y < HEAD || row === undefined) return null;
    return [row, x < label || column >= width ? -1 : column];
  }
  const tip = $("tip");
  function showTip(event, text) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - box.height - 8)}px`;
  }
  canvas.onmousemove = (event) => {
    const at = under(event);
    if (!at) { tip.hidden = true; return; }
    const name = `${data.names[at[0]]} · ${data.kinds[at[0]]}`;
    const code = at[1] < 0 ? NONE : drawn[at[0] * width + at[1]];
    showTip(event, at[1] < 0 ? name : `${name} · step ${data.steps[at[1]]}: ${said(code)}`);
  };
  canvas.onmouseleave = () => { tip.hidden = true; };
  canvas.onclick = (event) => {
    const at = under(event);
    if (!at || at[1] < 0) return;
    const list = inCell.get(at[0] * width + at[1]);
    if (list) open(list[0]);
    else calm(at);
  };
  view.onscroll = draw;
  addEventListener("resize", layout);
  dark.addEventListener("change", () => { ramp = ramps(); legend(); draw(); if (current !== null) open(current); });

  function legend() {
    const box = $("legend");
    box.replaceChildren();
    const one = (text, background, className) => {
      const span = add(box, "span"), mark = add(span, "i", null, className);
      mark.style.background = background;
      span.append(text);
    };
    const codes = new Set(cells);
    if (codes.has(SAME)) one("the same", css(ramp.same));
    if ([...codes].some((c) => c >= CLOSE && c < ONLY_B)) one("agrees within the tolerance", css(mix(ramp.close, 0.5)));
    if ([...codes].some((c) => c >= DIFFERS)) {
      const stops = ramp.bad.map(css).join(", ");
      one(`differs, relative 1e${data.decades[0]} or less to 1e+${data.decades[1]} or more`, `linear-gradient(90deg, ${stops})`, "ramp");
    }
    if (codes.has(EXPECTED)) one("as expected", css(ramp.expected));
    if (codes.has(ONLY_A)) one("only in A", css(ramp.a));
    if (codes.has(ONLY_B)) one("only in B", css(ramp.b));
    if (data.left_out) add(box, "span", `${count(data.left_out)} more rows not shown`);
  }

  // -- details ------------------------------------------------------------------------------
  const LABELS = [
    ["max_abs", "max |Δ|"], ["mean_abs", "mean |Δ|"], ["max_rel", "max relative"], ["mean_rel", "mean relative"],
    ["rel_l2", "‖Δ‖ / ‖b‖"], ["cosine", "cosine"], ["ulps", "ulps"], ["mismatches", "differing elements"],
    ["nonfinite", "not finite in one run"], ["count", "elements"], ["passing_atol", "atol that would pass"],
    ["passing_rtol", "rtol that would pass"],
  ];
  let current = null;
  function calm(at) {
    current = null;
    chosen = at;
    history.replaceState(null, "", "#");
    const box = $("detail");
    box.replaceChildren();
    add(box, "h3", data.names[at[0]]);
    add(box, "div", `${data.kinds[at[0]]} · step ${data.steps[at[1]]}`, "dim");
    const code = drawn[at[0] * width + at[1]], beyond = code >= DIFFERS && data.differences.length < counts.differ;
    add(box, "p", said(code) + (beyond ? "; it is not among the differences that this file has details of" : ""));
    draw();
  }
  function open(number, scroll) {
    const d = data.differences[number], box = $("detail");
    if (!d) return;
    current = number;
    chosen = d.row < 0 ? null : [d.row, columnOf(d.step)];
    history.replaceState(null, "", `#d=${number}`);
    box.replaceChildren();
    const steer = add(box, "div", null, "steer"), at = shown.indexOf(number);
    for (const [text, to, title] of [["←", shown[at - 1], "previous difference"], ["→", shown[at + 1], "next difference"]]) {
      const button = add(steer, "button", text);
      button.type = "button"; button.title = title; button.disabled = to === undefined || at < 0;
      button.onclick = () => open(to);
    }
    add(steer, "span", `difference ${count(number + 1)} of ${count(counts.differ)}`, "dim");
    add(box, "h3", d.name);
    add(box, "div", `${d.kind} · ${placeOf(d)}${d.by === "value" ? "" : ` · by ${d.by} only`}`, "dim");
    const mates = chosen ? inCell.get(chosen[0] * width + chosen[1]) || [] : [];
    if (mates.length > 1) {
      const row = add(box, "div", null, "steer");
      row.style.marginTop = "8px";
      for (const mate of mates.slice(0, 16)) {
        const other = data.differences[mate];
        const button = add(row, "button", placeOf(other).replace(`step ${d.step} · `, ""));
        button.type = "button";
        button.setAttribute("aria-pressed", String(mate === number));
        button.onclick = () => open(mate);
      }
      if (mates.length > 16) add(row, "span", `… ${count(mates.length - 16)} more`, "dim");
    }
    for (const why of d.why) add(box, "span", why, "why");
    if (d.expected) add(box, "p", `expected: ${d.expected}`);
    if (d.rule) add(box, "p", `judged by ${d.rule}`, "dim");
    const f = d.figures;
    if (f.reason) add(box, "p", f.reason);
    for (const text of [...d.notes, ...d.parts]) add(box, "div", text, "dim");
    tensors(box, number, f);
    const table = add(box, "table");
    const entry = (name, text) => { const row = add(table, "tr"); add(row, "td", name); add(row, "td", text); };
    if (f.worst && f.values) {
      entry(f.worst.length ? `worst element, [${f.worst.join(", ")}]` : "values", `${short(f.values[0])} and ${short(f.values[1])}`);
    }
    for (const [key, name] of LABELS) {
      if (f[key] === undefined || (key === "nonfinite" && !f[key])) continue;
      if (d.by !== "value" && !["max_abs", "max_rel", "count"].includes(key)) continue;
      entry(name, key === "mismatches" ? `${count(f[key])} (${(100 * f.share).toPrecision(3)} %)` : key === "cosine" && typeof f[key] === "number" ? f[key].toPrecision(8) : figure(f[key]));
    }
    if (f.shapes) entry("shape", f.shapes[0].join() === f.shapes[1].join() ? `[${f.shapes[0].join(", ")}]` : `[${f.shapes[0].join(", ")}] and [${f.shapes[1].join(", ")}]`);
    if (f.dtypes) entry("dtype", f.dtypes[0] === f.dtypes[1] ? f.dtypes[0] : `${f.dtypes[0]} and ${f.dtypes[1]}`);
    draw();
    for (const row of document.querySelectorAll("#list tbody tr")) row.setAttribute("aria-selected", String(row.dataset.number === String(number)));
    if (scroll) reveal(d.row);
  }
  const short = (text) => { const x = Number(text); return text !== "" && Number.isFinite(x) ? String(Number(x.toPrecision(7))) : text; };
  function reveal(row) {
    const at = rows.indexOf(row);
    if (at >= 0) view.scrollTop = Math.max(0, at * ROW - view.clientHeight / 2);
    const x = chosen ? chosen[1] * cell : 0, space = view.clientWidth - label;
    if (x < view.scrollLeft || x > view.scrollLeft + space - cell) view.scrollLeft = Math.max(0, x - space / 2);
  }
  function show(number) {
    open(number, true);
    $("timeline").scrollIntoView({ block: "start" });
  }
  function tensors(box, number, f) {
    const found = data.pictures[number];
    if (!found) return;
    const grid = add(box, "div", null, "tensors");
    for (const [key, title, scale] of [["a", "A", found.scale], ["b", "B", found.scale], ["d", "A − B", found.scale_d]]) {
      if (!found[key]) continue;
      const { rows: h, columns: w } = found[key], raw = new Int8Array(bytes(found[key].cells).buffer);
      const frame = add(grid, "figure");
      add(frame, "figcaption", `${title}, ±${figure(scale)}`);
      const picture = add(frame, "canvas"), paint = picture.getContext("2d");
      picture.width = w; picture.height = h;
      picture.style.aspectRatio = `${w} / ${Math.min(Math.max(h, w / 8), w * 2)}`;
      const image = paint.createImageData(w, h);
      for (let i = 0; i < raw.length; i++) {
        const code = raw[i], t = Math.sqrt(Math.abs(code) / 127);
        const c = code === -128 ? ramp.odd : code === 0 ? ramp.zero : mix(code > 0 ? ramp.plus : ramp.minus, t);
        image.data.set([c[0], c[1], c[2], 255], 4 * i);
      }
      paint.putImageData(image, 0, 0);
      const shape = f.shapes ? f.shapes[key === "b" ? 1 : 0] : [];
      const size = shape.reduce((x, y) => x * y, 1), block = size > raw.length;
      picture.onmousemove = (event) => {
        const r = picture.getBoundingClientRect();
        const x = Math.min(w - 1, Math.max(0, Math.floor(((event.clientX - r.left) / r.width) * w)));
        const y = Math.min(h - 1, Math.max(0, Math.floor(((event.clientY - r.top) / r.height) * h)));
        const code = raw[y * w + x], value = code === -128 ? "not finite" : `≈ ${figure(Number(((code / 127) * scale).toPrecision(2)))}`;
        showTip(event, `${title} ${value}${block ? `, the extreme of a block (${h}×${w} blocks of [${shape.join(", ")}])` : ""}`);
      };
      picture.onmouseleave = () => { tip.hidden = true; };
    }
  }

  // -- lists --------------------------------------------------------------------------------
  let listed = 0;
  function fillList(again) {
    const box = $("list"), head = box.querySelector("thead"), body = box.querySelector("tbody");
    if (!data.differences.length) return;
    box.hidden = false;
    if (again) { body.replaceChildren(); head.replaceChildren(); listed = 0; header(head, ["step", "rank", "name", "kind", "max|Δ|", "relative", "cosine", "differ", ""], 7); }
    for (const i of shown.slice(listed, listed + 100)) {
      const d = data.differences[i], f = d.figures, row = add(body, "tr");
      row.dataset.number = i;
      row.setAttribute("aria-selected", String(i === current));
      add(row, "td", d.call ? `${d.step}·${d.call}` : d.step, "n");
      add(row, "td", d.rank < 0 ? "all" : d.rank, "n");
      add(row, "td", d.name, "mono");
      add(row, "td", d.kind, "dim");
      add(row, "td", f.max_abs ? figure(f.max_abs) : "", "n");
      const relative = f.rel_l2 !== undefined ? f.rel_l2 : f.max_rel;
      add(row, "td", relative ? figure(relative) : "", "n");
      add(row, "td", f.cosine !== undefined && f.count > 1 ? figure(f.cosine) : "", "n");
      add(row, "td", f.mismatches ? `${(100 * f.share).toPrecision(3)} %` : "", "n");
      add(row, "td", [...d.why, d.expected ? `expected: ${d.expected}` : "", f.mismatches && !f.nonfinite ? "" : f.reason].filter(Boolean).join(", "));
      row.onclick = () => show(i);
    }
    listed = Math.min(shown.length, listed + 100);
    const more = $("more"), rest = counts.differ - data.differences.length;
    more.hidden = listed >= shown.length;
    more.textContent = `${count(shown.length - listed)} more`;
    more.onclick = () => fillList(false);
    let note = box.querySelector("p");
    if (rest > 0 && !note) add(box, "p", `This file has details of the first ${count(data.differences.length)} differences; the timeline and --json have ${count(rest)} more.`, "dim");
  }
  function header(head, names, numbers) {
    const row = add(head, "tr");
    names.forEach((name, i) => add(row, "th", name, (i < 2 && numbers) || (i > 3 && i <= numbers) ? "n" : ""));
  }
  if (data.missing.length) {
    const box = $("missing"), body = box.querySelector("tbody");
    box.hidden = false;
    if (data.allow_missing) add(box, "p", "Missing records are allowed (--allow-missing).", "dim");
    header(box.querySelector("thead"), ["name", "kind", "records", "steps", "ranks", ""], 0);
    for (const [name, kind, records, steps, ranks, why] of data.missing) {
      const row = add(body, "tr");
      add(row, "td", name, "mono"); add(row, "td", kind, "dim"); add(row, "td", count(records));
      add(row, "td", steps); add(row, "td", ranks.map((r) => (r < 0 ? "all" : r)).join(", ")); add(row, "td", why);
    }
    if (data.gaps > data.missing.length) add(box, "p", `… and ${count(data.gaps - data.missing.length)} more`, "dim");
  }

  // -- start --------------------------------------------------------------------------------
  function fromHash() {
    const found = /^#d=(\d+)$/.exec(location.hash);
    if (found && Number(found[1]) !== current) open(Number(found[1]), true);
  }
  legend();
  apply();
  if (counts.differ === 0) add($("detail"), "p", data.agree ? "Nothing differs. Point at a cell to see how close it is." : "No value differs, but records are missing.", "dim");
  fromHash();
  if (current === null && data.first !== null) open(data.first, true);
  addEventListener("hashchange", fromHash);
  addEventListener("keydown", (event) => {
    if (event.target.closest("input, select") || event.ctrlKey || event.metaKey || current === null) return;
    const move = event.key === "j" ? 1 : event.key === "k" ? -1 : 0, to = shown[shown.indexOf(current) + move];
    if (move && to !== undefined) open(to, true);
  });
})();
