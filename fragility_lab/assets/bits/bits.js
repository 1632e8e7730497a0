"use strict";
// A number as the bits of a format: rounded to nearest, ties to even, and read back. No kernel is asked.
// fragility_lessons/bits.py gives the formats and does the same in Python.

(() => {
  const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const power = (n) => `2${[...String(n)].map((c) => SUPERSCRIPTS[c]).join("")}`;
  const short = (x, digits = 4) => (Number.isFinite(x) ? String(Number(x.toPrecision(digits))).replace("-", "−") : x > 0 ? "∞" : x < 0 ? "−∞" : "NaN");
  const floorLog2 = (x) => {
    let e = Math.floor(Math.log2(x));
    while (2 ** e > x) e -= 1;
    while (2 ** (e + 1) <= x) e += 1;
    return e;
  };
  const toEven = (q) => {
    const below = Math.floor(q), rest = q - below;
    return rest > 0.5 || (rest === 0.5 && below % 2) ? below + 1 : below;
  };
  const exponentOf = (x, f) => (x === 0 ? f.lowest : Math.max(floorLog2(Math.abs(x)), f.lowest));
  const spacing = (x, f) => 2 ** (exponentOf(x, f) - f.fraction);

  function round(x, f) {
    const size = Math.abs(x), nearest = toEven(size / spacing(x, f)) * spacing(x, f);
    return Math.sign(x) * (nearest <= f.largest ? nearest : f.saturates ? f.largest : Infinity);
  }
  function encode(value, f) {
    const size = Math.abs(value), infinite = size === Infinity, e = infinite ? 0 : exponentOf(value, f), normal = size >= 2 ** f.lowest;
    const exponent = infinite ? 2 ** f.exponent - 1 : normal ? e - f.lowest + 1 : 0;
    const fraction = infinite ? 0 : normal ? (size / 2 ** e - 1) * 2 ** f.fraction : size / 2 ** (f.lowest - f.fraction);
    const digits = (n, width) => n.toString(2).padStart(width, "0").split("").map(Number);
    return [value < 0 || Object.is(value, -0) ? 1 : 0, ...digits(exponent, f.exponent), ...(f.fraction ? digits(fraction, f.fraction) : [])];
  }
  const parts = (bits, f) => {
    const number = (from, to) => bits.slice(from, to).reduce((n, bit) => 2 * n + bit, 0);
    return [bits[0], number(1, 1 + f.exponent), number(1 + f.exponent)];
  };
  function decode(bits, f) {
    const [sign, exponent, fraction] = parts(bits, f), s = sign ? -1 : 1;
    if (!f.saturates && exponent === 2 ** f.exponent - 1) return fraction ? NaN : s * Infinity;
    const e = Math.max(exponent, 1) - 1 + f.lowest, significand = (exponent ? 1 : 0) + fraction / 2 ** f.fraction;
    const value = s * significand * 2 ** e;
    return Math.abs(value) > f.largest ? NaN : value;
  }

  function element(tag, properties = {}, ...children) {
    const made = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }
  let serial = 0;

  function mount(root) {
    const { formats, x: start, format: first } = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    const id = `bits${serial++}`;
    let x = start, f = formats.find((each) => each.name === first), given = null;  // given: bits that the reader flipped
    const field = element("input", { id: `${id}x`, type: "text", inputmode: "decimal", value: start, size: 10, oninput: read });
    const menu = element("select", { id: `${id}f`, onchange: () => { f = formats.find((each) => each.name === menu.value); given = null; update(); } },
      ...formats.map((each) => element("option", { value: each.name, ...(each === f ? { selected: "" } : {}) }, each.name)));
    const hand = element("div", { class: "bits-hand" }), row = element("div", { class: "bits-row", role: "group", "aria-label": "Stored bits" });
    const line = element("div", { class: "bits-line" }), told = element("p", { class: "bits-told", "aria-live": "polite" });
    root.querySelector(".bits-static")?.remove();
    root.append(element("div", { class: "bits-controls" }, element("label", { for: `${id}x` }, "number x ", field), element("label", { for: `${id}f` }, "format ", menu)), hand, row, line, told);

    function read() {
      const value = Number(field.value.replace(",", ".").replace("−", "-"));
      field.setAttribute("aria-invalid", String(!field.value.trim() || !Number.isFinite(value)));
      if (!field.value.trim() || !Number.isFinite(value)) return;
      x = value; given = null; update();
    }
    // The significand of x in binary: digits that the format keeps, and those that rounding drops.
    function drawHand(bits) {
      if (given || x === 0) return hand.replaceChildren(element("p", {}, given ? "You have set the bits yourself." : "Zero has no leading one."));
      const e = exponentOf(x, f), significand = Math.abs(x) / 2 ** e, tail = significand * 2 ** f.fraction;
      const kept = Math.floor(tail).toString(2).padStart(f.fraction + 1, "0");
      let rest = tail - Math.floor(tail), dropped = "";
      while (rest && dropped.length < 12) { rest *= 2; dropped += rest >= 1 ? 1 : 0; rest %= 1; }
      const up = toEven(tail) > Math.floor(tail);
      hand.replaceChildren(
        element("p", {}, `x = ${x < 0 ? "−" : ""}${short(significand, 7)} · ${power(e)}, and in binary`),
        element("p", { class: "bits-binary" }, x < 0 ? "−" : "", element("b", {}, `${kept[0]}${f.fraction ? "." : ""}${kept.slice(1)}`),
          element("s", {}, f.fraction || !dropped ? dropped : `.${dropped}`), rest ? "…" : "", ` · ${power(e)}`),
        element("p", {}, dropped ? `The format keeps ${f.fraction + 1} digits. The rest is ${short(tail - Math.floor(tail), 3)} of the last digit, so the number is rounded ${up ? "up" : "down"}.`
          : "The format keeps every digit: nothing is rounded."));
    }
    function drawBits(bits) {
      const kind = (i) => (i === 0 ? "sign" : i <= f.exponent ? "exponent" : "fraction");
      const focused = [...row.querySelectorAll("button")].indexOf(document.activeElement);
      const group = (name, from, to) => element("div", { class: `bits-group bits-${name}` }, element("div", {}, ...bits.slice(from, to).map((bit, k) => {
        const i = from + k;
        return element("button", { type: "button", "aria-label": `${kind(i)} bit ${k + 1}: ${bit}`, onclick: () => { given = bits.map((b, j) => (j === i ? 1 - b : b)); update(); } }, String(bit));
      })), element("small", {}, name));
      row.replaceChildren(group("sign", 0, 1), group("exponent", 1, 1 + f.exponent), ...(f.fraction ? [group("fraction", 1 + f.exponent)] : []));
      if (focused >= 0) row.querySelectorAll("button")[focused]?.focus();
    }
    function drawLine(value) {
      if (given || !Number.isFinite(value)) return line.replaceChildren();
      const step = spacing(x, f), below = Math.floor(x / step) * step, above = below === x ? x + step : below + step;
      const X = (v) => 60 + (280 * (v - below)) / (above - below), at = X(x);
      const text = (v, y, content) => element("svg:text", { x: v, y, "text-anchor": v < 90 ? "start" : v > 310 ? "end" : "middle" }, content);
      const tick = (v) => element("svg:line", { x1: X(v), x2: X(v), y1: 30, y2: 50, class: v === value ? "bits-near" : "bits-grid" });
      line.replaceChildren(element("svg:svg", { viewBox: "0 0 400 80", role: "img", "aria-label": `x between its neighbours ${short(below, 6)} and ${short(above, 6)}` },
        element("svg:line", { x1: 30, x2: 370, y1: 40, y2: 40, class: "bits-grid" }), tick(below), tick(above),
        element("svg:line", { x1: 200, x2: 200, y1: 36, y2: 44, class: "bits-middle" }),
        element("svg:circle", { cx: at, cy: 40, r: 5, class: "bits-x" }), text(at, 20, `x = ${short(x, 6)}`),
        text(60, 68, short(below, 6)), text(200, 68, "half-way"), text(340, 68, short(above, 6))));
    }
    function update() {
      const bits = given ?? encode(round(x, f), f), value = decode(bits, f), [sign, exponent, fraction] = parts(bits, f);
      drawHand(bits); drawBits(bits); drawLine(value);
      const e = Math.max(exponent, 1) - 1 + f.lowest, m = (exponent ? 1 : 0) + fraction / 2 ** f.fraction;
      const error = Math.abs(value - x) / Math.abs(x);
      const reading = Number.isFinite(value) ? `${sign ? "−" : ""}${short(m, 7)} · ${power(e)} = ${short(value, 7)}` : short(value);
      root.dataset.value = value;
      told.textContent = given ? `These bits mean ${reading}.`
        : `Stored: ${reading}. Error: ${short(Math.abs(value - x), 3)}${x === 0 || !Number.isFinite(error) ? "" : `, relative ${short(error, 3)} = ${short(error / f.u, 3)} u`}. (u = ${power(-f.fraction - 1)} = ${short(f.u, 3)})`;
    }
    update();
  }
  for (const root of document.querySelectorAll(".bits-of-number:not([data-live])")) {
    root.setAttribute("data-live", "");
    mount(root);
  }
})();
