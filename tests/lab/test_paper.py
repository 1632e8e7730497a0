"""Citations of the paper: docs/paper_to_code.md is complete and true, and every citation has its number and label.

data/paper_labels.json holds the number that each label of paper.tex has in the PDF.
"""

import ast
import importlib
import inspect
import json
import re
from functools import cache
from pathlib import Path

import pytest

from fragility_lab.paths import NOTEBOOKS, PROJECT

NUMBERS = json.loads((Path(__file__).parents[1] / "data" / "paper_labels.json").read_text())
KINDS = {
    "eq": "Eq. ({})", "thm": "Theorem {}", "lem": "Lemma {}", "cor": "Corollary {}", "prop": "Proposition {}",
    "rem": "Remark {}", "alg": "Algorithm {}", "sec": "Section {}", "subsec": "Section {}", "app": "Appendix {}",
    "fig": "Figure {}", "tab": "Table {}",
}  # fmt: skip
PAPER = PROJECT.parent / "shared" / "paper" / "paper.tex"
ROWS = re.findall(
    r"^\| ([^|]+) \| (?:`([^|`]+)`|–) \| [^|]+ \| `(fragility_[\w.]+)` \| `(tests/[\w/]+\.py)::(\w+)` \| ([^|]+) \|$",
    (PROJECT / "docs" / "paper_to_code.md").read_text(encoding="utf-8"),
    re.M,
)


def cited(label: str) -> str:
    """The name that the PDF gives to ``label``: kind and number."""
    return KINDS[label.split(":")[0]].format(NUMBERS[label])


# --- The table -----------------------------------------------------------------------------------


def test_every_statement_of_the_paper_is_in_the_table():
    statements = {
        label for label in NUMBERS if label.split(":")[0] in {"eq", "thm", "lem", "cor", "prop", "rem", "alg"}
    }
    listed = {label for _, label, *_ in ROWS}
    assert statements <= listed and {"Section 5.1", "Appendix A.7"} <= {number for number, *_ in ROWS}
    numbers = {NUMBERS[label] for label in statements if label.startswith("eq:")}
    assert numbers == {str(number) for number in range(1, 25)}


def test_every_row_of_the_table_was_read():
    page = (PROJECT / "docs" / "paper_to_code.md").read_text(encoding="utf-8")
    assert len(ROWS) == len(re.findall(r"^\| (?!number|---)", page, re.M)) > 60


@cache
def functions_of(test: Path) -> dict[str, str]:
    """The source of each function of a test file."""
    source = test.read_text(encoding="utf-8")
    lines = source.splitlines()
    nodes = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes}


def used_by(test: Path, name: str) -> set[str]:
    """The words of test ``name`` and of the fixtures and helpers of its file that it names."""
    functions = functions_of(test)
    assert name in functions, f"no test {name} in {test}"
    used, words = set(), {name}
    while words & functions.keys() - used:
        used |= words & functions.keys()
        words = set(re.findall(r"\w+", "\n".join(functions[one] for one in used)))
    return words


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[2].rpartition('.')[2]}")
def test_a_row_leads_to_function_test_and_notebook(row):
    number, label, dotted, test, name, notebook = row
    module, function = dotted.rsplit(".", 1)
    text = " ".join((inspect.getdoc(getattr(importlib.import_module(module), function)) or "").split())
    if label:
        assert number == cited(label)
        assert f"{number} (`{label}`)" in text, f"{dotted} does not cite {number} (`{label}`)"
    else:
        assert number == "Lemma 6" and number in text  # the one statement without a label
    assert function in used_by(PROJECT / test, name), f"{name} does not use {function}"
    assert notebook == "–" or (NOTEBOOKS / f"{notebook.strip('`')}.ipynb").is_file()


def test_labels_are_those_of_the_paper():
    """Lemma 6 is the sixth lemma; where the paper is at hand, labels are those of paper.tex, in its order."""
    kinds = [label.split(":")[0] for label in NUMBERS]
    for kind in ("eq", "thm", "lem"):
        numbers = [int(number) for label, number in NUMBERS.items() if label.startswith(f"{kind}:")]
        assert numbers == list(range(1, kinds.count(kind) + 1))
    if PAPER.exists():
        text = PAPER.read_text(encoding="utf-8")
        assert re.findall(r"\\label\{([^}]+)\}", text) == list(NUMBERS)
        assert text.count(r"\begin{lemma}") == 6


