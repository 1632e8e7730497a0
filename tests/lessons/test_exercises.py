"""Exercises judge answers, and hide what is read after an answer; each lesson recalls an earlier one."""

import base64
import json
import re
from dataclasses import asdict

import pytest

from fragility_lessons.coding import listed
from fragility_lessons.exercises import LESSONS, Exercise, exercises, find, numbers

NUMBER = Exercise("x", "eighth", "What is 1/8?", 0.125, "Halve it <b>thrice</b>.", "One over eight.")
CHOICE = Exercise("x", "which", "Which one?", "b", "Not the first.", "It is b.", ("a", "b < c", "b"))
EVERY = [each for lesson in LESSONS for each in exercises(lesson)]


@pytest.mark.parametrize("answer", ["0.125", " 1/8 ", "125e-3", "0,125", "0.1255", "12.5%", "12.5 %", "2⁻³", "2**-3"])
def test_right_numbers(answer):
    assert NUMBER.is_right(answer)


@pytest.mark.parametrize(
    ("answer", "values"),
    [
        ("375,000", {375_000, 375}),  # a thousands separator or a decimal comma
        ("1,234,567.5", {1_234_567.5}),
        ("375 000", {375_000}),
        ("375'000", {375_000}),
        ("2/0.2", {10}),
        ("1/2/2", {0.25}),
        ("50%", {0.5}),
        ("−0.5", {-0.5}),
        ("1.6 × 10^-5", {1.6e-5}),
        ("1.6·10⁻⁵", {1.6e-5}),
        ("1.6E-5", {1.6e-5}),
        ("10⁶", {1e6}),
    ],
)
def test_ways_to_write_a_number(answer, values):
    assert sorted(numbers(answer)) == pytest.approx(sorted(values), rel=1e-15)


@pytest.mark.parametrize("answer", ["0.13", "-0.125", "0", "8"])
def test_wrong_numbers(answer):
    assert not NUMBER.is_right(answer)


@pytest.mark.parametrize("answer", ["an eighth", "1/0", "nan", "inf", "1e400", "10^400", "2^3^4", "1,00,0", "×", "<b>"])
def test_what_is_no_number_is_named(answer):
    with pytest.raises(
        ValueError, match=re.escape(f"An answer is a number such as 0.01, 1e-2, 1/100 or 1 %, not {answer!r}")
    ):
        NUMBER.is_right(answer)


def test_choices():
    assert CHOICE.is_right("b")
    assert not CHOICE.is_right("a")
    with pytest.raises(ValueError, match=r"one of the options \('a', 'b'\), got 'c'"):
        Exercise("x", "y", "Which one?", "c", "Think.", "None.", ("a", "b"))


@pytest.mark.parametrize("exercise", EVERY, ids=lambda each: f"{each.lesson}/{each.id}")
def test_solutions_are_accepted_and_others_are_not(exercise):
    wrong = [option for option in exercise.options if option != exercise.solution]
    wrong = wrong or [repr(float(factor * exercise.solution)) for factor in (0.9, 1.1, -1.0)]
    assert exercise.is_right(str(exercise.solution))
    assert not any(map(exercise.is_right, wrong))
    assert exercise.hint != exercise.explanation and exercise.hint


def test_answers_are_kept_under_names_of_their_own():
    for lesson in LESSONS:
        names = [each.id for each in exercises(lesson)]
        assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)
    assert len(EVERY) == 47


@pytest.mark.parametrize("exercise", [NUMBER, CHOICE])
def test_a_page_asks_and_hides_what_comes_after_an_answer(exercise):
    page = exercise.html
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
    assert page.count(exercise.question) == 1 and exercise.hint not in page and exercise.explanation not in page
    hidden = json.loads(base64.b64decode(data["sealed"]))
    assert hidden == {name: asdict(exercise)[name] for name in hidden} and len(hidden) == 4
    assert data["options"] == list(exercise.options) and (not exercise.options or "<li>b &lt; c</li>" in page)
    assert exercise._repr_mimebundle_() == {"text/html": page, "text/plain": exercise.question}


def test_a_lesson_ends_with_a_question_of_an_earlier_one():
    assert listed()["recall"].keys() == set(LESSONS[1:])
    assert exercises(LESSONS[0]).recall is None
    for place, lesson in enumerate(LESSONS[1:], 1):
        recall = exercises(lesson).recall
        earlier, id = recall.id.split("/")
        assert earlier in LESSONS[:place] and recall.question == find(earlier, id).question
        assert "picture" not in recall.explanation, "the picture is in another lesson"
        assert find(lesson, recall.id).id == id


def test_the_end_of_a_lesson_counts_every_question_once():
    for lesson in LESSONS:
        page = exercises(lesson).progress().data
        ids = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', page)[-1])["ids"]
        assert ids[: len(exercises(lesson))] == [each.id for each in exercises(lesson)]
        assert len(ids) == len(exercises(lesson)) + (lesson != LESSONS[0])
        assert page.count("<style>") == 1, "one style and one script for what is inside, too"
