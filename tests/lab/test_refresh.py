"""What is stored of an executed notebook."""

from copy import deepcopy

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from fragility_lab.running.refresh import PYTHON, WIDGET, before_saving, clean

OUTPUTS = [
    new_output("stream", name="stdout", text="result"),
    new_output("display_data", data={WIDGET: {"model_id": "1"}, "text/plain": "bar"}),
    new_output("execute_result", data={WIDGET: {"model_id": "2"}, "text/html": "<img>", "text/plain": "error 1"}),
    new_output("execute_result", data={"text/plain": "42"}, execution_count=3),
]
KEPT = ["result", {"text/html": "<img>", "text/plain": "error 1"}, {"text/plain": "42"}]


def executed(**metadata):
    run = {"tags": ["parameters"], "papermill": {"duration": 1}, "execution": {"iopub.status.idle": "noon"}}
    code = new_code_cell("run()", id="a", outputs=deepcopy(OUTPUTS), metadata=run)
    cells = [new_markdown_cell("claim", id="b", metadata={"tags": []}), code]
    return new_notebook(cells=cells, metadata={"widgets": {"state": 1}, **metadata})


def contents(notebook) -> list:
    return [output.get("text", output.get("data")) for output in notebook.cells[1].outputs]


def test_static_outputs_stay_and_traces_of_the_run_go():
    notebook = executed(
        kernelspec={**PYTHON, "display_name": "Python 3 (ipykernel)"}, language_info={"name": "python", "version": "3"}
    )
    clean(notebook)
    assert notebook.metadata == {"kernelspec": PYTHON, "language_info": {"name": "python"}}
    assert [cell.metadata for cell in notebook.cells] == [{}, {"tags": ["parameters"]}]
    assert [cell.id for cell in notebook.cells] == ["b", "a"]
    assert contents(notebook) == KEPT


def test_another_kernel_and_a_users_own_metadata_stay():
    own = {
        "kernelspec": {"name": "other", "display_name": "Mine"},
        "language_info": {"name": "python", "version": "3"},
        "title": "mine",
    }
    notebook = executed(**own)
    notebook.cells[0].metadata = {"collapsed": True}
    clean(notebook)
    assert notebook.metadata == own
    assert notebook.cells[0].metadata == {"collapsed": True}


def test_hook_cleans_notebooks_and_leaves_other_files():
    notebook = executed()
    before_saving(model={"type": "notebook", "content": notebook}, path="some.ipynb", contents_manager=None)
    assert contents(notebook) == KEPT
    for other in ({"type": "file", "content": "widgets"}, {"type": "directory"}):
        before = other.copy()
        before_saving(model=other, path="some", contents_manager=None)
        assert other == before
