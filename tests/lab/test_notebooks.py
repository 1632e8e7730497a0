"""Committed notebooks are clean: one kernel, no widget state, no machine in them, every code cell run."""

import re
import shutil
import subprocess

import nbformat
import pytest
import torch
from nbformat.sign import NotebookNotary
from traitlets.config import PyFileConfigLoader
from transformers import LlamaConfig, LlamaForCausalLM

from fragility_lab import paths
from fragility_lab.inputs.checkpoints import load_tokenizer
from fragility_lab.paths import NOTEBOOKS, PROJECT
from fragility_lab.running.execute import notebook_names, notebook_path
from fragility_lessons.exercises import exercises

ALL = notebook_names()


def test_cited_sections_of_the_protocol_exist():
    text = (PROJECT / "docs/protocol.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^## (\d+)\.", text, re.M))
    files = [*PROJECT.glob("fragility_*/**/*.py"), *PROJECT.glob("tests/**/*.py"), *NOTEBOOKS.glob("profiles/*/*.yaml")]
    cited = {
        found for file in files for found in re.findall(r"protocol sections? (\d+)", file.read_text(encoding="utf-8"))
    }
    assert len(cited) >= 6 and cited <= sections


def run_cells(name: str, **values: object) -> None:
    """Run the code of the notebook ``name`` here, with ``values`` on top of its parameters."""
    names: dict[str, object] = {}
    for cell in nbformat.read(notebook_path(name), as_version=4).cells:
        if cell.cell_type == "code":
            exec(cell.source, names)
        if "parameters" in cell.metadata.get("tags", []):
            assert values.keys() <= names.keys()
            names |= values


@pytest.mark.parametrize("name", ALL)
def test_notebook_is_clean(name):
    notebook = nbformat.read(notebook_path(name), as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.cells[0].cell_type == "markdown"
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "jupyter", "mystnb"}
        if cell.cell_type != "code":
            continue
        assert cell.execution_count is not None, f"not executed: {cell.source[:60]}"
        most = 25 if "parameters" in cell.metadata.get("tags", []) else 15
        assert len(cell.source.splitlines()) <= most, f"a cell is thin: {cell.source[:60]}"
        for output in cell.outputs:
            assert output.output_type != "error"
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
            assert "/home/" not in str(output)
            assert "/root/" not in str(output)


def test_every_target_of_make_has_its_notebook():
    called = re.findall(r"\$\(EXECUTE\) (\w+)", (PROJECT / "Makefile").read_text())
    assert {"e1_controlled_sweeps", "e2_predictor", "e3_patching", "e5_mitigation", "report"} <= set(called) <= set(ALL)


def test_experiments_run_with_another_family(tmp_path, monkeypatch):
    """What `make reproduce MODEL=...` does with a model that is no GPT-2: nothing may be read from GPT-2's names."""
    monkeypatch.setattr(paths, "PROJECT", tmp_path)
    monkeypatch.setattr(paths, "OUTPUTS", tmp_path / "outputs")
    torch.manual_seed(0)
    tokenizer = load_tokenizer("embedded")
    tokenizer.save_pretrained(tmp_path / "llama")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    ).save_pretrained(tmp_path / "llama")  # fmt: skip
    given = {"model": str(tmp_path / "llama"), "profile": "smoke-custom"}
    run_cells("e2_predictor", **given)
    run_cells("e3_patching", **given)
    run_cells("e5_mitigation", **given, steps=32)  # controllers begin to act at step 24
    run_cells("report", profile="smoke-custom")
    assert (tmp_path / "outputs/smoke-custom/report.html").is_file()


