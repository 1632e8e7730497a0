"use strict";
// Rounded scores, as fragility_lessons/floating_point.py computes them.

(() => {
  const { rounder, general, log, median, floats } = globalThis.slidersShared;
  const norm = (values) => Math.sqrt(values.reduce((sum, each) => sum + each * each, 0));

  function softmax(scores) {
    const top = Math.max(...scores), weights = scores.map((each) => Math.exp(each - top)), sum = weights.reduce((a, b) => a + b, 0);
    return weights.map((each) => each / sum);
  }
  // ||J(p)||_2, the largest eigenvalue of Diag(p) - ppᵀ: it lies between the two largest p, where 1 = Σ p² / (p - λ).
  function sensitivity(p) {
    const [first, ...others] = [...p].sort((a, b) => b - a), rest = others.reduce((a, b) => a + b, 0);
    let low = others[0], high = first;
    for (let k = 0; k < 60; k++) {
      const middle = (low + high) / 2;
      const over = (first * rest - middle) / (first - middle) - others.reduce((sum, each) => sum + (each * each) / (each - middle), 0);
      if (over < 0) high = middle; else low = middle;
    }
    return high;
  }

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