# --- Citations in code, tests, notebooks and pages -------------------------------------------------

FILES = sorted(
    path
    for pattern in ("fragility_*/**/*.py", "tests/**/*.py", "notebooks/**/*.ipynb", "docs/*.md", "*.md")
    for path in PROJECT.glob(pattern)
    if ".ipynb_checkpoints" not in path.parts
)
KIND = "|".join(KINDS)
WORDS = {
    "eq": r"[Ee]q\.|[Ee]quations?", "thm": r"thm\.|[Tt]heorems?", "lem": r"lem\.|[Ll]emmas?",
    "cor": r"cor\.|[Cc]orollary", "prop": r"prop\.|[Pp]ropositions?", "rem": r"rem\.|[Rr]emark",
    "alg": r"alg\.|[Aa]lgorithms?", "sec": r"sec\.|[Ss]ection", "subsec": r"subsec\.|[Ss]ubsection",
    "app": r"app\.|[Aa]ppendix", "fig": r"fig\.|[Ff]igure", "tab": r"tab\.|[Tt]able",
}  # fmt: skip
NAMES = {kind: "|".join(label[len(kind) + 1 :] for label in NUMBERS if label.startswith(f"{kind}:")) for kind in KINDS}
BARE = re.compile(rf"(?<![`\w])(?:{'|'.join(NUMBERS)})(?![\w-])")  # a label without its backquotes
STATEMENT = re.compile(  # with no decimal point: Lemma 3.1 is from another source
    r"\b((?:Theorem|Lemma|Corollary|Proposition|Remark|Algorithm) \d+|Eq\. \(?\d+\)?)(?!\.?\d)"
)
KNOWN = {cited(label) for label in NUMBERS} | {"Lemma 6"}  # the one statement without a label
OLD = re.compile("|".join(rf"\b(?:{WORDS[kind]}) (?:{NAMES[kind]})(?![\w-])" for kind in KINDS))  # kind and bare name


def prose(path: Path) -> str:
    """The text of a file on one line: that of all cells of a notebook, without the signs of comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return re.sub(r"\s*\n\s*(?:# )?", " ", text)


def wrong_citations(text: str) -> list[str]:
    """Every citation in ``text`` that lacks its number or its label, has another one's, or has the old form."""
    wrong = []
    for match in re.finditer(rf"`((?:{KIND}):[\w:-]+)`", text):
        label, before = match[1], text[max(0, match.start() - 40) : match.start()]
        separator = next((sign for sign in (" (", " | ") if before.endswith(sign)), None)
        if label not in NUMBERS or separator is None or not before.endswith(cited(label) + separator):
            wrong.append(before + match[0])
    wrong += BARE.findall(text) + OLD.findall(text)
    return wrong + [found for found in STATEMENT.findall(text) if found not in KNOWN]


def test_wrong_citations_are_found():
    old, label, close = "Theorem at" + "tn", "thm:at" + "tn", "`)"
    for text in (
        old,
        f"Theorem 2 (`{label}{close}",
        f"(`{label}{close}",
        f"Theorem 1 (`{label}s{close}",
        f"see {label}.",
        "Theorem " + "4",
        "Eq. " + "7",
    ):
        assert wrong_citations(text), text
    assert not wrong_citations(f"see Theorem 1 (`{label}{close}, Lemma 6 and Theorem 1 with remainder")


def docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return " ".join(" ".join(ast.get_docstring(node) or "" for node in nodes).split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_citations_have_number_and_label(path):
    """Each is right. Docstrings and pages give each number with its label at least once; shown strings need not."""
    text = prose(path)
    assert wrong_citations(text) == []
    text = docstrings(path) if path.suffix == ".py" else text
    labelled = set(re.findall(STATEMENT.pattern + rf" (?:\(|\| )`(?:{KIND}):", text)) | {"Lemma 6"}
    assert set(STATEMENT.findall(text)) <= labelled
