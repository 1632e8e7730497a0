"""The report: one HTML page that shows the paper beside a run. It is made from the run's tables and figures alone.

The same tables and figures give the same bytes.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fragility_lab import paths
from fragility_lab.inputs.names import EMBEDDED, embedded_checkpoints
from fragility_lab.paths import CUSTOM
from fragility_lab.reporting.html import data_uri, template
from fragility_lab.reporting.tables import Tables, cells, duration, number, policy_summary, read_table, shown
from fragility_lab.reporting.verdicts import FAILS, HOLDS, NO_DIFFERENCE, NOT_RUN, UNDECIDED, VERDICTS, compare
from fragility_lab.running.execute import defaults, notebook_path, profile_names, profile_values
from fragility_lab.running.files import write_whole
from fragility_lab.running.provenance import asked

# Experiment: the notebook that runs it, and a table that it always leaves.
EXPERIMENTS = {
    "E1": ("e1_controlled_sweeps", "e1_attention"),
    "E2": ("e2_predictor", "e2_runs"),
    "E3": ("e3_patching", "e3_runs"),
    "E5": ("e5_mitigation", "e5_runs"),
}
LABELS = {
    "embedded": "GPT-2, 3 M", "embedded-llama": "Llama, 3 M",
    "smollm2-135m": "SmolLM2 135M", "gemma3-270m": "Gemma 3 270M",
}  # fmt: skip
VERSIONS = ("python", "torch", "transformers", "datasets", "tokenizers", "numpy", "scipy", "pandas", "platform", "code")


def read_tables(profile: str) -> dict[str, pd.DataFrame]:
    """Every table under ``outputs/<profile>/tables`` by its name."""
    folder = paths.output_folder(profile, "tables")
    return {path.stem: read_table(path) for path in sorted(folder.glob("*.csv"))}


def listed(values: pd.Series) -> str:
    """The distinct values in order of appearance."""
    return ", ".join(number(value) for value in values.dropna().unique())


def sentences(comparison: pd.DataFrame) -> list[str]:
    """One sentence per experiment: which of the paper's claims hold here, which do not, and how many are undecided."""
    claims = comparison[comparison.claim != ""]
    return [_sentence(name, rows) for name, rows in claims.groupby(claims.experiment.str[:2], sort=False)]


def _sentence(experiment: str, claims: pd.DataFrame) -> str:
    tested = claims[claims.verdict != NOT_RUN]
    if tested.empty:
        return f"{experiment} was not run."
    variant = tested.experiment.str.partition(", ")[2]
    named = tested.claim + variant.map(lambda name: f" ({name})" if name else "")
    parts = []
    for verdict, one, several in (
        (HOLDS, *[f"of {len(tested)} claims hold"] * 2),
        (FAILS, "does not hold", "do not hold"),
        (NO_DIFFERENCE, "makes no difference that matters", "make no difference that matters"),
        (UNDECIDED, "is undecided", "are undecided"),
    ):
        claimed = named[tested.verdict == verdict]
        words = f" ({'; '.join(claimed)})" if len(claimed) and verdict != UNDECIDED else ""
        if len(claimed) or verdict == HOLDS:
            parts.append(f"{len(claimed)} {one if len(claimed) == 1 else several}{words}")
    return f"{experiment}: {', '.join(parts)}."


def provenance(experiment: str, records: pd.DataFrame) -> dict[str, str]:
    """The ``records`` of one ``experiment`` (``RunStore.records``) in a few words."""
    executions = records.groupby("precision", sort=False).execution.agg(listed)
    columns = ["model", "data", "device_name", "threads", "monitored", "reference"]
    record = records.reindex(columns=columns).apply(listed)
    return {
        "experiment": experiment,
        "model": record.model,
        "data": record.data,
        "inputs": f"{record.model} on {record.data}",
        "formats": ", ".join(f"{precision} {how}" for precision, how in executions.items()),
        "device": record.device_name,
        "attention": f"{record.monitored} monitored, {record.reference} for the reference",
        "runs": str(len(records)),
        "seconds": duration(records.seconds.sum()),
        "threads": record.threads or "–",
    }


def command(results: str, records: pd.DataFrame | None, profile: str | None = None) -> str:
    """The shell command that makes this run; it names a model or text other than the profile's.

    ``results`` is the folder of the results. The Makefile appends ``CUSTOM`` to its name for one's own model or text.
    Without ``profile``, the name of the folder gives the profile; for another name it is the Makefile's own.
    """
    named = results.removesuffix(CUSTOM)
    profile = profile or (named if named in profile_names() else EMBEDDED)
    words = ["make", "reproduce"] + ([] if profile == EMBEDDED else [f"PROFILE={profile}"])
    own: list[str] = []
    if records is not None:
        notebook, _ = EXPERIMENTS["E2"]
        usual = defaults(notebook_path(notebook)) | profile_values(profile, notebook)
        given = {name: str(records[name].iloc[0]) for name in ("model", "data")}
        own = [f"{name.upper()}={shlex.quote(value)}" for name, value in given.items() if value != usual[name]]
    elsewhere = results != profile + CUSTOM * bool(own)
    return " ".join(words + own + [f"RESULTS={shlex.quote(results)}"] * elsewhere)


