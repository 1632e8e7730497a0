"use strict";
// The committed results of one experiment: points, and what stands behind the chosen one. No kernel is asked.
// fragility_explorer/described.py makes the data.

(() => {
  const SVG = "http://www.w3.org/2000/svg", HEIGHT = 330, EDGE = { left: 62, right: 22, top: 12, bottom: 44 };
  let serial = 0;

  function element(tag, properties = {}, ...children) {
    const made = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name === "value") made.value = value;
      else if (value !== null && value !== false) made.setAttribute(name, value);
    }
    made.append(...children.flat());
    return made;
  }
  function number(x, digits = 3) {
    if (x === null || x === undefined || Number.isNaN(x)) return "–";
    const rounded = Number(x.toPrecision(digits));
    const short = Math.abs(x) >= 1e5 || (x && Math.abs(x) < 1e-4) ? rounded.toExponential().replace("e+", "e") : String(rounded);
    return short.replace(/-/g, "−");
  }
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  function pearson(a, b) {
    const [ma, mb] = [sum(a) / a.length, sum(b) / b.length];
    const [da, db] = [a.map((v) => v - ma), b.map((v) => v - mb)];
    return sum(da.map((v, i) => v * db[i])) / Math.sqrt(sum(da.map((v) => v * v)) * sum(db.map((v) => v * v)));
  }
  function ranks(values) {  // ties share the mean of their ranks
    const order = values.map((_, i) => i).sort((i, j) => values[i] - values[j]), found = [];
    for (let first = 0; first < order.length;) {
      let last = first;
      while (last + 1 < order.length && values[order[last + 1]] === values[order[first]]) last += 1;
      for (let place = first; place <= last; place += 1) found[order[place]] = (first + last) / 2;
      first = last + 1;
    }
    return found;
  }

  // An axis: where a value lies between 0 and 1, and the values that are written.
  function even(low, high) {  // round numbers between both, in equal steps
    const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    return Array.from({ length: 12 }, (_, k) => Number(((Math.ceil(low / step) + k) * step).toPrecision(12))).filter((v) => v <= high);
  }
  function axis(values, log) {
    let low = Math.min(...values), high = Math.max(...values);
    if (low > 0 && (log || high / low > 30)) {
      const at = (v) => (Math.log(v) - a) / (b - a), margin = Math.max(0.03, 0.04 * Math.log(high / low));
      const a = Math.log(low) - margin, b = Math.log(high) + margin, ticks = [];
      if (high / low < 3) return { at, ticks: even(low, high) };
      const factors = high / low < 200 ? [1, 2, 5] : [1];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
        for (const factor of factors) ticks.push(Number(`${factor}e${power}`));
      return { at, ticks: spread(ticks.filter((v) => at(v) >= 0 && at(v) <= 1)) };
    }
    if (low === high) { low -= 0.5; high += 0.5; }
    const margin = 0.05 * (high - low), a = low - margin, b = high + margin;
    return { at: (v) => (v - a) / (b - a), ticks: even(a, b) };
  }
  const spread = (ticks) => { const every = Math.ceil(ticks.length / 6); return ticks.filter((_, i) => i % every === 0); };

  function table(head, rows, caption, marked = -1) {
    return element("div", { class: "rx-scroll", tabindex: 0, role: "region", "aria-label": caption }, element("table", {}, element("caption", {}, caption),
      element("thead", {}, element("tr", {}, head.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, rows.map((row, i) => element("tr", i === marked ? { class: "rx-marked" } : {}, row.map((text, k) =>
        element(k ? "td" : "th", { ...(k ? {} : { scope: "row" }), ...(k && String(text).length > 24 ? { class: "rx-long" } : {}) },
          typeof text === "number" || text === null ? number(text, 4) : text)))))));
  }

  function mount(root) {
    const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    for (const { columns } of data.models)
      for (const [key, { power, of, repeated, counted, rows }] of Object.entries(columns)) {
        if (of) columns[key] = of.map((whole) => (whole === null ? null : Number(`${whole}e${power}`)));
        if (counted) columns[key] = Array.from({ length: rows }, (_, i) => i % counted);
        if (repeated) columns[key] = repeated.flatMap(([value, times]) => Array(times).fill(value));
      }
    const id = `rx${serial++}`, state = { model: 0, chosen: {}, x: null, y: null, point: null, block: 0, token: 0 };
    const part = (name, properties = {}) => element("div", { class: `rx-${name}`, ...properties });
    const tabs = part("tabs", { role: "group", "aria-label": data.of }), verdicts = part("verdicts"), controls = part("controls"), plot = part("plot");
    const told = element("p", { class: "rx-told", "aria-live": "polite" }), walk = part("walk"), values = part("values"), text = part("text"), blocks = part("blocks"), summary = part("summary");
    root.querySelector(".rx-static")?.remove();
    root.append(tabs, verdicts, controls, element("div", { class: "rx-body" }, element("div", {}, plot, told, walk, summary), element("div", {}, values, text, blocks)));

    const model = () => data.models[state.model], column = (key) => model().columns[key];
    const words = (key) => data.words[key] ?? key, about = (key) => data.axes?.[key] ?? {};
    const detail = () => model().details?.[state.point] ?? {}, by = () => detail().by ?? data.blocks;
    const looked = (point) => model().details?.[point] && !model().details[point].by;  // those of one window alone
    function name(point) {
      const window = column("window"), run = model().choices.map((choice) => choice.values[column(choice.key)[point]]);
      return [model().names?.[point] ?? `${data.point} ${window[point]}`, ...run].join(", ");
    }
    const inRun = (point) => model().choices.every(({ key }) => state.chosen[key] === null || state.chosen[key] === column(key)[point]);
    const all = () => column(model().y[0]).map((_, point) => point).filter(inRun);
    const known = () => all().filter((point) => [state.x, state.y].every((key) => column(key)[point] !== null));

    // Whatever is chosen stays chosen where another model or run has it, too.
    function settle() {
      const { x, y, choices } = model();
      if (!x.includes(state.x)) state.x = x[0];
      if (!y.includes(state.y)) state.y = y[0];
      for (const { key, values: possible, first, whole } of choices)
        if (state.chosen[key] === undefined || state.chosen[key] >= possible.length || (state.chosen[key] === null && !whole)) state.chosen[key] = first;
      const found = known().sort((i, j) => column(state.y)[j] - column(state.y)[i]);
      if (!found.includes(state.point)) state.point = found.find(looked) ?? found[0] ?? null;
    }
    function menu(label, options, chosen, choose) {
      const own = `${id}${label.replace(/\W/g, "")}`;
      const select = element("select", { id: own, onchange: () => { choose(select.value); update(); root.querySelector(`#${own}`)?.focus(); } },
        options.map(([value, text]) => element("option", { value, ...(value === chosen ? { selected: "" } : {}) }, text)));
      return element("span", { class: "rx-field" }, element("label", { for: own }, label), select);
    }
    function drawChoices() {
      tabs.replaceChildren(...(data.models.length < 2 ? [] : data.models.map((each, i) => element("button", {
        type: "button", "aria-pressed": i === state.model, onclick: () => {
          const now = known().includes(state.point) && column("window")?.[state.point];
          state.model = i; settle(); select(now); update(); tabs.children[i].focus();
        } }, each.name))));
      const { claims, choices, x, y, note } = model();
      verdicts.replaceChildren(...(claims ? [table(claims.head, claims.rows, `${claims.caption} (${model().name})`)] : []), element("p", { class: "rx-note" }, note ?? ""));
      controls.replaceChildren(
        ...choices.map(({ key, values: possible, whole }) => menu(words(key), [...(whole ? [["all", "all"]] : []), ...possible.map((text, i) => [String(i), text])],
          state.chosen[key] === null ? "all" : String(state.chosen[key]), (value) => { state.chosen[key] = value === "all" ? null : Number(value); settle(); })),
        ...(x.length > 1 ? [menu("across", x.map((key) => [key, words(key)]), state.x, (value) => { state.x = value; settle(); })] : []),
        ...(y.length > 1 ? [menu("upwards", y.map((key) => [key, words(key)]), state.y, (value) => { state.y = value; settle(); })] : []));
    }
    // The same window as before if the run has it.
    function select(window) {
      const same = window !== undefined && window !== false ? known().find((point) => column("window")?.[point] === window) : undefined;
      if (same !== undefined) state.point = same;
    }

    const wide = (part) => Math.max(280, Math.min(520, Math.round(part.clientWidth) || 480));  // letters keep their size
    function drawPlot() {
      const WIDTH = wide(plot);
      const points = known(), [xs, ys] = [state.x, state.y].map((key) => points.map((point) => column(key)[point]));
      if (!points.length) { plot.replaceChildren(element("p", {}, `No ${data.point} of this run has these numbers.`)); told.textContent = ""; return; }
      const both = model().diagonal && about(state.x).alike === about(state.y).alike;
      const X = axis(both ? [...xs, ...ys] : xs, about(state.x).log), Y = axis(both ? [...xs, ...ys] : ys, about(state.y).log);
      const at = (v) => EDGE.left + X.at(v) * (WIDTH - EDGE.left - EDGE.right), up = (v) => HEIGHT - EDGE.bottom - Y.at(v) * (HEIGHT - EDGE.top - EDGE.bottom);
      const label = (x, y, content, properties = {}) => element("svg:text", { x, y, ...properties }, content);
      const grid = [
        ...X.ticks.flatMap((v) => [element("svg:line", { x1: at(v), x2: at(v), y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "rx-grid" }), label(at(v), HEIGHT - EDGE.bottom + 15, number(v), { "text-anchor": "middle" })]),
        ...Y.ticks.flatMap((v) => [element("svg:line", { x1: EDGE.left, x2: WIDTH - EDGE.right, y1: up(v), y2: up(v), class: "rx-grid" }), label(EDGE.left - 6, up(v) + 4, number(v), { "text-anchor": "end" })]),
        label((EDGE.left + WIDTH - EDGE.right) / 2, HEIGHT - 8, words(state.x), { "text-anchor": "middle", class: "rx-axis" }),
        label(-(EDGE.top + HEIGHT - EDGE.bottom) / 2, 13, words(state.y), { "text-anchor": "middle", class: "rx-axis", transform: "rotate(-90)" })];
      if (both) {
        const [low, high] = [Math.min(...xs, ...ys), Math.max(...xs, ...ys)];
        grid.push(element("svg:line", { x1: at(low), y1: up(low), x2: at(high), y2: up(high), class: "rx-diagonal" }));
      }
      if (model().line && points.length > 1) {
        const along = points.map((_, i) => i).sort((i, j) => xs[i] - xs[j]);
        grid.push(element("svg:polyline", { points: along.map((i) => `${at(xs[i])},${up(ys[i])}`).join(" "), class: "rx-line" }));
      }
      const dots = points.map((point, i) => element("svg:circle", { cx: at(xs[i]).toFixed(1), cy: up(ys[i]).toFixed(1), r: point === state.point ? 6 : points.length > 300 ? 2.2 : 3.6,
        class: `rx-dot${looked(point) ? " rx-looked" : ""}${point === state.point ? " rx-chosen" : ""}`, "data-point": point }));
      dots.sort((a, b) => a.classList.contains("rx-chosen") - b.classList.contains("rx-chosen"));
      const tags = [], taken = [], order = points.map((_, i) => i).sort((i, j) => (points[j] === state.point) - (points[i] === state.point));
      for (const i of model().names ? order.filter((i) => points.length < 9 || points[i] === state.point) : []) {
        const [x, y] = [at(xs[i]), up(ys[i])], end = X.at(xs[i]) > 0.6;
        if (taken.some(([a, b]) => Math.abs(b - y) < 14 && Math.abs(a - x) < 90)) continue;  // two names would lie on each other
        taken.push([x, y]);
        tags.push(label(x + (end ? -8 : 8), y - 6, model().names[points[i]], { "text-anchor": end ? "end" : "start" }));
      }
      const svg = element("svg:svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${words(state.y)} against ${words(state.x)}, ${points.length} ${data.points}`, onclick: (event) => {
        const box = svg.getBoundingClientRect(), [x, y] = [(event.clientX - box.left) * WIDTH / box.width, (event.clientY - box.top) * HEIGHT / box.height];
        const far = points.map((_, i) => Math.hypot(at(xs[i]) - x, up(ys[i]) - y)), nearest = far.indexOf(Math.min(...far));
        state.point = points[nearest]; update(); walk.querySelector("input").focus();
      } }, grid, dots, tags);
      plot.replaceChildren(svg);
      const overflowed = column("overflow") ? all().filter((point) => column("overflow")[point]).length : 0;
      const alike = points.length > 2 && !model().line && new Set(xs).size > 1 && new Set(ys).size > 1;
      told.textContent = `${points.length} ${points.length === 1 ? data.point : data.points}. ${alike ? `Correlation of both axes: Pearson ${pearson(xs, ys).toFixed(3)}, Spearman ${pearson(ranks(xs), ranks(ys)).toFixed(3)}. ` : ""}`.replace(/-/g, "−")
        + (overflowed ? `${overflowed} overflow and are not shown.` : "") + (both ? " On the dashed line both are equal." : "");
    }

    function drawWalk() {
      const points = known().sort((i, j) => column(state.y)[i] - column(state.y)[j]), own = `${id}point`;
      if (points.length < 2) return walk.replaceChildren();
      const slider = element("input", { id: own, type: "range", min: 0, max: points.length - 1, step: 1, "aria-valuetext": name(state.point), oninput: () => { state.point = points[slider.value]; update(); root.querySelector(`#${own}`).focus(); } });
      slider.value = points.indexOf(state.point);
      const ringed = points.filter(looked), ahead = ringed.find((point) => points.indexOf(point) > points.indexOf(state.point)) ?? ringed[0];
      walk.replaceChildren(element("label", { for: own }, `${data.point}, by ${words(state.y)} `, slider),
        ...(ringed.length > 1 && ringed.length < points.length ? [element("button", { type: "button", onclick: () => { state.point = ahead; update(); walk.querySelector("button").focus(); } }, `next ${data.point} with a ring`)] : []),
        ...(ringed.length && ringed.length < points.length ? [element("p", { class: "rx-note" }, data.ringed)] : []));
    }
    function drawValues() {
      const hidden = new Set([...model().choices.map(({ key }) => key), "window", "overflow"]);
      const rows = Object.keys(model().columns).filter((key) => !hidden.has(key)).map((key) => [words(key), column(key)[state.point]]);
      const title = name(state.point), heading = element("h3", { "aria-live": "polite" }, model().names ? title : title[0].toUpperCase() + title.slice(1));
      values.replaceChildren(heading, table(["quantity", "value"], rows, "Its numbers"));
      const key = model().choices.map((choice) => state.chosen[choice.key] ?? "").join("|"), found = model().summaries?.[key];
      summary.replaceChildren(...(found ? [table(found.head, found.rows, found.caption, found.keys?.indexOf(state.x) ?? -1)] : []));
    }

    const level = (digit) => parseInt(digit, 36), error = (digit) => data.scale[0] * (data.scale[1] / data.scale[0]) ** (level(digit) / 35);
    function drawText() {
      const { tokens, text: key } = detail();
      if (!tokens) {
        const run = ["length", "seed"].map((name) => model().choices.find((choice) => choice.key === name));
        const begins = model().begun && data.begins[data.starts[run.map((choice) => choice.values[column(choice.key)[state.point]].match(/\d+/)[0]).join(" ")][column("window")[state.point]]];
        return text.replaceChildren(...(begins ? [element("h4", {}, "How its text begins"), element("p", { class: "rx-begins" }, `${begins} …`)] : model().place ? [element("p", { class: "rx-note" }, model().place)] : []));
      }
      const row = tokens[Math.min(state.block, tokens.length - 1)], said = data.texts[key];
      state.token = Math.min(state.token, said.length - 1);
      const levels = [...row].map(level), [low, high] = [Math.min(...levels), Math.max(...levels)];
      const visible = (word) => word.replace(/\n/g, "⏎");
      const buttons = said.map((word, i) => element("button", { type: "button", class: "rx-token", "aria-pressed": i === state.token, tabindex: i === state.token ? 0 : -1, "data-token": i, "aria-label": `token ${i}, ${word.trim() || "space"}`,
        style: `--heat: ${Math.round(100 * (levels[i] - low) / Math.max(1, high - low))}%`, onclick: () => go(i) }, visible(word)));
      const go = (i) => { state.token = Math.max(0, Math.min(said.length - 1, i)); drawText(); drawBlocks(); text.querySelector("[aria-pressed=true]").focus(); };
      const line = element("div", { class: "rx-words", role: "group", "aria-label": "Tokens; arrow keys go from one to the next", onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1, Home: -1e6, End: 1e6 }[event.key];
        if (step) { event.preventDefault(); go(state.token + step); }
      } }, buttons);
      text.replaceChildren(element("h4", {}, `Its first ${said.length} tokens, coloured by their error after block ${state.block}`), line,
        element("p", { class: "rx-note" }, `Token ${state.token}, “${visible(said[state.token]).trim() || "space"}”: off by about ${number(100 * error(row[state.token]), 2)} % of its norm. The palest token is off by ${number(100 * error(low.toString(36)), 2)} %, the darkest by ${number(100 * error(high.toString(36)), 2)} %.`));
    }

    function chart(series, labels) {
      const { key, values: own } = series, { log, percent, line } = about(key), width = wide(blocks), height = 96, left = 56, bottom = 18;
      const token = line && detail().tokens ? detail().tokens.map((row) => error(row[state.token])) : null, shown = [...own, ...(token ?? [])].filter((v) => v !== null);
      const scaled = axis(log ? shown.filter((v) => v > 0) : [0, ...shown], log), up = (v) => height - bottom - scaled.at(v) * (height - bottom - 8);
      const step = (width - left - 8) / own.length, at = (i) => left + (i + 0.5) * step, ground = log ? height - bottom : up(0), parts = [];
      const told = (v) => (percent ? `${number(100 * v)} %` : number(v));
      for (const v of [scaled.ticks[0], scaled.ticks.at(-1)]) parts.push(element("svg:line", { x1: left, x2: width - 8, y1: up(v), y2: up(v), class: "rx-grid" }), element("svg:text", { x: left - 5, y: up(v) + 4, "text-anchor": "end" }, told(v)));
      own.forEach((v, i) => { if (v !== null && (!log || v > 0)) parts.push(element("svg:rect", { x: at(i) - 0.4 * step, width: 0.8 * step, y: Math.min(up(v), ground), height: Math.max(1, Math.abs(ground - up(v))), class: i === state.block ? "rx-bar rx-chosen" : "rx-bar" })); });
      if (token) parts.push(element("svg:polyline", { points: token.map((v, i) => `${at(i)},${up(v)}`).join(" "), class: "rx-line" }));
      const every = Math.ceil(own.length / 14);
      if (labels.length < 50) labels.forEach((text, i) => { if (i % every === 0) parts.push(element("svg:text", { x: at(i), y: height - 4, "text-anchor": "middle" }, String(i))); });
      const svg = element("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${words(key)} by ${by()}: ${labels[state.block]}, ${told(own[state.block])}`, onclick: (event) => {
        const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * width / box.width;
        state.block = Math.max(0, Math.min(own.length - 1, Math.floor((x - left) / step))); drawText(); drawBlocks(); blocks.querySelector("input")?.focus();
      } }, parts);
      return element("figure", {}, element("figcaption", {}, `${words(key)}: ${told(own[state.block])}`, ...(token ? [`; the line is the chosen token`] : [])), svg);
    }
    function drawBlocks() {
      const found = Object.entries(detail().blocks ?? {}).map(([key, own]) => ({ key, values: own })), own = `${id}block`;
      if (!found.length) return blocks.replaceChildren();
      const labels = detail().labels ?? found[0].values.map((_, i) => `${data.blocks} ${i}`);
      state.block = Math.min(state.block, labels.length - 1);
      const slider = element("input", { id: own, type: "range", min: 0, max: labels.length - 1, step: 1, "aria-valuetext": labels[state.block], oninput: () => { state.block = Number(slider.value); drawText(); drawBlocks(); root.querySelector(`#${own}`).focus(); } });
      slider.value = state.block;
      blocks.replaceChildren(element("h4", {}, `By ${by()}`), element("label", { for: own }, `${labels[state.block]} `, slider), ...found.map((series) => chart(series, labels)));
    }
    function update() { drawChoices(); drawPlot(); drawWalk(); if (state.point !== null) { drawValues(); drawText(); drawBlocks(); } }

    settle();
    update();
    let before = plot.clientWidth;
    new ResizeObserver(() => { if (plot.clientWidth !== before) { before = plot.clientWidth; drawPlot(); drawBlocks(); } }).observe(root);
  }
  for (const root of document.querySelectorAll(".results-explorer:not([data-live])")) {
    root.setAttribute("data-live", "");
    mount(root);
  }
})();
