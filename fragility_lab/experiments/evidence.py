"""The runs of E5 over many seeds, in a small table to which later sessions add seeds.

The rows of a run are too large to be published for every seed. The table has their summary (``outcomes.run_summary``),
with the digest of the run's specification and of the code that computed it.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fragility_lab.experiments import outcomes
from fragility_lab.experiments.e5 import Mitigation, TrainingSpec
from fragility_lab.inputs.loading import Inputs
from fragility_lab.running.engine import complete
from fragility_lab.running.environment import code_digest, keeps_stale


def summaries(
    specs: Sequence[TrainingSpec],
    inputs: Inputs,
    folder: Path,
    seeds: int,
    known: pd.DataFrame | None = None,
    rule: outcomes.SpikeRule = outcomes.SpikeRule(),
    **options,
) -> pd.DataFrame:
    """One row per run of ``specs``, in their order, that the table ``known`` has or whose seed is below ``seeds``.

    Runs of these seeds that ``known`` lacks are computed in ``folder``. A row of ``known`` counts if it is of the same
    specification, rule and code; if stale runs are kept, rows of other code count, too. ``options`` are those of
    ``engine.complete``.
    """
    found = _usable(known, rule)
    missing = [spec for spec in specs if spec.seed < seeds and spec.digest not in found.index]
    if missing:
        rows = complete(Mitigation, missing, inputs, folder, **options)
        steps = outcomes.step_rows(rows, missing[0].build_policy().base_epsilon)
        digests = {(spec.policy, spec.seed): spec.digest for spec in missing}
        computed = outcomes.run_summary(steps, rule)
        run = [digests[key] for key in zip(computed.policy, computed.seed)]
        computed = computed.assign(run=run, code=code_digest(TrainingSpec)).set_index("run")
        found = pd.concat([found, computed]) if len(found) else computed
    return found.loc[[spec.digest for spec in specs if spec.digest in found.index]].reset_index()


def _usable(known: pd.DataFrame | None, rule: outcomes.SpikeRule) -> pd.DataFrame:
    """The rows of ``known`` by the digest of their run, without rows of another rule or other code."""
    if known is None or known.empty:
        return pd.DataFrame(index=pd.Index([], name="run"))
    current = (known.code == code_digest(TrainingSpec)) | keeps_stale()
    if not current.all():
        warnings.warn(f"{(~current).sum()} runs of other code are left out (STALE=keep takes them)", stacklevel=3)
    return known[current & (known.onset_ratio == rule.ratio)].fillna({"ended": ""}).set_index("run")
