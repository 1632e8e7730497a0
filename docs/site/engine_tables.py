"""Write tables of outputs into docs/engines.md, docs/exports.md and docs/clusters.md: ``make docs``."""

import re
from collections.abc import Callable, Iterator

import pandas as pd

from fragility_engines.proving.ground import summary
from fragility_lab.paths import OUTPUTS, PROJECT
from fragility_lab.running.files import write_whole

SMOLLM2 = "SmolLM2 135M"
MODELS = {"embedded GPT-2": "embedded", "embedded Llama": "embedded-llama", SMOLLM2: "smollm2-135m"}
Rows = Iterator[list[str]]


def proving_ground(tables: dict[str, pd.DataFrame]) -> Rows:
    """False alarms, misses and causes named of X3: of all engines, and of those held back."""
    yield ["model", "engines", "false alarms", "faults missed", "right cause named"]
    for model, table in tables.items():
        for which, part in (("all", table), ("held back", table[~table.seen])):
            counts = summary(part).drop(index="wrong verdicts on harmless engines")
            yield [model, f"{which}, {len(part)}", *(f"{row['count']} of {row.of}" for _, row in counts.iterrows())]


def referees(tables: dict[str, pd.DataFrame]) -> Rows:
    """KL of each engine of X4, and what the recipe says of it, emulated and predicted, over it."""
    kls = {name: table[table.quantity == "kl"].set_index("engine") for name, table in tables.items()}
    yield ["engine", *(title for name in kls for title in (f"{name}: KL", "emulated / KL", "predicted / KL"))]
    for engine in dict.fromkeys(engine for table in kls.values() for engine in table.index):
        yield [engine, *(cell for table in kls.values() for cell in of_engine(table, engine))]


def of_engine(table: pd.DataFrame, engine: str) -> list[str]:
    """KL, emulated over it and predicted over it, of an ``engine`` in a ``table`` by engine; of one in fp32 the KL."""
    if engine not in table.index:
        return ["not run", "", ""]
    row = table.loc[engine]
    if pd.isna(row.measured):
        return ["refused", "", ""]
    ratios = [row.emulated / row.measured, row.ratio] if pd.notna(row.ratio) else []
    return [f"{row.measured:.2e}", *(f"{ratio:.2f}" for ratio in ratios), *[""] * (2 - len(ratios))]


def mixes(tables: dict[str, pd.DataFrame]) -> Rows:
    """KL of llama-quantize's mixes and of plans at their size: predicted, emulated, and as llama.cpp measures it."""
    yield ["model", "file", "MB", "KL predicted", "emulated", "llama.cpp", "of the mix"]
    for model, table in tables.items():
        for row in table.itertuples():
            divergences = [f"{x:.5f}" for x in (row.kl_predicted, row.kl_emulated, row.kl_llama_cpp)]
            name = " at ".join(part.upper() if "_" in part else part for part in row.file.split(" at "))
            yield [model, name, f"{row.MB:.2f}", *divergences, f"{row.beside_mix:.2f}"]


def seconds(tables: dict[str, pd.DataFrame]) -> Rows:
    """Seconds of all runs of E2, E3 and E5. ``tables`` are those of E5's runs; the others lie beside them."""
    yield ["model", "E2", "E3", "E5", "together"]
    for model in tables:
        folder = OUTPUTS / MODELS[model] / "tables"
        sums = [pd.read_csv(folder / f"{name}_records.csv").seconds.sum() for name in ("e2", "e3", "e5")]
        yield [model, *(f"{x:,.0f}" for x in (*sums, sum(sums)))]


TABLES: dict[str, tuple[str, str, Callable[[dict[str, pd.DataFrame]], Rows]]] = {
    "proving ground": ("engines.md", "x3_engines", proving_ground),
    "referees": ("engines.md", "x4_referees", referees),
    "mixes": ("exports.md", "gguf_plans", mixes),
    "seconds of runs": ("clusters.md", "e5_records", seconds),
}


def written(name: str) -> str:
    """The table ``name`` of ``TABLES`` as Markdown, of all models that have its file in outputs."""
    _, file, rows = TABLES[name]
    paths = {model: OUTPUTS / folder / "tables" / f"{file}.csv" for model, folder in MODELS.items()}
    head, *body = rows({model: pd.read_csv(path) for model, path in paths.items() if path.exists()})
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *body)).replace(" --- ", "---")


def main() -> None:
    for name, (page, *_) in TABLES.items():
        path = PROJECT / "docs" / page
        ends = re.compile(rf"(?<=<!-- {name}: make docs -->\n\n).*?(?=\n<!-- end of {name} -->)", re.S)
        text, count = ends.subn(lambda _, name=name: written(name), path.read_text(encoding="utf-8"))
        if count != 1:
            raise ValueError(f"{page} must have one place for the table {name!r}, between two comments, got {count}")
        write_whole(path, text)
        print(f"written: the table {name!r} in {path}")


if __name__ == "__main__":
    main()
