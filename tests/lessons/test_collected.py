"""Students' answers in one table: judged again, the latest ones, and what cannot be read is named."""

import json

import nbformat
import pandas as pd
import pytest

from fragility_lessons.collected import by_question, by_student, collect, main

LESSON = "floating_point"


def entry(answer: str, *wrong: str, time: str = "2026-11-01T10:00:00Z", tries: int | None = None, correct: bool = True):
    tries = len(wrong) + correct if tries is None else tries
    return {"answer": answer, "tries": tries, "wrong": list(wrong), "correct": correct, "time": time}


def record(student: str, lesson: str = LESSON, **answers) -> dict:
    answers = {name.replace("_", "-"): value for name, value in answers.items()}
    return {"lesson": lesson, "version": "0.1.0", "student": student, "saved": "2026-11-01", "answers": answers}


def write(folder, name: str, content: object) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """A class of three: one with two files, one with a notebook, one without a name."""
    write(tmp_path, "ada.json", record("Ada", round_by_hand=entry("9", "8", "10"), spacing_of_bf16=entry("2")))
    later = entry("4", "4", time="2026-11-02T10:00:00Z", correct=False)
    write(tmp_path, "again/ada.json", record("Ada", spacing_of_bf16=later))
    notebook = nbformat.v4.new_notebook()
    kept = record("Bob", "attention_error", scaled_values=entry("both × 16", "both × 16", correct=True))
    kept["answers"]["floating_point/round-by-hand"] = entry("9,0")
    notebook.metadata["lesson_answers"] = {"attention_error": kept}
    write(tmp_path, "bob.ipynb", nbformat.writes(notebook))
    write(tmp_path, "no name.json", record("", round_by_hand=entry("8", "8", correct=False)))
    return tmp_path


def test_a_row_for_each_student_and_question(folder):
    table, problems = collect(folder)
    assert problems == []
    assert [
        tuple(row) for row in table[["student", "lesson", "question", "answer", "correct", "tries"]].to_numpy()
    ] == [
        ("Ada", LESSON, "round-by-hand", "9", True, 3),
        ("Ada", LESSON, "spacing-of-bf16", "4", False, 1),  # the later of two
        ("Bob", "attention_error", "floating_point/round-by-hand", "9,0", True, 1),  # recalled
        ("Bob", "attention_error", "scaled-values", "both × 16", False, 2),  # judged here, whatever the file says
        ("no name", LESSON, "round-by-hand", "8", False, 1),
    ]


def test_students_without_a_name_are_not_taken_for_one(tmp_path):
    """Files of one name in folders of their own, as programs for courses collect them."""
    for student, answer in (("ada", "9"), ("bob", "8")):
        write(tmp_path, f"{student}/lesson.json", record("", round_by_hand=entry(answer)))
    table, problems = collect(tmp_path)
    assert problems == [] and table.student.tolist() == ["ada/lesson", "bob/lesson"]
    assert table.answer.tolist() == ["9", "8"] and table.file.tolist() == ["ada/lesson.json", "bob/lesson.json"]


def test_summaries_by_student_and_by_question(folder):
    table, _ = collect(folder)
    students = by_student(table)
    assert list(students.columns) == [LESSON, "attention_error"]  # in the order of the lessons
    assert students.loc["Ada"].tolist() == ["1 of 2", ""] and students.loc["Bob"].tolist() == ["", "1 of 2"]
    question = by_question(table).loc[LESSON, "round-by-hand"]
    assert question.tolist() == [2, 0.5, 2.0, "8"]
    assert by_question(table).loc[("attention_error", "floating_point/round-by-hand"), "commonest wrong answer"] == ""


def test_a_class_without_a_wrong_answer_has_a_summary(tmp_path):
    write(tmp_path, "ada.json", record("Ada", round_by_hand=entry("9")))
    assert by_question(collect(tmp_path)[0]).loc[LESSON, "round-by-hand"].tolist() == [1, 1.0, 1.0, ""]


BAD = {
    "empty.json": "",
    "cut.json": '{"lesson": "floating_point", "answers": {',
    "list.json": [],
    "deep.json": "[" * 100_000,
    "other.json": {"lesson": "cooking", "answers": {}},
    "lesson.json": {"lesson": ["floating_point"], "answers": {}},
    "binary.json": "\udcff",
    "answer.json": record("Eve", round_by_hand={"answer": 9}),
    "tries.json": record("Eve", round_by_hand=entry("9") | {"tries": "many"}),
    "wrong.json": record("Eve", round_by_hand=entry("9") | {"wrong": None}),
    "question.json": record("Eve", no_such_question=entry("9")),
    "number.json": record("Eve", round_by_hand=entry("nine")),
    "recalled.json": record("Eve", **{"cooking/round-by-hand": entry("9")}),
    "coding.json": record("Eve", **{"coding/floating_point": entry("9")}),
    "plain.ipynb": nbformat.writes(nbformat.v4.new_notebook()),
    "metadata.ipynb": {"metadata": []},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_and_left_out(folder, name):
    good, _ = collect(folder)
    if name == "binary.json":
        (folder / name).write_bytes(b"\xff\xfe{")
    else:
        write(folder, name, BAD[name])
    table, problems = collect(folder)
    assert len(problems) == 1 and name in problems[0]
    pd.testing.assert_frame_equal(table, good)


def test_the_command_writes_a_table_that_computes_nothing(folder, capsys):
    write(folder, "formula.json", record("=1+1", round_by_hand=entry("-9", "-9", correct=False)))
    write(folder, "bad.json", "{")
    write(folder, ".ipynb_checkpoints/bob.ipynb", "{")
    main(folder)
    out, err = capsys.readouterr()
    assert "6 answers of 4 students" in out and "left out" in err and "bad.json" in err and "checkpoints" not in err
    table = pd.read_csv(folder / "answers.csv", dtype=str)
    assert {"'=1+1", "Ada"} <= set(table.student) and "'-9" in set(table.answer)


def test_the_command_refuses_a_folder_without_answers(tmp_path):
    with pytest.raises(SystemExit, match="no answers in"):
        main(tmp_path)
    with pytest.raises(SystemExit, match="is no folder"):
        main(tmp_path / "none")
