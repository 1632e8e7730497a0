"""Every wrong input of ``data/bad_inputs.yaml`` is answered by its line, before any work and without a traceback."""

import re
from pathlib import Path

import pytest
import yaml
from bad_inputs import KINDS

from fragility_lab.inputs.names import NEEDED
from fragility_lab.paths import OUTPUTS, PROJECT
from fragility_lab.running import execute
from fragility_numerics.formats import FORMATS, NARROW
from fragility_quantization.recipes import RECIPES

TABLE = yaml.safe_load((Path(__file__).parents[1] / "data" / "bad_inputs.yaml").read_text(encoding="utf-8"))
CASES = [(kind, case["given"], case["line"]) for kind, cases in TABLE.items() for case in cases]
REFUSALS = (SystemExit, ValueError, OSError)  # answered by their message alone (``running.execute``)


def way_out(kind: str, variable: str) -> str:
    return (
        f"Point {variable}= at {NEEDED[kind]} ({variable}=path/to/copy after `make reproduce` or `make diagnose`), or "
        f"leave {variable} unset: both then run on the embedded default, without a network."
    )


NAMES = {
    "formats": ", ".join(FORMATS),
    "narrow": ", ".join(NARROW),
    "recipes": ", ".join(RECIPES),
    "rounding": ", ".join(name for name, recipe in RECIPES.items() if recipe.rounds),
    "notebooks": ", ".join(execute.notebook_names()),
    "parameters": ", ".join(execute.defaults(execute.notebook_path("e2_predictor"))),
    "project": str(PROJECT),
    "results": ", ".join(sorted(found.parts[-3] for found in OUTPUTS.glob("*/tables/claims.csv"))),  # runs leave more
    "way_out_model": way_out("model", "MODEL"),
    "way_out_tokenizer": way_out("tokenizer", "MODEL"),
    "way_out_text": way_out("text", "DATA"),
}


def test_there_are_at_least_120_cases():
    assert len(CASES) >= 120
    assert {*TABLE} == {*KINDS}


@pytest.mark.parametrize(
    ("kind", "given", "line"), CASES, ids=[f"{kind}-{str(given)[1:60]}" for kind, given, _ in CASES]
)
def test_wrong_input_is_answered_by_its_line(kind, given, line, tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    with pytest.raises(REFUSALS) as refused:
        KINDS[kind](tmp_path, **given)
    said = str(refused.value)
    assert "\n" not in said
    for name, text in (NAMES | {"folder": str(tmp_path)}).items():
        line = line.replace(f"{{{name}}}", text)
    assert re.fullmatch(".+".join(map(re.escape, line.split("…"))), said), said
