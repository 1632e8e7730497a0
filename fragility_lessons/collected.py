"""Students' answers as one table: ``make answers FOLDER=...`` reads the files that they saved, or their notebooks.

A file is what a lesson's button "Save my answers" wrote, or a notebook in which JupyterLab kept the answers. Answers
are judged here again. A file that cannot be read is named and left out.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from fragility_lessons.exercises import LESSONS, find

COLUMNS = ("student", "lesson", "question", "answer", "correct", "tries", "wrong", "time", "version", "file")
LARGEST = 20_000_000  # bytes of a file


def records(path: Path) -> list[dict[str, Any]]:
    """The records of the lessons in a file; raises ValueError if it has none."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"is larger than {LARGEST:,} bytes")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("is no record of answers")
    if path.suffix == ".ipynb":
        metadata = content.get("metadata")
        found = metadata.get("lesson_answers") if isinstance(metadata, dict) else None
        if not isinstance(found, dict) or not found:
            raise ValueError("is a notebook without answers")
        return list(found.values())
    return [content]


def rows(record: Any, path: Path) -> Iterator[dict[str, Any]]:
    """One row for each answer of a ``record`` in the file at ``path``; raises ValueError for what no lesson writes.

    A student who gave no name has that of the file, with its folders.
    """
    answers = record.get("answers") if isinstance(record, dict) else None
    if not isinstance(answers, dict) or record.get("lesson") not in LESSONS:
        raise ValueError("is no record of answers to a lesson")
    lesson, student = record["lesson"], str(record.get("student") or path.with_suffix("").as_posix())
    for name, entry in answers.items():
        if not isinstance(entry, dict) or not isinstance(answer := entry.get("answer"), str):
            raise ValueError(f"has no answer to {name!r}")
        if not isinstance(wrong := entry.get("wrong"), list) or not isinstance(tries := entry.get("tries"), int):
            raise ValueError(f"does not say how often {name!r} was tried")
        try:
            correct = find(lesson, name).is_right(answer)
        except KeyError:
            raise ValueError(f"answers {name!r}, which {lesson} does not ask") from None
        given = {"student": student, "lesson": lesson, "question": name, "answer": answer, "correct": correct}
        given |= {"tries": tries, "wrong": " | ".join(map(str, wrong)), "time": str(entry.get("time", ""))}
        yield given | {"version": str(record.get("version", "")), "file": path.as_posix()}


def collect(folder: Path) -> tuple[pd.DataFrame, list[str]]:
    """One row for each student and question, from all files below ``folder``, and what is wrong with other files.

    Of several answers of a student to a question, the latest one counts.
    """
    found, problems = [], []
    for path in sorted(path for kind in ("json", "ipynb") for path in folder.rglob(f"*.{kind}")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            found += [row for record in records(path) for row in rows(record, path.relative_to(folder))]
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path}: {error}")
    table = pd.DataFrame(found, columns=list(COLUMNS)).sort_values("time", kind="stable")
    table = table.drop_duplicates(["student", "lesson", "question"], keep="last")
    return table.sort_values(["student", "lesson", "question"], ignore_index=True), problems


def by_student(table: pd.DataFrame) -> pd.DataFrame:
    """Counts of the questions of each lesson that each student has answered right, and answered at all."""
    counts = table.groupby(["student", "lesson"]).correct.agg(["sum", "size"])
    told = counts.apply(lambda row: f"{row['sum']} of {row['size']}", axis=1)
    return told.unstack("lesson", fill_value="").reindex(
        columns=[name for name in LESSONS if name in set(table.lesson)]
    )


def by_question(table: pd.DataFrame) -> pd.DataFrame:
    """The students who answered a question, the share who were right in the end, and the commonest wrong answer."""
    asked = table.groupby(["lesson", "question"])
    wrong = table.assign(wrong=table.wrong.str.split(" | ", regex=False)).explode("wrong").query("wrong != ''")
    commonest = wrong.groupby(["lesson", "question"]).wrong.agg(lambda each: each.value_counts().index[0])
    summary = pd.DataFrame({"students": asked.size(), "right": asked.correct.mean(), "tries": asked.tries.mean()})
    return summary.assign(commonest=commonest).rename(columns={"commonest": "commonest wrong answer"}).fillna("")


def inert(text: object) -> object:
    """A student's text as a spreadsheet shows it, instead of computing it as a formula."""
    return f"'{text}" if isinstance(text, str) and text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def main(folder: Path) -> None:
    """Write ``answers.csv`` into ``folder``, and print a summary by student and by question."""
    if not folder.is_dir():
        sys.exit(f"{folder} is no folder")
    table, problems = collect(folder)
    print(*(f"left out: {problem}" for problem in problems), sep="\n", file=sys.stderr)
    if table.empty:
        sys.exit(f"no answers in {folder}")
    table.map(inert).to_csv(folder / "answers.csv", index=False)
    print(by_student(table).to_string(), by_question(table).round(2).to_string(), sep="\n\n")
    print(f"\n{len(table)} answers of {table.student.nunique()} students: {folder / 'answers.csv'}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1]:
        sys.exit("python -m fragility_lessons.collected FOLDER, or make answers FOLDER=...")
    main(Path(sys.argv[1]))
