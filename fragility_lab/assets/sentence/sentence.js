(() => {
  "use strict";
  // One script runs for each component: the one that it stands in.
  const root = document.currentScript.closest(".broken-sentence");
  const { texts, model } = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
  const about = { "bf16": "16 bits", "fp8-dynamic": "8-bit floats", "w4a16-g128": "4-bit weights" };
  const state = { text: 0, recipe: null, change: 0 };
  const panel = make("div", { "aria-live": "polite" });
  const body = make("div");

  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "rect", "line", "text", "title"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "onclick") node.addEventListener("click", value);
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  const named = (word) => (/[\n\r]/.test(word) ? "a line break" : word ? "spaces" : "nothing visible");
  const visible = (word) => (/^\s*\uFFFD+\s*$/.test(word) ? "a part of a character" : word.trim() || named(word));
  const joined = (words) => words.join("").replace(/\s*\n\s*/g, " ⏎ ");
  const quoted = (word) => "“" + visible(word) + "”";
  const logits = (x) => Math.abs(x).toFixed(3);  // so that a reader can subtract them
  const current = () => texts[state.text];
  const first = (recipe) => recipe.words.findIndex((word, i) => word !== current().words[i]);

  function choose(recipe, change) {
    Object.assign(state, { recipe, change });
    show();
  }

  function row(name, note, ...words) {
    return [make("div", { class: "bs-name" }, name, make("small", {}, " " + note)), make("div", { class: "bs-said" }, ...words)];
  }

  function continuation(recipe) {
    const start = first(recipe);
    if (start < 0) return [joined(recipe.words)];
    const at = recipe.changed.findIndex((change) => change.word === start);
    const pressed = state.recipe === recipe && state.change === at;
    const word = make("button", { class: "bs-word", type: "button", "data-key": "word-" + recipe.name, "aria-pressed": pressed, onclick: () => choose(recipe, at) });
    word.append(visible(recipe.words[start]));
    const after = make("span", { class: "bs-after" }, joined(recipe.words.slice(start + 1)));
    const gap = recipe.words[start].startsWith(" ") ? " " : "";
    return [joined(recipe.words.slice(0, start)) + gap, word, after];
  }

  function bars(rows, caption) {
    const largest = Math.max(...rows.map((r) => Math.abs(r.adds)), 1e-12);
    const low = Math.min(0, ...rows.map((r) => r.adds)), high = Math.max(0, ...rows.map((r) => r.adds));
    const label = 96, width = 330, height = 14, scale = (width - label - 50) / (high - low || largest);
    const zero = label - low * scale;
    const svg = make("svg", { viewBox: `0 0 ${width} ${rows.length * height + 4}`, role: "img", "aria-label": caption });
    rows.forEach((r, i) => {
      const x = r.adds >= 0 ? zero : zero + r.adds * scale, y = i * height + 2;
      const size = Math.max(Math.abs(r.adds) * scale, 0.5);
      const side = r.adds >= 0 ? "bs-against" : "bs-for";
      const name = /^\d+$/.test(r.name) ? "block " + r.name : r.name;
      const bar = make("rect", { x, y, width: size, height: height - 3, class: side });
      bar.append(make("title", {}, `${name}: ${r.adds.toFixed(3)} logits`));
      svg.append(bar, make("text", { x: 0, y: y + 10 }, name));
      svg.append(make("text", { x: Math.max(x + size, zero) + 4, y: y + 10 }, (Math.abs(r.adds) < 5e-4 ? 0 : r.adds).toFixed(3).replace("-", "−")));
    });
    svg.append(make("line", { x1: zero, x2: zero, y1: 0, y2: rows.length * height + 4 }));
    return make("figure", {}, make("figcaption", {}, caption), svg);
  }

  // The largest parts by size, in the order of the model, and the sum of all others.
  function largest(rows, count) {
    const kept = new Set([...rows].sort((a, b) => Math.abs(b.adds) - Math.abs(a.adds)).slice(0, count));
    const rest = rows.filter((r) => !kept.has(r)).reduce((sum, r) => sum + r.adds, 0);
    const shown = rows.filter((r) => kept.has(r));
    return shown.length < rows.length ? [...shown, { name: "all others", adds: rest }] : shown;
  }

  function explanation(recipe, change) {
    const wanted = quoted(current().words[change.word]), said = quoted(change.said);
    const before = (current().prompt + joined(current().words.slice(0, change.word))).slice(-60);
    const where = make("p", {}, "… " + before.slice(before.indexOf(" ") + 1) + " ", make("b", {}, "?"));
    if (change.fp32 === undefined) {
      return [where, make("p", {}, `fp32 says ${wanted}, ${recipe.name} says ${said}. Its causes were not computed: that is done for the first changed words, where memory holds both passes and numbers neither tie nor overflow.`)];
    }
    const error = change.fp32 - change.low;
    const end = change.low ? `${said} wins by ${logits(change.low)}` : `the two are level: ${said} comes first in the vocabulary`;
    const lead = `In fp32 ${wanted} leads ${said} by ${logits(change.fp32)} logits. In ${recipe.name} all rounding errors together move this lead by ${logits(error)} logits, and ${end}.`;
    const saved = change.saved.length
      ? `Any one of these is enough to keep ${wanted}, if it computes in fp32: ${change.saved.join(", ")}. Each was run.`
      : `Of the ${change.tried} parts whose errors push most against ${wanted}, none alone keeps it by computing in fp32. Each was run.`;
    const charts = make("div", { class: "bs-charts" });
    charts.append(bars(largest(change.blocks, 9), "Error by block, in logits"), bars(largest(change.kinds, 9), "Error by kernel, in logits"));
    const note = make("p", { class: "bs-note" }, `Bars to the right push against ${wanted}, bars to the left for it. They add up to the whole error.`);
    return [where, make("p", {}, lead), make("p", {}, saved), charts, note];
  }

  // What is shown is made anew; the button that was used keeps the focus.
  function show() {
    const used = root.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    render();
    if (used) root.querySelector(`[data-key="${used}"]`)?.focus();
  }

  function render() {
    const text = current();
    const tabs = make("div", { class: "bs-tabs" });
    texts.forEach((each, i) => {
      const label = each.prompt.split(" ").slice(0, 4).join(" ") + " …";
      const onclick = () => { Object.assign(state, { text: i, recipe: null, change: 0 }); show(); };
      tabs.append(make("button", { type: "button", "data-key": "tab-" + i, "aria-pressed": i === state.text, onclick }, label));
    });
    const rows = make("div", { class: "bs-rows" });
    rows.append(...row("fp32", "32 bits", joined(text.words)));
    for (const recipe of text.recipes) rows.append(...row(recipe.name, about[recipe.name] || "", ...continuation(recipe)));
    const broken = text.recipes.filter((recipe) => first(recipe) >= 0);
    const kept = text.recipes.filter((recipe) => first(recipe) < 0).map((recipe) => recipe.name);
    const said = broken.length ? "The marked word is the first that differs. All after it follows from it." : "No format changes a word.";
    const note = `${model} writes ${text.words.length} tokens, each the most probable one. ${said}` + (kept.length ? ` ${kept.join(" and ")}: no change here.` : "");
    if (!state.recipe && broken.length) state.recipe = broken[0];
    const chips = make("div", { class: "bs-chips", role: "group", "aria-label": "changed words" });
    panel.replaceChildren();
    if (state.recipe) {
      state.recipe.changed.forEach((change, i) => {
        const label = `${visible(text.words[change.word])} → ${visible(change.said)}`;
        chips.append(make("button", { type: "button", "data-key": "chip-" + i, "aria-pressed": i === state.change, onclick: () => choose(state.recipe, i) }, label));
      });
      const count = state.recipe.changed.length;
      const title = `${state.recipe.name} would say another word in ${count} of fp32's ${text.words.length} places`;
      panel.append(make("p", {}, make("b", {}, title)), chips);
      if (count) panel.append(make("div", { class: "bs-panel" }, ...explanation(state.recipe, state.recipe.changed[Math.max(0, state.change)])));
    }
    body.replaceChildren(...(texts.length > 1 ? [tabs] : []), make("p", { class: "bs-prompt" }, text.prompt + " …"), rows, make("p", { class: "bs-note" }, note));
  }

  root.querySelector(".bs-static").replaceWith(body, panel);
  show();
})();
