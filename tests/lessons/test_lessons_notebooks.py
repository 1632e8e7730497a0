"""The teaching notebooks show their pictures and questions within the time allowed."""

import ast
import time
from functools import cache

import nbformat
import pytest
import torch
from IPython.display import HTML

from fragility_core import final_hidden
from fragility_lab.running.execute import notebook_names, notebook_path
from fragility_lessons import embedded
from fragility_lessons.exercises import Exercise
from fragility_lessons.explorers import Figure

TEACHING = [name for name in notebook_names() if name.startswith("theory/")]
SECONDS: dict[str, list[float]] = {}  # of the cells of a notebook that ran
MOST_SECONDS = 3  # on a free machine
PASS = 0.006  # seconds of a pass of the lessons' model there


@cache
def run_notebook(name: str) -> tuple[list[Figure], list[Exercise]]:
    """The figures and exercises that the code cells of the notebook ``name`` end with; the last shows progress."""
    shown, scope = [], {}
    for cell in nbformat.read(notebook_path(name), as_version=4).cells:
        if cell.cell_type != "code":
            continue
        body, before = ast.parse(cell.source).body, time.process_time()
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), name, "exec"), scope)
        if last:
            shown.append(eval(compile(ast.Expression(last.value), name, "eval"), scope))
            if isinstance(shown[-1], Figure):
                assert "nan" not in shown[-1]._repr_mimebundle_()["text/plain"]
        SECONDS.setdefault(name, []).append(time.process_time() - before)
    assert sum(isinstance(x, HTML) and 'data-kind="progress"' in x.data for x in shown) == 1
    return [x for x in shown if isinstance(x, Figure)], [x for x in shown if isinstance(x, Exercise)]


@pytest.mark.parametrize("name", TEACHING)
def test_notebooks_show_figures_and_exercises(name):
    figures, exercises = run_notebook(name)
    assert len(figures) >= 2
    assert 5 <= len(exercises) <= 7


@torch.no_grad()
def slowness() -> float:
    """How many times as long as there a pass takes here, on a slower or a busy machine; at least 1."""
    monitor, window = embedded.prepared()
    final_hidden(monitor.model, window)
    before, count = time.process_time(), 20
    for _ in range(count):
        final_hidden(monitor.model, window)
    return max(1.0, (time.process_time() - before) / count / PASS)


@pytest.mark.parametrize("name", TEACHING)
def test_no_cell_makes_a_student_wait(name):
    """Seconds of one processor, which other work slows; what takes longer is shipped (``shipped``)."""
    run_notebook(name)
    assert len(SECONDS[name]) > 10 and max(SECONDS[name]) < 2 * MOST_SECONDS * slowness(), SECONDS[name]
