"use strict";
// Rounded scores, as fragility_lessons/floating_point.py computes them.

(() => {
  const { rounder, general, log, median, norm, softmax, sensitivity, floats } = globalThis.slidersShared;

  function scoreRounding({ noise, keys, formats }, { offset, spread, format }, [[frame, below, above, equal]]) {
    const f = formats[format], round = rounder(f), scores = [...floats(noise).map((each) => offset + Math.fround(Math.fround(spread) * each))];
    const rows = Array.from({ length: scores.length / keys }, (_, row) => {
      const own = scores.slice(keys * row, keys * (row + 1)), p = softmax(own), low = softmax(own.map(round)), size = f.u * norm(own);
      return { observed: norm(low.map((each, k) => each - p[k])), bound: size * sensitivity(p), guaranteed: size / 2 };
    });
    const X = log(1e-6, 100), Y = log(1e-9, 10), over = rows.filter((row) => row.observed > row.bound), under = rows.filter((row) => !(row.observed > row.bound));
    const points = (some) => ({ x: some.map((row) => X(row.bound)), y: some.map((row) => Y(row.observed)) });
    return [
      `${format}, offset ${general(offset)}, spread ${general(spread)}: bound / observed = ${general(median(rows.map((row) => row.bound / row.observed)), 2)} (median); `
        + `above the first-order bound: ${over.length} of ${rows.length}; above u‖s‖/2: ${rows.filter((row) => row.observed > row.guaranteed).length}`,
      [frame, { ...below, ...points(under) }, { ...above, ...points(over) }, equal],
    ];
  }

  globalThis.slidersFormulas = { ...globalThis.slidersFormulas, "floating_point.score_rounding": scoreRounding };
})();
