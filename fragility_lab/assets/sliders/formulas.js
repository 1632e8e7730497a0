"use strict";
// What the formulas of pictures share: rounding, numbers as Python writes them, and places in a panel as
// fragility_lessons/drawing.py gives them. A formula takes its data, the values of the controls, and the first picture.

(() => {
  const SIZE = 2000, FAR = 3 * SIZE;
  const bits = new Uint32Array(1), single = new Float32Array(bits.buffer);

  // Rounds to a format: to nearest, ties to even.
  const rounder = ({ fraction, lowest, largest, saturates }) => (x) => {
    const size = Math.abs(x);
    if (!(size < Infinity)) return saturates && size === Infinity ? Math.sign(x) * largest : x;
    single[0] = size;
    const step = 2 ** (Math.max((bits[0] >>> 23) - 127, lowest) - fraction), below = Math.floor(size / step), rest = size / step - below;
    const nearest = (rest > 0.5 || (rest === 0.5 && below % 2) ? below + 1 : below) * step;
    return Math.sign(x) * (nearest <= largest ? nearest : saturates ? largest : Infinity);
  };

  // A number as Python's format ".{digits}g" writes it.
  function general(value, digits = 6) {
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
    const [mantissa, power] = value.toExponential(digits - 1).split("e").map(Number);
    return power < -4 || power >= digits ? `${mantissa}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}` : String(Number(value.toPrecision(digits)));
  }

  const placed = (share) => (Number.isNaN(share) ? -FAR : Math.max(-FAR, Math.min(FAR, Math.round(SIZE * share))));
  const linear = (low, high) => (x) => placed((x - low) / (high - low));
  const log = (low, high) => (x) => placed(Math.log10(x / low) / Math.log10(high / low));

  function median(values) {
    const sorted = Float64Array.from(values).sort(), half = sorted.length / 2;
    return (sorted[Math.ceil(half) - 1] + sorted[Math.floor(half)]) / 2;
  }
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

  // fp32 numbers from their bytes in base64.
  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);

  globalThis.slidersShared = { SIZE, rounder, general, linear, log, median, norm, softmax, sensitivity, floats };
})();
