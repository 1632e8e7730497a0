"use strict";
// A model's contributions to the squared error add up, so any plan can be judged here, without another pass.
// fragility_lab/explorer/terms.py describes the data. Each view has the same methods; `mount` draws it.

(() => {
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const mean = (numbers) => sum(numbers) / numbers.length;
  const short = (x) => (x === 0 ? "0" : String(Number(x.toPrecision(3))));
  const percent = (share) => `${short(100 * share)}\u00a0%`;
  const bytes = (n) => {
    for (const [power, prefix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (n >= power) return `${short(n / power)}\u00a0${prefix}B`;
    return n ? `${short(n)}\u00a0B` : "0\u00a0B";
  };
  const shown = (target, x) => (target.name === "hidden" ? percent(x) : `${short(x)}\u00a0nats`);
  const saysError = (target) => (x) => ({
    hidden: `the final state is off by ${shown(target, x)}`, kl: `the next-token distribution is off by ${shown(target, x)} of KL`,
  })[target.name] ?? `the expected error is ${shown(target, x)}`;
  const capital = (text) => text[0].toUpperCase() + text.slice(1);
  const plural = (n, word) => `${n}\u00a0${word}${n === 1 ? "" : "s"}`;
  const inOrder = (rows) => {
    const place = (row) => ({ embedding: -1, norm: 1e6, head: 1e7 })[row] ?? Number(row);
    return [...new Set(rows)].sort((a, b) => place(a) - place(b));
  };
  const isBlock = (row) => /^\d+$/.test(row);

  // Parts in fp32. The state is a set of parts, and two flags for what is no module.
  function keepView(data, words) {
    let kept = new Set(), flags = { residual: false, scores: false };
    const all = data.targets.flatMap((target) => target.terms);
    const rows = inOrder(all.map((term) => term.row));
    const found = new Set(all.filter((term) => isBlock(term.row)).map((term) => term.site));
    const columns = Object.keys(words.sites).filter((site) => found.has(site));
    const site = (name) => data.sites.find((each) => each.name === name);
    const isFlag = (name) => name === "residual" || name === "scores";

    function gone(term, parts = kept, on = flags) {
      const outermost = term.parts.find(([part]) => parts.has(part));
      const alone = outermost ? outermost[1] & (on.residual ? 2 : 1) : term.stream && on.residual;
      return Boolean(alone) || (term.scores && on.scores);
    }
    function predict(target, parts = kept, on = flags) {
      const left = target.terms.flatMap((term, i) => (gone(term, parts, on) ? [] : [i]));
      const squares = target.c2.map((window) => sum(left.map((i) => window[i])));
      return mean(target.squared ? squares : squares.map(Math.sqrt));
    }
    function parameterBytes(parts = kept, on = flags) {
      const priced = data.price.map((group) => {
        const held = group.owners.map((o) => o.parts.some((p) => parts.has(p)) || (on.residual && o.stream));
        return held.every(Boolean) ? group.all : held.some(Boolean) ? group.some : 0;
      });
      return Math.round(sum(priced));
    }
    const streamBytes = (on = flags) => (on.residual ? data.stream_bytes : 0);
    const x = (parts = kept, on = flags) => parameterBytes(parts, on) + streamBytes(on) * data.length;

    // What one mark of the diagram stands for: a block, a kind of site, or the part of a block at such a site.
    function parts({ row, column }) {
      if (row === undefined) return site(words.parents[column])?.parts ?? [];
      if (row === "norm") return all.filter((t) => t.row === row).flatMap((t) => t.parts.slice(0, 1).map(([p]) => p));
      if (!isBlock(row)) return site(row)?.parts ?? [];
      if (column === undefined) return [data.blocks[row]];
      const block = data.blocks[row];
      return (site(words.parents[column])?.parts ?? []).filter((p) => data.paths[p].startsWith(`${data.paths[block]}.`));
    }
    function flagOf({ row, column }) {
      if (column === "scores" && row !== undefined) return undefined;  // those of one block alone cannot be kept
      const name = column === "scores" ? column : words.parents[column];
      return isFlag(name) && site(name) ? name : undefined;
    }
    function nameKept({ row, column }) {
      const name = column === "scores" && row === undefined ? column : words.parents[column ?? row];
      if (isFlag(name)) return name === "residual" ? "the residual stream" : "the scores of all blocks";
      if (row === undefined) return `${words.kept[name]} of all blocks`;
      if (!isBlock(row)) return words.rows[row];
      return column === undefined ? `block ${row}` : `${words.kept[name]} of block ${row}`;
    }
    const covered = (part) => [...kept].some((p) => p !== part && data.paths[part].startsWith(`${data.paths[p]}.`));
    function state(where) {
      const flag = flagOf(where), own = [...new Set(parts(where))];
      const what = nameKept(where);
      if (flag) return { on: flags[flag], fixed: false, what };
      if (!own.length) return null;
      const held = own.filter((p) => kept.has(p) || covered(p)).length;
      return { on: held === own.length ? true : held ? "mixed" : false, fixed: own.every(covered), what };
    }
    function set(parts, on) {
      for (const part of parts) on ? kept.add(part) : kept.delete(part);
    }
    const inside = ({ row, column }, term) =>
      (row === undefined || term.row === row) && (column === undefined || term.site === column);
    function share(target, where, all = false) {
      const of = (test) => mean(target.c2.map((w) => sum(w.filter((_, i) => test(target.terms[i])))));
      return of((term) => inside(where, term) && (all || !gone(term))) / of(() => true);
    }
    function sitesKept() {
      return data.sites.filter(({ name, parts }) => (isFlag(name) ? flags[name] : parts.every((p) => kept.has(p))));
    }
    function describe() {
      const blocks = Object.keys(data.blocks).filter((n) => kept.has(data.blocks[n]));
      const sites = sitesKept(), named = new Set([...blocks.map((n) => data.blocks[n]), ...sites.flatMap((s) => s.parts)]);
      const others = [...kept].filter((p) => !named.has(p));
      const list = blocks.length ? [`block${blocks.length > 1 ? "s" : ""} ${blocks.join(", ")}`] : [];
      list.push(...sites.map((s) => s.name));
      if (others.length) list.push(others.length > 2 ? plural(others.length, "layer") : others.map((p) => data.paths[p]).join(", "));
      return list.length ? `${list.join(", ")} in fp32` : "nothing in fp32";
    }
    function best(target, unit, count) {
      if (unit !== "sites") return [new Set(target.best[unit].slice(0, count)), { residual: false, scores: false }];
      const names = target.best.sites[count];
      return [new Set(names.flatMap((n) => site(n).parts)), { residual: names.includes("residual"), scores: names.includes("scores") }];
    }
    const units = { blocks: "blocks", sites: "kinds of site", modules: "layers" };
    const most = (target, unit) => (unit === "sites" ? target.best.sites.length - 1 : target.best[unit].length);
    return {
      title: `Parts in fp32 beside ${data.recipe}`, rows, columns, targets: data.targets, units, most, describe, share, state,
      xLabel: "bytes more (weights, and the stream of a window)", xText: bytes, x,
      predict, base: (target) => predict(target, new Set(), {}), marks: true,
      shareOf: "Shares of the squared error without a plan",
      toggle(where) {
        const flag = flagOf(where), now = state(where);
        if (flag) flags[flag] = !flags[flag];
        else if (now && !now.fixed) set(parts(where), now.on !== true);
      },
      cost: () => [["weights", parameterBytes(), parameterBytes() ? `${bytes(parameterBytes())} more for weights` : "no more bytes for weights"],
        ["stream", streamBytes(), streamBytes() ? `${bytes(streamBytes())} more a token, for the residual stream` : ""]],
      sentence(target, says) {
        const now = predict(target), all = predict(target, new Set(), {}), plan = describe();
        if (plan === "nothing in fp32") return `Without a plan, ${says(all)} (recipe: ${data.recipe}).`;
        const change = all > 0 && now < all ? `${percent(1 - now / all)} less than without a plan` : "no less than without a plan";
        return `With ${plan}, ${says(now)}: ${change}.`;
      },
      text: () => ({ parts: [...kept].sort((a, b) => a - b).join("."), flags: Object.keys(flags).filter((name) => flags[name]).join(".") }),
      restore(text) {
        const parts = (text.get("parts") ?? "").split(".").filter(Boolean).map(Number), on = (text.get("flags") ?? "").split(".");
        kept = new Set(parts.filter((part) => part in data.paths));
        flags = { residual: on.includes("residual"), scores: on.includes("scores") };
      },
      reset() { kept = new Set(); flags = { residual: false, scores: false }; },
      choose(target, unit, count) { [kept, flags] = best(target, unit, count); },
      curve: (target, unit) => Array.from({ length: most(target, unit) + 1 }, (_, n) => {
        const plan = best(target, unit, n);
        return { x: x(...plan), y: predict(target, ...plan) };
      }),
      plans: data.measured.map(({ label, kept: plan, found }) => {
        const given = [new Set(plan.parts), { residual: plan.residual, scores: plan.scores }];
        return { label, found, predicted: (t) => predict(t, ...given), apply() { kept = new Set(given[0]); flags = { ...given[1] }; } };
      }),
      layers(target, where) {
        const at = target.terms.map((term, i) => ({ term, i })).filter(({ term }) => inside(where, term));
        const total = mean(target.c2.map(sum)), by = new Map();
        for (const { term, i } of at) {
          const name = target.modules[term.module], row = by.get(name) ?? { name, kernel: 0, weight: 0, left: 0 };
          const square = mean(target.c2.map((w) => w[i])) / total;
          row[term.kind] += square;
          row.left += gone(term) ? 0 : square;
          by.set(name, row);
        }
        return [...by.values()].sort((a, b) => b.kernel + b.weight - a.kernel - a.weight).map((row) => {
          const part = data.paths.indexOf(row.name), can = data.layers.includes(part);
          const cell = can ? { on: kept.has(part) || covered(part), fixed: covered(part), toggle: () => set([part], !kept.has(part)) } : null;
          return { ...row, cell };
        });
      },
    };
  }

  // A scheme for every group of linear layers. The state is the number of each group's scheme.
  function chooseView(data) {
    const target = data.targets[0], smallest = data.bits.map((row) => row.indexOf(Math.min(...row)));
    let choice = [...smallest];
    const rows = [...inOrder(data.groups.map((g) => g.row)), "rest"], columns = [...new Set(data.groups.map((g) => g.column))];
    const predict = (t, given = choice) => {
      const squares = t.errors.map((window, w) => t.rest[w] + sum(given.map((s, g) => window[g][s])));
      return mean(t.squared ? squares : squares.map(Math.sqrt));
    };
    const bits = (given = choice) => sum(given.map((s, g) => data.bits[g][s])) / data.entries;
    const at = ({ row, column }) => data.groups.flatMap((g, i) =>
      (row === undefined || g.row === row) && (column === undefined || g.column === column) ? [i] : []);
    const total = () => mean(target.errors.map((w, n) => target.rest[n] + sum(smallest.map((s, g) => w[g][s]))));
    const square = (group, scheme) => mean(target.errors.map((w) => w[group][scheme])) / total();
    const share = (_, where, all = false) => where.row === "rest" ? mean(target.rest) / total() : sum(at(where).map((g) => square(g, all ? smallest[g] : choice[g])));
    const next = (s) => (s + 1) % data.schemes.length;
    return {
      title: "A scheme for every layer", rows, columns, targets: data.targets, units: { bits: "bits a weight" }, share, predict,
      most: () => data.best.length - 1, xLabel: "bits a weight", xText: short, x: () => bits(),
      shareOf: "Shares of the squared error with all layers in the smallest scheme",
      base: (t) => predict(t, smallest), marks: false,
      state: (where) => {
        const schemes = [...new Set(at(where).map((g) => choice[g]))];
        return schemes.length ? { scheme: schemes.length > 1 ? "mixed" : data.schemes[schemes[0]], fixed: false } : null;
      },
      toggle(where) { const to = next(choice[at(where)[0]]); for (const g of at(where)) choice[g] = to; },
      cost: () => [["bits", bits(), `${short(bits())} bits a weight`], ["weights", bits() * data.entries / 8, `${bytes(bits() * data.entries / 8)} for these weights`]],
      sentence(t, says) {
        const now = predict(t), most = predict(t, smallest), of = `${short(bits())} bits a weight`;
        if (choice.every((s, g) => s === smallest[g])) return `Every layer is in its smallest scheme (${of}). ${capital(says(most))}.`;
        return `With ${of}, ${says(now)}: ${now < most ? percent(1 - now / most) : "no"} less than in the smallest schemes.`;
      },
      text: () => ({ schemes: choice.join("") }),
      restore(text) {
        const given = [...(text.get("schemes") ?? "")].map(Number);
        if (given.length === choice.length && given.every((s) => s < data.schemes.length)) choice = given;
      },
      reset() { choice = [...smallest]; },
      choose(_, unit, count) { choice = [...data.best[count]]; },
      curve: (t) => data.best.map((given) => ({ x: bits(given), y: predict(t, given) })),
      describe: () => data.schemes.map((name, s) => [name, choice.filter((c) => c === s).length]).filter(([, n]) => n)
        .map(([name, n]) => `${plural(n, "layer")} in ${name}`).join(", "),
      plans: data.measured.map(({ label, choice: given, found }) =>
        ({ label, found, predicted: (t) => predict(t, given), apply() { choice = [...given]; } })),
      layers: (_, where) => at(where).map((g) => ({
        name: `${data.groups[g].row}: ${data.groups[g].names.join(", ")}`, left: square(g, choice[g]), schemes: data.schemes.map((name, s) => [name, square(g, s)]),
        chosen: choice[g], toggle: (s) => { choice[g] = s; },
      })),
    };
  }

  // --- Drawing ------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  function element(tag, properties = {}, ...children) {
    const made = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }
  const LEVELS = [0.001, 0.003, 0.01, 0.03, 0.1];  // limits of the colours, shares of the squared error
  const level = (share) => LEVELS.filter((limit) => share >= limit).length;
  const brief = (share) => (share >= 0.0995 ? (100 * share).toFixed(0) : share >= 0.0005 ? (100 * share).toFixed(1) : "0");
  let serial = 0;

  function mount(root) {
    const { views, words } = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    const made = views.map((data) => (data.kind === "keep" ? keepView(data, words) : chooseView(data)));
    const id = `px${serial++}`;
    const curves = new Map();  // they do not depend on the plan
    const curveOf = (of, by) => {
      const key = `${made.indexOf(view)} ${of.name} ${by}`;
      if (!curves.has(key)) curves.set(key, view.curve(of, by));
      return curves.get(key);
    };
    let view = made[0], target = view.targets[0], unit = Object.keys(view.units)[0], count = 0, place = [0, 0], grid = [];

    const numbers = element("div", { class: "px-numbers" });  // no dl: notebooks and sites float its parts
    const say = element("p", { class: "px-say", role: "status" });
    const tabs = element("div", { class: "px-tabs", role: "group", "aria-label": "What a plan decides" });
    const budget = element("div", { class: "px-budget" });
    const model = element("div", { class: "px-model" });
    const focus = element("div", { class: "px-focus" });
    const terms = element("div", { class: "px-terms", role: "region", tabindex: "0", "aria-label": "Terms of the selected part" });
    const curve = element("div", { class: "px-curve" });
    const plans = element("div", { class: "px-plans" });
    const side = element("div", { class: "px-side" }, focus, terms, curve, plans);
    root.querySelector(".px-static")?.remove();
    root.append(element("div", { class: "px-bar" }, say, numbers), tabs, budget, element("div", { class: "px-body" }, model, side));

    const rowName = (row) => (isBlock(row) ? `block ${row}` : words.rows[row].replace(/^the /, ""));
    const columnName = (column) => words.sites[column] ?? column;
    const nameOf = ({ row, column }) => row !== undefined && !isBlock(row) ? rowName(row) :
      [row === undefined ? "" : rowName(row), column === undefined ? "" : columnName(column)].filter(Boolean).join(", ");
    const stateText = (state) => !state ? "" : view.marks ? (state.on === true ? "in fp32" : state.on ? "partly in fp32" : "") : state.scheme;

    // The place of the present plan among the best ones, null if it is none of them; equal plans may have several, as `here`.
    function placed(here) {
      const now = view.text(), key = JSON.stringify(now), all = [...Array(view.most(target, unit) + 1).keys()];
      const found = [here, ...all].filter((n) => all.includes(n)).find((n) => { view.choose(target, unit, n); return JSON.stringify(view.text()) === key; });
      view.restore(new URLSearchParams(now));
      return found ?? null;
    }
    function changed() { count = placed(); update(); }

    // The diagram: one row a block, one column a kind of site. Arrow keys move, Space changes.
    function buildModel() {
      const button = (where, text, kind) => {
        const made = element("button", { type: "button", class: kind, tabindex: "-1" }, text);
        made.where = where;
        made.addEventListener("focus", () => select(made));
        made.addEventListener("pointerdown", () => { made.armed = made.classList.contains("px-here"); });
        made.addEventListener("click", (event) => {
          if (event.detail === 0 || made.armed) { view.toggle(where); changed(); } else select(made);
        });
        return made;
      };
      const head = [element("td"), ...view.columns.map((column) =>
        element("th", { scope: "col" }, button({ column }, element("span", {}, columnName(column)), "px-head")))];
      const body = view.rows.map((row) => {
        const cells = isBlock(row)
          ? view.columns.map((column) => element("td", {}, button({ row, column }, "", "px-cell")))
          : [element("td", { colspan: view.columns.length }, button({ row, column: row === "norm" ? "norm" : undefined }, "", "px-cell"))];
        const first = button(isBlock(row) ? { row } : { row, column: row === "norm" ? "norm" : undefined }, rowName(row), "px-row");
        return element("tr", {}, element("th", { scope: "row" }, first), ...cells);
      });
      const table = element("table", { class: "px-grid" }, element("caption", {}, `${view.title}: share of the squared error, in percent`),
        element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
      grid = [...table.rows].map((row) => [...row.cells].map((cell) => cell.querySelector("button")));
      table.addEventListener("keydown", move);
      table.addEventListener("keyup", (event) => { if (event.key === " ") event.preventDefault(); });
      const limits = ["0", ...LEVELS.map((limit) => short(100 * limit))];
      const legend = element("p", { class: "px-legend" }, "Share: ", ...limits.map((limit, i) =>
        element("span", { class: `px-cell px-l${i}` }, i ? `≥ ${limit} %` : `< ${limits[1]} %`)));
      const hint = element("p", { class: "px-hint" }, "Click a block, a kind of site or a cell for its terms. ",
        "Click again, or press Space, to ", view.marks ? "keep it in fp32." : "give it the next scheme.", " Arrow keys move.");
      model.replaceChildren(element("div", { class: "px-scroll" }, table), legend, hint);
      const cells = grid.flatMap((row, r) => row.flatMap((made, c) => (made?.classList.contains("px-cell") ? [[r, c]] : [])));
      const size = ([r, c]) => view.share(target, grid[r][c].where, true);
      place = cells.reduce((a, b) => (size(b) > size(a) ? b : a));
    }
    function move(event) {
      const [r, c] = place, step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === " ") { event.preventDefault(); view.toggle(grid[r][c].where); changed(); return; }
      if (!step) return;
      event.preventDefault();
      const row = grid[Math.min(Math.max(r + step[0], 0), grid.length - 1)];
      const to = row[Math.min(Math.max(c + step[1], 0), row.length - 1)] ?? row[1];
      to.focus();
    }
    function select(made) {
      grid.forEach((row, r) => row.forEach((other, c) => { if (other === made) place = [r, c]; }));
      drawSelection();
    }
    function drawCells() {
      for (const made of grid.flat().filter(Boolean)) {
        const state = view.state(made.where), left = view.share(target, made.where), on = state?.on ?? false;
        const cell = made.classList.contains("px-cell"), text = stateText(state);
        made.setAttribute("aria-label", `${nameOf(made.where)}: ${percent(left)} of the squared error${text ? `, ${text}` : ""}`);
        if (view.marks && state) made.setAttribute("aria-pressed", on === "mixed" ? "mixed" : String(on));
        made.classList.toggle("px-on", on === true);
        made.classList.toggle("px-some", on === "mixed");
        if (!cell) continue;
        made.className = made.className.replace(/ ?px-l\d/, "") + ` px-l${level(left)}`;
        made.textContent = view.marks && on === true && left < 0.0005 ? "fp32" : brief(left);
        if (!view.marks && state) made.append(element("small", {}, state.scheme.split("-")[0].replace("a16", "")));
      }
    }
    function drawSelection() {
      const [r, c] = place, here = grid[r][c], where = here.where, state = view.state(where);
      for (const made of grid.flat().filter(Boolean)) {
        made.classList.toggle("px-here", made === here);
        made.setAttribute("tabindex", made === here ? "0" : "-1");
      }
      const left = view.share(target, where), all = view.share(target, where, true);
      const text = Math.abs(left - all) < 1e-9 ? percent(all) : `${percent(left)} left of ${percent(all)}`;
      const toggle = state && element("button", {
        type: "button", class: "px-toggle", disabled: state.fixed, "aria-pressed": view.marks ? String(state.on) : null,
        onclick: () => { view.toggle(where); changed(); },
      }, view.marks ? (state.on === true ? `${capital(state.what)}: in fp32 ✓` : `Keep ${state.what} in fp32`) : `Next scheme (now ${state.scheme})`);
      focus.replaceChildren(element("h3", {}, nameOf(where)), element("p", {}, `${text} of the squared error`), toggle || element("p", { class: "px-note" }, "This cannot be kept alone."));
      drawTerms(where);
    }
    function drawTerms(where) {
      const rows = view.layers(target, where), shownRows = rows.slice(0, 60);
      const heads = view.marks ? ["fp32", "layer or module", "results", "weights"] : ["layers", "scheme", "share"];
      const body = shownRows.map((row) => {
        const name = row.name || "the model itself", refresh = (change) => () => { change(); changed(); };
        if (!view.marks) {
          const options = row.schemes.map(([scheme, share], s) =>
            element("option", { value: s, selected: s === row.chosen }, `${scheme} (${percent(share)})`));
          const pick = element("select", { "aria-label": `scheme of ${name}`, onchange: (e) => { row.toggle(Number(e.target.value)); changed(); } }, ...options);
          return element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, pick), element("td", {}, percent(row.left)));
        }
        const box = row.cell && element("input", {
          type: "checkbox", "aria-label": `${name} in fp32`, checked: row.cell.on, disabled: row.cell.fixed, onchange: refresh(row.cell.toggle),
        });
        return element("tr", { class: row.left === 0 ? "px-gone" : null }, element("td", {}, box), element("th", { scope: "row" }, name),
          element("td", {}, percent(row.kernel)), element("td", {}, percent(row.weight)));
      });
      const more = rows.length > shownRows.length ? element("p", {}, `and ${rows.length - shownRows.length} more`) : null;
      const focused = terms.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
      terms.replaceChildren(element("table", {}, element("caption", {}, view.shareOf),
        element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), element("tbody", {}, ...body)));
      if (more) terms.append(more);
      if (focused) [...terms.querySelectorAll("input, select")].find((e) => e.getAttribute("aria-label") === focused)?.focus();
    }

    function drawNumbers() {
      const parts = view.targets.map((t) => {
        const value = view.predict(t), base = view.base(t);
        return element("div", {}, element("span", { class: "px-label" }, `predicted ${words.targets[t.name] ?? t.name}`),
          element("span", { "data-target": t.name, "data-value": value }, shown(t, value)),
          element("span", { class: "px-note" }, `${shown(t, base)} ${view.marks ? "without a plan" : "in the smallest schemes"}`));
      });
      const cost = view.cost().map(([name, value, text]) => element("span", { "data-cost": name, "data-value": value }, text));
      numbers.replaceChildren(...parts, element("div", {}, element("span", { class: "px-label" }, "price"), ...cost));
      say.textContent = view.sentence(target, saysError(target));
    }
    function buildBudget() {
      const choose = (e) => { count = Number(e.target.value); view.choose(target, unit, count); update(); };
      const pick = (name, options, value, change) => element("label", {}, element("span", {}, name), element("select", { onchange: change, "aria-label": name },
        ...options.map(([key, text]) => element("option", { value: key, selected: key === value }, text))));
      const parts = [];
      if (Object.keys(view.units).length > 1)
        parts.push(pick("Best plan by", Object.entries(view.units), unit, (e) => { unit = e.target.value; count = placed(); buildBudget(); update(); }));
      if (view.targets.length > 1)
        parts.push(pick("Error", view.targets.map((t) => [t.name, words.targets[t.name]]), target.name, (e) => {
          target = view.targets.find((t) => t.name === e.target.value);
          count = placed(); buildBudget(); update();
        }));
      const range = element("input", { type: "range", min: "0", max: view.most(target, unit), step: "1", value: count ?? 0, id: `${id}-budget`, "aria-label": "Budget", oninput: choose });
      parts.push(element("label", { class: "px-range" }, element("span", {}, "Budget"), range, element("output", { for: `${id}-budget` })));
      parts.push(element("button", { type: "button", onclick: () => { view.reset(); count = 0; update(); } }, "Clear"));
      budget.replaceChildren(...parts);
    }
    function drawBudget() {
      const out = budget.querySelector("output"), point = count === null ? null : curveOf(target, unit)[count];
      const text = point === null ? "your own plan" : view.marks ? `the best ${count} of ${view.most(target, unit)} ${view.units[unit]}` : `${short(point.x)} bits a weight`;
      const range = budget.querySelector("input");
      out.textContent = text;
      range.setAttribute("aria-valuetext", text);
      if (count !== null) range.value = count;
    }
    function drawCurve() {
      const lines = Object.keys(view.units).map((each) => [each, curveOf(target, each)]);
      const here = { x: view.x(), y: view.predict(target) }, points = [here, ...lines.flatMap(([, line]) => line)];
      const low = view.marks ? 0 : Math.min(...points.map((p) => p.x)), top = Math.max(...points.map((p) => p.x)), high = Math.max(...points.map((p) => p.y));
      const X = (x) => 58 + (288 * (x - low)) / (top - low || 1), Y = (y) => 162 - (146 * y) / (high || 1);
      const text = (x, y, content, anchor = "middle") => element("svg:text", { x, y, "text-anchor": anchor }, content);
      const drawing = [];
      for (const part of [0, 0.5, 1]) {
        drawing.push(element("svg:line", { class: "px-line", x1: 58, x2: 346, y1: Y(part * high), y2: Y(part * high) }),
          text(52, Y(part * high) + 4, shown(target, part * high).replace(/\u00a0nats/, ""), "end"),
          text(X(low + part * (top - low)), 178, view.xText(low + part * (top - low)), part === 1 ? "end" : "middle"));
      }
      drawing.push(text(202, 195, view.xLabel));
      for (const [each, line] of lines)
        drawing.push(element("svg:polyline", { class: each === unit ? "px-best" : "px-other", points: line.map((p) => `${X(p.x)},${Y(p.y)}`).join(" ") }));
      for (const p of lines.find(([each]) => each === unit)[1]) drawing.push(element("svg:circle", { class: "px-dot", cx: X(p.x), cy: Y(p.y), r: 2.5 }));
      drawing.push(element("svg:path", { class: "px-diamond", d: `M${X(here.x)} ${Y(here.y) - 7}l7 7-7 7-7-7z` }));
      const title = `Least predicted error over ${view.xLabel}; this plan: ${shown(target, here.y)} at ${view.xText(here.x)}`;
      curve.replaceChildren(element("h3", {}, "Best plans, and yours"),
        element("svg:svg", { viewBox: "0 0 360 200", role: "img", "aria-label": title }, ...drawing),
        element("p", { class: "px-note" }, `Line with dots: the best plans by ${view.units[unit]}. `,
          lines.length > 1 ? "Dashed: by the other units. " : "", "Diamond: the plan above."));
    }
    function drawPlans() {
      if (!view.plans.length) return plans.replaceChildren();
      const rows = view.plans.map((plan) => {
        const predicted = plan.predicted(target), found = plan.found[target.name];
        const show = element("button", { type: "button", "aria-label": `Show ${plan.label}`, onclick: () => { plan.apply(); changed(); } }, plan.label);
        return element("tr", {}, element("th", { scope: "row" }, show), element("td", { "data-value": predicted }, shown(target, predicted)),
          element("td", {}, found === undefined ? "–" : shown(target, found)), element("td", {}, found ? short(predicted / found) : "–"));
      });
      const heads = ["plan", "predicted", "measured", "ratio"].map((head) => element("th", { scope: "col" }, head));
      return plans.replaceChildren(element("h3", {}, "Predicted and measured"), element("div", { class: "px-scroll" },
        element("table", {}, element("caption", {}, `${words.targets[target.name]}; click a plan to see it above. One measurement is one draw of rounding errors.`),
          element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows))));
    }
    function update() {
      drawNumbers(); drawBudget(); drawCells(); drawSelection(); drawCurve(); drawPlans(); remember();
    }

    // On a page that says so, the address holds the state: a link restores it, and a reload loses nothing.
    const linked = Boolean(root.closest("[data-linked]"));
    let due;
    function remember() {
      if (!linked) return;
      clearTimeout(due);  // browsers refuse many changes of the address a second
      due = setTimeout(() => {
        const state = { view: made.indexOf(view), error: target.name, by: unit, best: count ?? "", at: place.join("."), ...view.text() };
        const kept = Object.entries(state).filter(([, value]) => value !== "");
        history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
      }, 150);
    }
    function restore() {
      const text = new URLSearchParams(location.hash.slice(1));
      if (!linked || !text.has("view")) return;
      show(made[text.get("view")] ?? made[0]);
      target = view.targets.find((each) => each.name === text.get("error")) ?? target;
      unit = text.get("by") in view.units ? text.get("by") : unit;
      view.restore(text);
      const at = (text.get("at") ?? "").split(".").map(Number);
      count = placed(Number(text.get("best") ?? NaN));
      buildBudget(); buildModel();
      if (grid[at[0]]?.[at[1]]) place = at;
      update();
    }
    addEventListener("hashchange", restore);

    function show(next) {
      view = next; target = view.targets[0]; unit = Object.keys(view.units)[0]; count = placed();
      tabs.replaceChildren(...(made.length > 1 ? made.map((each) => element("button", { type: "button", "aria-pressed": String(each === view), onclick: () => show(each) }, each.title)) : []));
      buildBudget(); buildModel(); update();
    }
    show(view);
    restore();
  }
  for (const root of document.querySelectorAll(".plan-explorer:not([data-live])")) {
    root.setAttribute("data-live", "");
    mount(root);
  }
})();