def links(name: str) -> set[str]:
    """Local targets of the links in the text of the notebook ``name``."""
    cells = nbformat.read(notebook_path(name), as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return set(re.findall(r"\]\((?!https?://|#)([^)#]+)\)", text))


def test_start_page_lists_every_notebook():
    assert '"/lab/tree/notebooks/start.ipynb"' in (PROJECT / "jupyter_server_config.py").read_text()
    listed = {target for target in links("start") if target.endswith(".ipynb")}
    assert listed == {f"{name}.ipynb" for name in ALL if name != "start"}


@pytest.mark.parametrize("name", ALL)
def test_links_lead_somewhere(name):
    folder = notebook_path(name).parent
    for target in links(name):
        assert (folder / target).exists(), target
        assert (folder / target).resolve().is_relative_to(PROJECT), f"{target} is outside of what JupyterLab serves"


# --- Lessons --------------------------------------------------------------------------------------

LESSONS = [
    name for name in ALL if name.startswith(("theory/1", "theory/2", "theory/3", "theory/4", "theory/5", "theory/7"))
]
MOST_WORDS = 80
NO_BAR = (
    r"\A(?:\w+\.EXERCISES[.\[]|Explorer\(|bits\.Bits\("
    r"|\w+\.(?:live|failure|formats_table|free|medians)\(\)|from |import )"
)
SIDES = re.compile(
    r"\b(?:left|right) (?:picture|panel|one)\b|\b(?:Left|Right):|\((?:left|right)\)|\bon the (?:left|right)[.:]"
)


def is_written_by_the_student(cell) -> bool:
    return ".CODING.check(" in cell.source


def shown(cell) -> bool:
    """Whether a code cell shows a picture, a table or an exercise; printed checks are folded and do not count."""
    return is_written_by_the_student(cell) or any(out.output_type == "execute_result" for out in cell.outputs)


def words(source: str) -> int:
    """Words of Markdown, between white space; a formula is one, and what is folded away or a definition counts not."""
    unfolded = re.sub(r"<details>\s*<summary>(.*?)</summary>.*?</details>", r"\1", source, flags=re.S)
    unfolded = re.sub(r'<abbr title="[^"]*">(.*?)</abbr>', r"\1", unfolded, flags=re.S)
    return len(re.sub(r"\$\$.*?\$\$|\$[^$]*\$", "formula", unfolded, flags=re.S).split())


def test_a_formula_counts_as_one_word_and_what_is_folded_does_not_count():
    assert words("So $a + b$, and\n\n$$c = d + e$$\n\n**end**") == 5
    assert words('the <abbr title="σ²: how far rows vary">variance</abbr> $v$') == 3
    assert words("Begin\n<details><summary>Step one</summary>\n\nmany words\n\n</details>\nend") == 4


@pytest.mark.parametrize("name", LESSONS)
def test_few_words_between_pictures(name):
    read = 0
    for cell in nbformat.read(notebook_path(name), as_version=4).cells:
        if cell.cell_type == "markdown":
            read += words(cell.source)
            assert read <= MOST_WORDS, f"{read} words up to: {cell.source[:60]}"
        elif shown(cell):
            read = 0


@pytest.mark.parametrize("name", LESSONS)
def test_code_is_folded_but_for_what_the_student_writes(name):
    cells = [cell for cell in nbformat.read(notebook_path(name), as_version=4).cells if cell.cell_type == "code"]
    opened = [cell for cell in cells if "jupyter" not in cell.metadata]
    assert len(opened) == 1 and is_written_by_the_student(opened[0])
    for cell in cells:
        if cell is not opened[0]:
            assert cell.metadata["jupyter"] == {"source_hidden": True}
            # On the site, a check can be unfolded. A question or a picture has no bar above it.
            told = "hide-input" if not re.search(NO_BAR, cell.source, re.M) else "remove-input"
            assert told in cell.metadata["tags"], cell.source[:60]
    assert opened[0].outputs[0].text.startswith("Not yet. Hint: ")
    assert opened[0].metadata["mystnb"] == {"remove_code_source": False}, "slides show what the student writes"


def test_panels_are_first_and_second_since_narrow_pages_stack_them():
    texts = [(PROJECT / "fragility_lab/assets/exercises.yaml").read_text(encoding="utf-8")]
    for name in ALL:
        if name.startswith("theory/"):
            cells = nbformat.read(notebook_path(name), as_version=4).cells
            texts += [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert SIDES.search("In the right picture") and SIDES.search("Left: the numbers")
    assert [found[0] for text in texts if (found := SIDES.search(" ".join(text.split())))] == []


@pytest.mark.parametrize("name", LESSONS)
def test_answers_of_a_lesson_differ(name):
    cells = nbformat.read(notebook_path(name), as_version=4).cells
    asked = [found for cell in cells if (found := re.fullmatch(r"(\w+)\.EXERCISES\[(\d+)\]", cell.source))]
    assert [int(found[2]) for found in asked] == list(dict.fromkeys(int(found[2]) for found in asked))
    assert len(asked) == len(exercises(asked[0][1])), "every exercise is asked once"
    if name.startswith(("theory/1", "theory/3", "theory/5")):
        answers = [exercises(found[1])[int(found[2])].solution for found in asked]
        assert len(set(map(str, answers))) == len(answers) and not {"0", "none", "none of these"} & set(
            map(str, answers)
        )


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_has_predictions_before_their_pictures(name):
    predicted, pending = 0, False
    for cell in nbformat.read(notebook_path(name), as_version=4).cells:
        if cell.cell_type != "code":
            continue
        if found := re.fullmatch(r"(\w+)\.EXERCISES\[(\d+)\]", cell.source):
            exercise = exercises(found[1])[int(found[2])]
            if exercise.question.startswith("Predict: "):
                assert exercise.options and "picture" in exercise.explanation and not pending
                pending = True
        elif pending and shown(cell):
            assert "Explorer(" in cell.source or ".live()" in cell.source
            predicted, pending = predicted + 1, False
    assert predicted >= 2 and not pending


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_links_the_glossary_first(name):
    first = nbformat.read(notebook_path(name), as_version=4).cells[0].source
    assert first.startswith("# ") and "](../../docs/glossary.md)" in first


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_takes_as_long_as_lecturers_are_told(name):
    first = nbformat.read(notebook_path(name), as_version=4).cells[0].source
    row = re.search(rf"{name}\.ipynb\) \| (\d+) \|", (PROJECT / "docs/teaching.md").read_text(encoding="utf-8"))
    assert f"About {row[1]} minutes." in first.replace("\n", " ")


def test_make_lab_trusts_the_notebooks_of_the_start_page_alone(tmp_path, monkeypatch):
    """What a student handed in beside them is not trusted: its scripts would run where the lecturer is logged in."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "notebooks", project / "notebooks", ignore=shutil.ignore_patterns(".*", "profiles"))
    shutil.copy(PROJECT / "jupyter_server_config.py", project)
    lesson = project / "notebooks" / "theory" / "1_floating_point_and_softmax.ipynb"
    handed_in = lesson.with_name("lesson_1_of_a_student.ipynb")
    text = lesson.read_text(encoding="utf-8").replace("# ", "# My answers: ", 1)
    handed_in.write_text(text, encoding="utf-8")
    PyFileConfigLoader("jupyter_server_config.py", path=str(project)).load_config()
    trusted = {
        path.relative_to(project / "notebooks").with_suffix("").as_posix()
        for path in (project / "notebooks").rglob("*.ipynb")
        if NotebookNotary(data_dir=str(tmp_path / "data")).check_signature(nbformat.read(path, as_version=4))
    }
    assert trusted == {*ALL}


def test_a_notebook_in_the_place_of_the_projects_own_is_not_trusted(tmp_path):
    shutil.copytree(PROJECT / "notebooks", tmp_path / "notebooks")
    source = (PROJECT / "jupyter_server_config.py").read_text("utf-8").partition("class Contents")[0]
    known: dict = {"__file__": str(tmp_path / "jupyter_server_config.py")}
    exec(compile(source, "jupyter_server_config.py", "exec"), known)
    whole = known["own_notebooks"](tmp_path / "notebooks")  # git does not know the copy
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm all"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    assert known["own_notebooks"](tmp_path / "notebooks") == whole
    (handed := whole[-1]).write_text(handed.read_text("utf-8").replace('"cells"', ' "cells"'), "utf-8")
    assert known["own_notebooks"](tmp_path / "notebooks") == whole[:-1]
