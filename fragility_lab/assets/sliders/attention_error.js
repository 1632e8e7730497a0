"use strict";
// An attention head in a low format, and the bound of Theorem 1, as fragility_lessons/attention_error.py computes them.

(() => {
  const { SIZE, rounder, general, linear, log, norm, softmax, sensitivity, floats } = globalThis.slidersShared;
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const cut = (values, size) => Array.from({ length: values.length / size }, (_, k) => values.slice(size * k, size * (k + 1)));
  const transposed = (matrix) => matrix[0].map((_, k) => matrix.map((row) => row[k]));
  const dot = (row, other) => {
    let sum = 0;
    for (let k = 0; k < row.length; k++) sum += row[k] * other[k];
    return sum;
  };
  const product = (matrix, other) => matrix.map((row) => other.map((own) => dot(row, own)));  // by the transposed other
  const each = (matrix, change) => matrix.map((row) => row.map(change));
  const distance = (matrix, other) => norm(matrix.flatMap((row, i) => row.map((value, k) => value - other[i][k])));
  const trace = (matrix) => matrix.reduce((sum, row, k) => sum + row[k], 0);

  // ||V||_2: squared again and again, VVᵀ keeps its largest eigenvalue alone.
  function spectral(matrix) {
    const gram = product(matrix, matrix);
    let power = gram;
    for (let k = 0; k < 12; k++) {
      const size = trace(power), scaled = each(power, (value) => value / size);
      power = product(scaled, scaled);
    }
    return Math.sqrt(trace(product(gram, power)) / trace(power));
  }

  // Error, bound and terms of a head whose queries are its keys: `rows` and `values` are stored, `kept` rounds a result.
  function errors(rows, values, size, kept, u) {
    const root = Math.sqrt(rows[0].length), columns = transposed(values), products = product(rows, rows);
    const scores = each(products, (value) => value / root), p = scores.map(softmax), context = product(p, columns);
    const low = each(products, (value) => kept(kept(value) / Math.fround(root))).map((row) => softmax(row).map(kept));
    const observed = distance(each(product(low, columns), kept), context), length = norm(p.flat()), whole = norm(context.flat());
    const steepest = Math.max(...p.map(sensitivity)) / length, kappa = norm(scores.flat()) * steepest, chi = (norm(rows.flat()) ** 2 / root) * steepest;
    const bound = u * (2 + kappa + chi) * length * size;
    return { kappa, chi, absolute: [observed, bound], relative: [observed / whole, bound / whole] };
  }

  // The heads of every margin. Only the last ones are remembered: a slider of margins asks for them again and again.
  let known = {};
  function sweep({ rows, values, formats, margins, width, keys }, exponent, format) {
    if (known.exponent === exponent && known.format === format) return known.heads;
    const f = formats[format], round = rounder(f), kept = (value) => round(Math.fround(value));
    const stored = (numbers, factor) => cut(cut(numbers.map((value) => kept(factor * value)), width), keys);
    const directions = [...floats(rows)], own = stored([...floats(values)], 2 ** exponent), sizes = own.map(spectral);
    const heads = margins.map((margin) => stored(directions, Math.sqrt(margin * Math.sqrt(width))).map((queries, k) => errors(queries, own[k], sizes[k], kept, f.u)));
    known = { exponent, format, heads };
    return heads;
  }

  function sharpness(data, { margin, value_exponent, format, measure }, [[frame, points, curve, line], [termFrame, ...parts]]) {
    const { margins } = data, swept = sweep(data, value_exponent, format);
    const average = (some, read) => mean(some.map(read)), bounds = swept.map((some) => average(some, (head) => head[measure][1]));
    const X = linear(0, margins.at(-1)), Y = log(...data.limits[measure]), T = linear(0, 7), at = margins.map(X), title = `${format}: error of the head`, label = `${measure} error`;
    const tops = swept.map((some) => [0, 1, 2, 2 + average(some, (head) => head.kappa), 2 + average(some, (head) => head.kappa + head.chi)].map(T));
    const area = (k) => [termFrame.legend[k][0].fill, {
      x: [at[0], ...at, at.at(-1), ...[...at].reverse()], y: [tops[0][k + 1], ...tops.map((top) => top[k]), tops.at(-1)[k + 1], ...tops.map((top) => top[k + 1]).reverse()] }];
    const here = swept[margins.indexOf(margin)], observed = average(here, (head) => head[measure][0]), bound = average(here, (head) => head[measure][1]), there = { x: [X(margin), X(margin)], y: [0, SIZE] };
    return [
      `${format}, margin ${general(margin)}, values × 2^${general(value_exponent)}: ${label} ${general(observed, 2)}, bound ${general(bound, 2)}, ${general(bound / observed, 2)} times as large; `
        + `κ_softmax = ${general(average(here, (head) => head.kappa), 2)}, χ_score = ${general(average(here, (head) => head.chi), 2)}`,
      [{ ...frame, title, alt: `${title}: ${label} over ${frame.x.label}`, y: data.axes[measure] },
        { ...points, x: swept.flatMap((some, k) => some.map(() => at[k])), y: swept.flatMap((some) => some.map((head) => Y(head[measure][0]))) },
        { ...curve, x: at, y: bounds.map(Y) }, { ...line, ...there }],
      [termFrame, ...parts.slice(0, 4).map((part, k) => ({ ...part, shapes: [area(k)] })), parts[4], { ...parts[5], ...there }],
    ];
  }

  globalThis.slidersFormulas = { ...globalThis.slidersFormulas, "attention_error.sharpness": sharpness };
})();
