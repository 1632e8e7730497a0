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
  // fp32 numbers from their bytes in base64.
  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);

  globalThis.slidersShared = { SIZE, rounder, general, linear, log, median, floats };
})();
