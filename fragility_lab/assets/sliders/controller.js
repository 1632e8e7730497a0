"use strict";
// The printed controller on a recorded run, as fragility_lessons/controller.py computes it: `inspections` are its
// `inspections`, and `controller` draws its `playground`. Recorded statistics stay, whatever epsilon a block gets.

(() => {
  const { SIZE, general, log } = globalThis.slidersShared;
  const short = (value) => general(value, 2);

  // One entry for each inspection: what each block's gates say, which one stops it, its epsilon and its rest.
  function inspections({ risk, dominance, ratio }, { precision, risk: logRisk, dominance: logDominance, target, budget, cooldown }, { base, cap }) {
    const unit = 2 ** -precision, epsilon = risk[0].map(() => base), until = risk[0].map(() => 0);
    return risk.map((G, now) => {
      const wanted = G.map((_, block) => Math.max(epsilon[block], Math.min(Math.max((ratio[now][block] * unit * base) / target, base), cap)));
      const first = G.map((_, block) => [G[block] >= 10 ** logRisk, dominance[now][block] >= 10 ** logDominance, ratio[now][block] * unit < 1, until[block] <= now]);
      const eligible = first.map((gates) => gates.every(Boolean));
      const ahead = G.map((own, block) => G.filter((other, k) => eligible[k] && (other > own || (other === own && k < block))).length);
      const blocks = G.map((_, block) => {
        const within = ahead[block] < budget, raised = eligible[block] && within && wanted[block] > epsilon[block];
        const gates = [...first[block], within, raised], stop = gates.indexOf(false);
        return { gates, eligible: eligible[block], stop: stop < 0 ? gates.length : stop, wait: until[block] - now, epsilon: raised ? wanted[block] : epsilon[block] };
      });
      blocks.forEach(({ gates }, block) => {
        if (gates.at(-1)) [epsilon[block], until[block]] = [wanted[block], now + cooldown];
      });
      return blocks;
    });
  }

  // The picture for `values` of the controls: `first` is that of the first values, with the frames and marks to change.
  function controller({ runs, names, colours, passed, failed, undecided, interval, ...bounds }, values, [[frame, cells, dots, line], [gateFrame, gateCells]]) {
    const run = runs[values.run], seen = inspections(run, values, bounds), layers = seen[0].length, last = interval * seen.length;
    const place = (share) => Math.round(SIZE * share), y = (block) => place(1 - (block + 0.5) / layers);
    const fills = [...Array(layers).keys()].flatMap((block) => seen.map((blocks) => colours[blocks[block].stop]));
    const at = place((values.step - interval / 2) / last), here = seen[values.step / interval - 1], columns = colours.length;
    const shades = here.flatMap(({ gates, eligible }) => {
      const [, , , , within, raised] = gates, shade = (gate) => (gate ? passed : failed);
      return [...gates.slice(0, 4).map(shade), eligible ? shade(within) : undecided, eligible && within ? shade(raised) : undecided, raised ? colours.at(-1) : undecided];
    });
    const now = values.step / interval - 1, numbers = [run.risk, run.dominance, run.ratio.map((row) => row.map((each) => each * 2 ** -values.precision))];
    const texts = here.flatMap(({ gates, wait, epsilon }, block) => {
      const told = [...numbers.map((rows, column) => [column, short(rows[now][block])]), ...(wait > 0 ? [[3, String(wait)]] : []), ...(epsilon > bounds.base ? [[6, short(epsilon)]] : [])];
      return told.map(([column, text]) => ({ text, at: [place((column + 0.5) / columns), y(block)], align: "middle", line: column === 6 && gates.at(-1) ? "#ffffff" : "#262626", side: "center" }));
    });
    const heads = [`G ≥\n${short(10 ** values.risk)}`, `φ ≥\n${short(10 ** values.dominance)}`, "ρ_LN\n< 1", `cooldown\nc = ${values.cooldown}`, `budget\nB = ${values.budget}`, `update\nρ* = ${short(values.target)}`, "raised\nto ε"];
    const ticks = gateFrame.x.ticks.map(([where, , ...shade], column) => [where, heads[column], ...shade]);
    const counts = names.map((name, stop) => `${name}: ${seen.flat().filter((block) => block.stop === stop).length}`);
    return [
      `${values.run} run, u = 2^-${values.precision}, ${seen.flat().length} inspections of a block: ${counts.join(", ")}. The released controller acts ${run.acted.length} times.`,
      [frame, { ...cells, fills }, { ...dots, x: run.acted.map(([step]) => place(step / last)), y: run.acted.map(([, block]) => y(block)) }, { ...line, x: [at, at] }],
      [{ ...gateFrame, title: `step ${values.step}: pale blue passes, pale orange fails`, x: { ...gateFrame.x, ticks } }, { ...gateCells, fills: shades }, ...texts],
    ];
  }

  // The printed update of epsilon over the variance: `update` in Python.
  function update({ width, base, variances }, { variance_exponent, target, cap_exponent, precision }, [[frame, curve, dot, blocks, here, name], [ratios, band, before, guarantee, after, reached, there]]) {
    const unit = 2 ** -precision, cap = 10 ** cap_exponent, own = 10 ** variance_exponent;
    const at = (variance) => {
      const wanted = width * unit * variance, epsilon = Math.max(base, Math.min(Math.max(wanted / target, base), cap));
      return { epsilon, before: wanted / base, after: wanted / epsilon, bound: Math.max(target, wanted / cap) };
    };
    const X = log(1e-6, 1e3), E = log(1e-6, 2), R = log(1e-4, 1e4), seen = variances.map(at), chosen = at(own), x = variances.map(X);
    const line = { x: [X(own), X(own)], y: [0, SIZE] }, one = (y) => ({ x: [X(own)], y: [y] }), [gate, gives] = chosen.before < 1 ? ["open", "gives"] : ["closed", "would give"];
    return [
      `σ² = ${short(own)}, u = 2^-${precision}: ρ_LN = ${general(chosen.before, 3)} before, the gate ρ_LN < 1 is ${gate}; the update ${gives} ε = ${short(chosen.epsilon)} and ρ_LN = ${general(chosen.after, 3)}, guaranteed ${general(chosen.bound, 3)}`,
      [frame, { ...curve, x, y: seen.map((each) => E(each.epsilon)) }, { ...dot, ...one(E(chosen.epsilon)) }, blocks, { ...here, ...line }, name],
      [ratios, { ...band, cells: [[0, R(target), SIZE, R(1)]] }, ...[[before, "before"], [guarantee, "bound"], [after, "after"]].map(([mark, of]) => ({ ...mark, x, y: seen.map((each) => R(each[of])) })),
        { ...reached, ...one(R(chosen.after)) }, { ...there, ...line }],
    ];
  }

  globalThis.slidersFormulas = { ...globalThis.slidersFormulas, "controller.playground": Object.assign(controller, { inspections }), "controller.update": update };
})();