def stopped(tables: dict[str, pd.DataFrame]) -> list[str]:
    """Runs of E5 that ended early, with the reasons."""
    found = []
    for name, setting in (("e5_runs", ""), ("e5_scarce_seeds", "six actions, ")):
        runs = tables.get(name, pd.DataFrame(columns=["ended"]))
        found += [
            f"{setting}{run.policy}, seed {run.seed}: {run.ended} at step {run.steps - 1}"
            for run in runs[runs.ended.notna() & (runs.ended != "")].itertuples()
        ]
    return found


def column(name: str, tables: Tables) -> dict[str, Any]:
    """One model in the strip of claims: its label, whether it is a toy, its tables, and verdicts by experiment.

    The first record of its runs says which model it is; without one its label is ``name``.
    """
    recorded = [tables[key].model.iloc[0] for key in ("e2_records", "e3_records", "e5_records") if key in tables]
    model = Path(recorded[0]).stem if recorded else ""
    comparison = compare(tables)
    return {
        "label": LABELS.get(model, [*recorded, name][0]).replace(",", ""),
        "kind": ("toy" if model in embedded_checkpoints() else "real") if recorded else "",
        "tables": tables,
        "claims": comparison[comparison.claim != ""].groupby("experiment", sort=False),
        "shown": shown(comparison).set_index(["experiment", "quantity"]),
    }


def held(columns: Sequence[dict[str, Any]], kind: str, experiments: Sequence[str]) -> tuple[int, int]:
    """The number of claims of ``experiments`` that hold on models of ``kind``, and the number tested on them."""
    of_kind = [each["claims"].obj for each in columns if each["kind"] == kind]
    rows = pd.concat(of_kind or [columns[0]["claims"].obj[:0]])
    verdicts = rows.verdict[rows.experiment.str[:2].isin(experiments) & (rows.verdict != NOT_RUN)]
    return int((verdicts == HOLDS).sum()), len(verdicts)


def page(
    profile: str, tables: dict[str, pd.DataFrame], figures: Path, others: Mapping[str, dict[str, pd.DataFrame]] = {}
) -> str:
    """The report of ``tables`` and of the PNGs in the folder ``figures`` as HTML.

    ``others`` are the tables of other models by name. Each gets a column in the strip and beside E2's and E3's numbers.
    """
    comparison = compare(tables)
    records = {name: tables[key] for name in EXPERIMENTS if (key := f"{name.lower()}_records") in tables}
    provenances = pd.DataFrame([provenance(name, found) for name, found in records.items()])
    recorded = pd.concat(records) if records else pd.DataFrame()
    strip = {name: column(name, found) for name, found in ({profile: tables} | dict(others)).items()}
    claims = pd.concat([each["claims"].obj for each in strip.values()])
    return template("report/page.html.jinja", number=number, cells=cells).render(
        profile=profile,
        command=command(profile, records.get("E2"), asked().get("profile")),
        missing={name: book for name, (book, table) in EXPERIMENTS.items() if table not in tables},
        provenance=provenances,
        recorded=list(records),
        models=[*provenances.model.unique()] if records else [],
        versions={name: listed(recorded[name]) for name in VERSIONS if name in recorded},
        sentences=sentences(comparison),
        comparison=shown(comparison).groupby("experiment", sort=False),
        strip=[*strip.values()],
        held={
            (kind, about): held([*strip.values()], kind, of)
            for kind in ("toy", "real")
            for about, of in (("windows", ("E2", "E3")), ("training", ("E5",)))
        },
        counts={verdict: int((claims.verdict == verdict).sum()) for verdict in VERDICTS},
        others={name: strip[name] for name in others},
        stopped=stopped(tables),
        policy_summary=policy_summary,
        image=lambda name: data_uri(path.read_bytes()) if (path := figures / f"{name}.png").is_file() else None,
        tables=tables,
    )


def of_one_model(tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """``tables`` without those of X1 if its runs, over as many windows as E2's, have other scores: another model's."""
    if not {"e2_runs", "x1_runs"} <= {*tables}:
        return tables
    both = tables["e2_runs"].merge(tables["x1_runs"], on=["precision", "length", "seed", "windows"])
    if np.allclose(both.combined_pearson_x, both.combined_pearson_y, rtol=1e-3, equal_nan=True):
        return tables
    return {name: table for name, table in tables.items() if not name.startswith("x1_")}


def write(profile: str) -> Path:
    """Write ``outputs/<profile>/report.html`` from the files in that folder, and return its path."""
    path = paths.output_folder(profile) / "report.html"
    models = LABELS if profile in embedded_checkpoints() else ()
    others = {name: read_tables(name) for name in models if name != profile and (paths.OUTPUTS / name).is_dir()}
    html = page(profile, of_one_model(read_tables(profile)), paths.output_folder(profile, "figures"), others)
    write_whole(path, html)
    return path
