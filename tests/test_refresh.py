"""What is committed of an executed notebook."""

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from fragility_lab.running.refresh import WIDGET, cleaned


def test_only_content_stays():
    outputs = [
        new_output("stream", name="stderr", text="progress"),
        new_output("stream", name="stdout", text="result"),
        new_output("display_data", data={WIDGET: {"model_id": "1"}, "text/plain": "bar"}),
        new_output("execute_result", data={WIDGET: {"model_id": "2"}, "image/png": "iVBO", "text/plain": "error 1"}),
        new_output("execute_result", data={"text/plain": "42"}, execution_count=3),
    ]
    code = new_code_cell("run()", outputs=outputs, metadata={"tags": ["parameters"], "papermill": {"duration": 1}})
    notebook = new_notebook(cells=[new_markdown_cell("claim", metadata={"editor": 1}), code], metadata={"widgets": {}})
    clean = cleaned(notebook)
    assert set(clean.metadata) == {"kernelspec", "language_info"}
    assert [cell.metadata for cell in clean.cells] == [{}, {"tags": ["parameters"]}]
    assert [output.get("text", output.get("data")) for output in clean.cells[1].outputs] == [
        "result",
        {"image/png": "iVBO", "text/plain": "error 1"},
        {"text/plain": "42"},
    ]
