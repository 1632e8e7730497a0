"use strict";
// LayerNorm in a low format, and its bound, as fragility_lessons/rows.py and layernorm_epsilon.py compute them.

(() => {
  const { SIZE, rounder, general, linear, log, median, norm, floats } = globalThis.slidersShared;
  const sum = (values) => values.reduce((a, b) => a + b, 0), mean = (values) => sum(values) / values.length;
  const known = (values) => mean(values.filter((each) => !Number.isNaN(each)));

  // Rows with a variance, and a mean of `offset` standard deviations, from rows with variance 1 and mean 0.
  function drawn({ rows, features }, variance, offset) {
    const all = [...floats(rows)].map((each) => Math.fround(Math.sqrt(variance) * (each + offset)));
    return Array.from({ length: all.length / features }, (_, row) => all.slice(features * row, features * (row + 1)));
  }
  const moments = (x) => { const middle = mean(x); return [middle, mean(x.map((each) => (each - middle) ** 2))]; };
  const path = (x, gamma, epsilon) => {
    const [middle, variance] = moments(x);
    return x.map((each, k) => (gamma[k] * (each - middle)) / Math.sqrt(variance + epsilon));
  };
  // LayerNorm by kernels that each round their result.
  function stepwise(x, gamma, epsilon, round) {
    const kept = (value) => round(Math.fround(value)), middle = kept(mean(x)), centred = x.map((each) => kept(each - middle));
    const variance = kept(mean(centred.map((each) => kept(each * each)))), scale = kept(1 / Math.sqrt(kept(variance + Math.fround(epsilon))));
    return centred.map((each, k) => kept(kept(each * scale) * gamma[k]));
  }
  const factor = (variance, epsilon) => (epsilon + 2 * variance) / (variance + epsilon) ** 1.5;

  // Error and bound of one row; `rounded` says what is rounded, and `a` is the constant a_ln that holds for it.
  function errors(x, gamma, epsilon, f, rounded, a) {
    const round = rounder(f), stored = x.map(round), given = rounded === "input and result" ? x : stored;
    const low = rounded === "every step" ? stepwise(stored, gamma, epsilon, round) : path(stored, gamma, epsilon).map((each) => round(Math.fround(each)));
    const exact = path(given, gamma, epsilon), [, variance] = moments(given), size = norm(exact);
    const observed = norm(low.map((each, k) => each - exact[k])), widest = Math.max(...gamma.map(Math.abs));
    const bound = f.u * widest * factor(variance, epsilon) * a * norm(given);
    return { observed, bound, relative: observed / size, relativeBound: bound / size, size, variance, widest, length: norm(given) };
  }

  function rounding(data, values, panels) {
    const { format, rounded, offset } = values, f = data.formats[format], variance = 10 ** values.variance_exponent, epsilon = 10 ** values.epsilon_exponent;
    const rows = drawn(data, variance, offset), gamma = rows[0].map(() => 1);
    const at = (own) => rows.map((x) => errors(x, gamma, own, f, rounded, data.constants[rounded]));
    const swept = data.epsilons.map(at), here = at(epsilon), told = (name) => known(here.map((row) => row[name]));
    const X = log(...data.limits), Y = log(1e-6, 100), line = (v) => ({ x: [X(v), X(v)], y: [0, SIZE] });
    const drawnPanel = ([frame, points, curve, , current], kind, observed, bound) => {
      const title = `${format}: ${kind} error`;
      return [
        { ...frame, title, alt: `${title}: ${frame.y.label} over ${frame.x.label}` },
        { ...points, x: swept.flatMap((some, k) => some.map(() => X(data.epsilons[k]))), y: swept.flatMap((some) => some.map((row) => Y(row[observed]))) },
        { ...curve, x: data.epsilons.map(X), y: swept.map((some) => Y(known(some.map((row) => row[bound])))) },
        { ...panels[0][3], ...line(variance) }, { ...current, ...line(epsilon) },
      ];
    };
    return [
      `${format}, σ² = ${general(variance, 2)}, mean ${general(offset)} σ, ε = ${general(epsilon, 2)}, rounded: ${rounded}; `
        + `error ${general(told("observed"), 2)}, bound ${general(told("bound"), 2)}, ${general(told("bound") / told("observed"), 2)} times as large; `
        + `relative to the output ${general(told("relative"), 2)}, bound ${general(told("relativeBound"), 2)}`,
      drawnPanel(panels[0], "absolute", "observed", "bound"), drawnPanel(panels[1], "relative", "relative", "relativeBound"),
    ];
  }

  // As `round_ticks` of fragility_lessons/pictures.py.
  function roundTicks(largest) {
    const power = 10 ** Math.floor(Math.log10(largest)), [top, step] = [[1, 0.25], [2, 0.5], [5, 1], [10, 2]].find(([each]) => each * power >= largest);
    return Array.from({ length: Math.round(top / step) + 1 }, (_, k) => k * step * power);
  }

  function looseness(data, { share_exponent, offset, spread, format }, [[frame, ...counts], [stepFrame, ...steps]]) {
    const f = data.formats[format], round = rounder(f), share = 10 ** share_exponent, epsilon = share * data.variance;
    const gamma = data.normal.map((each) => round(Math.fround(Math.exp(spread * each))));
    const rungs = drawn(data, data.variance, offset).map((x) => {
      const row = errors(x, gamma, epsilon, f, "the result", 1), scale = (f.u * row.widest) / Math.sqrt(row.variance + epsilon);
      return [row.observed, f.u * row.size, scale * Math.sqrt(x.length * row.variance), scale * row.length, row.bound];
    });
    const slack = rungs.map((row) => row.at(-1) / row[0]), logs = slack.map((each) => Math.min(Math.log10(each), 3));
    const bins = [...Array(30).keys()].map((k) => logs.filter((each) => each >= k * 0.1 && (each < (k + 1) * 0.1 || (k === 29 && each <= 3))).length);
    const X = linear(-0.1, 3), ticks = roundTicks(1.05 * Math.max(...bins)), Y = linear(0, ticks.at(-1)), title = `${format}: how loose the bound is`;
    const factors = [...Array(data.names.length).keys()].map((k) => Math.exp(mean(rungs.map((row) => Math.log(row[k + 1]) - Math.log(row[k])))));
    const marks = roundTicks(1.05 * Math.max(...factors)), F = linear(0, marks.at(-1)), S = linear(factors.length - 0.6, -0.7), labelled = (at, place) => at.map((each) => [place(each), general(each)]);
    const bars = steps.slice(0, factors.length), texts = steps.slice(factors.length), middle = X(Math.log10(median(slack)));
    return [
      `${format}, ε = ${general(share, 2)} σ², mean ${general(offset)} σ: the bound holds in ${slack.filter((each) => each >= 1).length} of ${slack.length} rows; `
        + `bound / observed: smallest ${general(Math.min(...slack), 2)}, median ${general(median(slack), 2)}, largest ${general(Math.max(...slack), 2)}`,
      [{ ...frame, title, alt: `${title}: ${frame.y.label} over ${frame.x.label}`, y: { ...frame.y, ticks: labelled(ticks, Y) } },
        ...bins.map((count, k) => ({ ...counts[k], cells: [[X(k * 0.1), 0, X((k + 1) * 0.1), Y(count)]] })), counts[30], { ...counts[31], x: [middle, middle] }],
      [{ ...stepFrame, x: { ...stepFrame.x, ticks: labelled(marks, F) } },
        ...bars.map((bar, k) => ({ ...bar, cells: [[0, S(k - 0.225), F(factors[k]), S(k + 0.225)]] })),
        ...texts.map((text, k) => ({ ...text, text: `${data.names[k]}: × ${general(factors[k], 2)}`, at: [F(0.015 * marks.at(-1)), text.at[1]] }))],
    ];
  }

  globalThis.slidersFormulas = { ...globalThis.slidersFormulas, "layernorm_epsilon.rounding": rounding, "layernorm_epsilon.looseness": looseness };
})();
