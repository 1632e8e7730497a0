"use strict";
// Pictures that were computed once, one for each setting of the controls, or that a formula computes. No kernel is asked.
// fragility_lessons/drawing.py makes the data: coordinates are shares of the axes, in SIZE steps.

(() => {
  const SIZE = 2000, LEFT = 58, RIGHT = 20, TOP = 8, BOTTOM = 44, CHARACTER = 6.6;
  const DASHES = { "--": "6 4", ":": "1.5 3.5", "-.": "7 3 1.5 3" };
  const PIXELS = 4 / 3;  // a point
  let serial = 0;
  const own = Math.random().toString(36).slice(2);  // a page may have several copies of this script

  function element(tag, properties = {}, ...children) {
    const made = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }
  const colour = (name) => (name === "ink" || name === "muted" ? `var(--sliders-${name})` : name ?? "none");

  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }

  // The outline of a marker of radius r around (x, y).
  const MARKERS = {
    o: (x, y, r) => `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
    s: (x, y, r) => `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
    D: (x, y, r) => `M${x},${y - 1.4 * r}l${1.4 * r},${1.4 * r}l${-1.4 * r},${1.4 * r}l${-1.4 * r},${-1.4 * r}Z`,
    "^": (x, y, r) => `M${x},${y - r}l${r},${2 * r}h${-2 * r}Z`,
    x: (x, y, r) => `M${x - r},${y - r}l${2 * r},${2 * r}m0,${-2 * r}l${-2 * r},${2 * r}`,
    "|": (x, y, r) => `M${x},${y - r}v${2 * r}`,
    _: (x, y, r) => `M${x - r},${y}h${2 * r}`,
    "*": (x, y, r) => `${Array.from({ length: 10 }, (_, k) => {
      const radius = k % 2 ? 0.45 * r : 1.2 * r, angle = (Math.PI * k) / 5;
      return `${k ? "L" : "M"}${(x + radius * Math.sin(angle)).toFixed(1)},${(y - radius * Math.cos(angle)).toFixed(1)}`;
    }).join("")}Z`,
  };
  const radius = (look) => (PIXELS * look.size) / (look.marker === "." ? 4 : 2);
  const marker = (look, x, y) => (MARKERS[look.marker] ?? MARKERS.o)(x, y, radius(look));
  const strokes = (look) => ({ stroke: colour(look.line), "stroke-width": 1.25 * look.width, "stroke-dasharray": DASHES[look.dash], fill: "none", opacity: look.alpha });
  const outlined = (look) => ({ fill: colour(look.fill), stroke: colour(look.edge), "stroke-width": look.edgeWidth, opacity: look.alpha });

  function drawMark(mark, pool, X, Y, width) {
    const part = (given) => (typeof given === "number" ? pool[given] : given);  // pictures share parts
    if ("text" in mark) {
      const [x, y] = mark.at, lines = mark.text.split("\n"), end = X(x) + CHARACTER * Math.max(...lines.map((line) => line.length));
      if (mark.align === "start" && end > width && X(x) < width) return drawMark({ ...mark, align: "end", at: [SIZE, y] }, pool, X, Y, width);
      return [element("svg:text", { x: X(x), y: Y(y) + ({ center: 4 - 7 * (lines.length - 1), bottom: -14 * (lines.length - 1) }[mark.side] ?? 0), "text-anchor": mark.align, style: `fill: ${colour(mark.line)}` },
        ...lines.map((line, k) => element("svg:tspan", { x: X(x), dy: k ? 14 : 0 }, line)))];
    }
    if ("cells" in mark) {
      const fills = part(mark.fills);
      return part(mark.cells).map(([x0, y0, x1, y1], k) => element("svg:rect", {
        x: X(Math.min(x0, x1)), y: Y(Math.max(y0, y1)), width: Math.abs(X(x1) - X(x0)), height: Math.abs(Y(y1) - Y(y0)), fill: fills[k % fills.length], opacity: mark.alpha }));
    }
    const path = (x, y) => x.map((each, k) => `${k ? "L" : "M"}${X(each)},${Y(y[k])}`).join("");
    if ("shapes" in mark)
      return part(mark.shapes).map(([fill, ...parts]) => element("svg:path", { d: parts.map(({ x, y }) => `${path(x, y)}Z`).join(""), fill, stroke: fill, "stroke-width": 0.5, "fill-rule": "evenodd", opacity: mark.alpha }));
    const x = part(mark.x), y = part(mark.y);
    return [
      ...(mark.dash ? [element("svg:path", { d: path(x, y), ...strokes(mark) })] : []),
      ...(mark.marker ? [element("svg:path", { d: x.map((each, k) => marker(mark, X(each), Y(y[k]))).join(""), ...outlined(mark) })] : []),
    ];
  }

  // Ticks whose labels would run into one another are left out.
  function roomy(ticks, place) {
    let end = -Infinity;
    return ticks.filter(([at, text]) => {
      const half = (CHARACTER * Math.max(...text.split("\n").map((line) => line.length))) / 2;
      if (place(at) - half < end) return false;
      end = place(at) + half + 3;
      return true;
    });
  }

  function drawAxes(frame, X, Y, width, height) {
    const lines = Math.max(1, ...frame.x.ticks.map(([, text]) => text.split("\n").length));
    const text = (x, y, align, words, shade, ink) => element("svg:text", { x, y, "text-anchor": align, style: ink ? `fill: ${ink}` : null },
      ...words.split("\n").map((line, k) => element("svg:tspan", { x, dy: k ? 14 : 0 }, line)));
    const shaded = ([at, words, shade, ink]) => shade ? [element("svg:rect", { x: X(at) - width / frame.x.ticks.length / 2.1, y: Y(0) + 5, width: width / frame.x.ticks.length / 1.05, height: 14 * lines + 3, fill: shade }),
      text(X(at), Y(0) + 18, "middle", words, shade, ink)] : [text(X(at), Y(0) + 18, "middle", words)];
    const xTicks = frame.x.ticks.some(([, , shade]) => shade) ? frame.x.ticks : roomy(frame.x.ticks, X);
    return [
      ...(frame.grid ? [...xTicks.map(([at]) => [X(at), X(at), Y(0), Y(SIZE)]), ...frame.y.ticks.map(([at]) => [X(0), X(SIZE), Y(at), Y(at)])]
        .map(([x1, x2, y1, y2]) => element("svg:line", { x1, x2, y1, y2, class: "sliders-grid" })) : []),
      ...xTicks.flatMap(shaded), ...frame.y.ticks.map(([at, words]) => text(X(0) - 6, Y(at) + 4, "end", words)),
      text((X(0) + X(SIZE)) / 2, Y(0) + 18 + 14 * lines + 4, "middle", frame.x.label),
      element("svg:text", { transform: `translate(13,${(Y(0) + Y(SIZE)) / 2}) rotate(-90)`, "text-anchor": "middle" }, frame.y.label),
      element("svg:rect", { x: X(0), y: Y(SIZE), width: X(SIZE) - X(0), height: Y(0) - Y(SIZE), class: "sliders-frame" }),
    ];
  }

  function key(look) {
    const drawn = look.line ? [...(look.dash ? [element("svg:path", { d: "M1,7H27", ...strokes(look) })] : []), ...(look.marker ? [element("svg:path", { d: marker(look, 14, 7), ...outlined(look) })] : [])]
      : [element("svg:rect", { x: 4, y: 1, width: 20, height: 12, fill: look.fill, opacity: look.alpha })];
    return element("svg:svg", { width: 28, height: 14, viewBox: "0 0 28 14", "aria-hidden": "true" }, ...drawn);
  }

  // The width that a table of cells needs for the texts in it: a narrow page scrolls it.
  function needed(frame, marks) {
    const texts = marks.filter((mark) => "text" in mark), columns = Math.max(frame.x.ticks.length, new Set(texts.map((mark) => mark.at[0])).size);
    if (!texts.length || !marks.some((mark) => "cells" in mark) || frame.grid) return 0;
    const words = [...texts.map((mark) => mark.text), ...frame.x.ticks.flatMap(([, text]) => text.split("\n"))];
    return columns * (CHARACTER * Math.max(...words.map((word) => word.length)) + 8) + LEFT;
  }

  function drawPanel(frame, marks, pool, room) {
    const head = [element("p", { class: "sliders-title" }, frame.title)];
    if (frame.rows) {
      const table = element("table", {}, element("tbody", {}, ...frame.rows.map((row) => element("tr", {}, ...row.map((text) => element("td", {}, text))))));
      return element("figure", { style: `max-width: ${frame.width}px` }, ...head, table);
    }
    const bare = frame.bare, outer = Math.max(Math.min(0.96 * frame.width, room), needed(frame, marks)), lines = Math.max(1, ...frame.x.ticks.map(([, text]) => text.split("\n").length));
    const left = bare ? 4 : frame.y.ticks.length || frame.y.label ? LEFT : 8, below = bare ? 4 : BOTTOM + 14 * (lines - 1) - (frame.x.label ? 0 : 16);
    const inner = outer - left - (bare ? 4 : RIGHT), height = frame.square ? (frame.height * inner) / (frame.width - 1.1 * 96) : Math.min(frame.height, Math.max(0.62 * inner, 230));
    const number = (v) => Math.round(10 * v) / 10, X = (v) => number(left + (inner * v) / SIZE), Y = (v) => number(TOP + height - (height * v) / SIZE);
    const clip = `clip-${own}-${serial++}`, shape = (id, more) => element("svg:clipPath", { id }, element("svg:rect", { x: left - more, y: TOP - more, width: inner + 2 * more, height: height + 2 * more }));
    const isText = (mark) => "text" in mark;
    const svg = element("svg:svg", { width: outer, height: height + TOP + below, role: "img", "aria-label": frame.alt },
      shape(clip, 0), shape(`${clip}-markers`, 6),
      ...(bare ? [] : drawAxes(frame, X, Y, inner, height)),
      ...marks.filter((mark) => !isText(mark)).map((mark) => element("svg:g", { "clip-path": `url(#${clip}${mark.marker ? "-markers" : ""})` }, ...drawMark(mark, pool, X, Y))),
      ...marks.filter(isText).flatMap((mark) => drawMark(mark, pool, X, Y, outer)));
    const legend = (frame.legend ?? []).map(([look, text]) => element("li", {}, key(look), text));
    const wide = outer > room ? { class: "sliders-scroll", tabindex: "0", role: "group", "aria-label": frame.title } : {};
    return element("figure", { style: `width: ${Math.min(outer, room)}px` }, ...head,
      ...(legend.length ? [element("ul", { class: "sliders-legend" }, ...(frame.scale ? [element("li", {}, frame.scale)] : []), ...legend)] : []), element("div", wide, svg),
      ...(outer > room ? [element("p", { class: "sliders-more" }, "The table goes on: scroll it sideways.")] : []));
  }

  const KEYS = { "data-lm-suppress-shortcuts": "true" };  // else JupyterLab takes the arrow keys of what has the focus

  function control(given, id, changed) {
    const label = element("label", { for: id }, given.label);
    if (given.kind === "menu")
      return [label, element("select", { id, ...KEYS, onchange: (event) => changed(event.target.selectedIndex) },
        ...given.values.map((text, k) => element("option", k === given.start ? { selected: "" } : {}, text)))];
    if (given.kind === "buttons") {
      const made = given.values.map((text, k) => element("button", { type: "button", ...KEYS, "aria-pressed": String(k === given.start), onclick: () => {
        made.forEach((button, other) => button.setAttribute("aria-pressed", String(other === k)));
        changed(k);
      } }, text));
      return [element("span", { id }, given.label), element("div", { class: "sliders-buttons", role: "group", "aria-labelledby": id }, ...made)];
    }
    const shown = element("output", { for: id }, given.values[given.start]);
    return [label, element("span", { class: "sliders-range" }, element("input", {
      id, ...KEYS, type: "range", min: 0, max: given.values.length - 1, step: 1, value: given.start, "aria-valuetext": given.values[given.start],
      oninput: (event) => {
        shown.textContent = given.values[event.target.value];
        event.target.setAttribute("aria-valuetext", shown.textContent);
        changed(Number(event.target.value));
      } }), shown)];
  }

  async function mount(root) {
    const { controls, pool, pictures, formula, data } = await unpacked(root.querySelector("script[type='text/plain']").textContent);
    const id = `sliders-${own}-${serial++}`, places = controls.map((each) => each.start), row = element("div", { class: "sliders-row" });
    const told = element("p", { class: "readout", "aria-live": "polite" });
    const drawn = pictures.map(([words, ...panels]) => [words, ...panels.map(([frame, ...marks]) => [pool[frame], ...marks.map((mark) => pool[mark])])]);
    const computed = () => globalThis.slidersFormulas[formula](data, Object.fromEntries(controls.map((each, k) => [each.name, each.given[places[k]]])), drawn[0].slice(1));
    function draw() {
      const index = places.reduce((sum, place, k) => sum * controls[k].values.length + place, 0), [words, ...panels] = formula ? computed() : drawn[index];
      const room = Math.max(200, row.clientWidth || 460);
      row.replaceChildren(...panels.map(([frame, ...marks]) => drawPanel(frame, marks, pool, room)));
      told.textContent = words;
      root.dataset.picture = index;
    }
    const fields = element("div", { class: "sliders-controls" }, ...controls.flatMap((each, k) => control(each, `${id}-${k}`, (place) => { places[k] = place; draw(); })));
    root.querySelector(".sliders-static").remove();
    root.append(fields, row, told);
    draw();
    let width = row.clientWidth;
    new ResizeObserver(() => { if (row.clientWidth !== width) { width = row.clientWidth; draw(); } }).observe(row);
  }
  for (const word of document.querySelectorAll("abbr[title]:not([tabindex])")) word.tabIndex = 0;
  if (typeof DecompressionStream === "undefined") return;  // an old browser: the first picture stays
  for (const root of document.querySelectorAll(".sliders:not([data-live])")) {
    root.setAttribute("data-live", "");
    mount(root);
  }
})();
