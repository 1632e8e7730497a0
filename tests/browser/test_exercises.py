"""Questions in Chromium: asked, checked as Python checks, and remembered, with and without a kernel or storage."""

import json

import pytest
from accessibility import WIDTHS, serious
from playwright.sync_api import Browser, Locator, Page, expect
from test_lessons import ENOUGH, choose, open_notebook, save

from fragility_lab.running.execute import notebook_path
from fragility_lessons.collected import collect
from fragility_lessons.exercises import LESSONS, Exercise, exercises

LESSON = "attention_error"
NOTEBOOK = "theory/2_attention_error"
SPELLINGS = (
    "0.125", " 1/8 ", "125e-3", "0,125", "0.1255", "12.5%", "12.5 %", "2⁻³", "2**-3", "1.25·10⁻¹", "375,000",
    "1,234,567.5", "375 000", "2/0.2", "1/2/2", "−0.5", "10⁶", "1e400", "an eighth", "1/0", "nan", "inf", "10^400",
    "2^3^4", "1,00,0", "×", "<b>", "5.", ".5", "1_000", "+3", "1e", "--2", "0^-1", "(-8)^0.5", "50%%", "1e5", "0x10",
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A lesson's questions and its end on one page, and the same page in a frame that may not store anything."""
    folder, asked = tmp_path_factory.mktemp("exercises"), exercises(LESSON)
    body = "".join(each.html for each in asked) + asked.progress().data
    page = f'<!doctype html><html lang="en"><title>questions</title><meta charset="utf-8"><main>{body}</main></html>'
    (folder / "questions.html").write_text(page, encoding="utf-8")
    frame = '<iframe sandbox="allow-scripts" src="questions.html" style="width: 100%; height: 3000px"></iframe>'
    (folder / "frame.html").write_text(frame)
    return folder / "questions.html"


def opened(context, path) -> Page:
    page = context.new_page()
    page.goto(path.as_uri())
    return page


def question(page, place: int) -> Locator:
    return page.locator('[data-kind="question"]').nth(place)


def give(asked: Locator, answer: str) -> None:
    if asked.get_by_role("textbox").count():
        asked.get_by_role("textbox").fill(answer)
        asked.get_by_role("textbox").press("Enter")
    else:
        asked.get_by_role("radio", name=answer, exact=True).check()
        asked.get_by_role("button", name="Check").press("Space")


def told(asked: Locator) -> Locator:
    return asked.locator(".le-verdict")


def end(page) -> Locator:
    return page.locator('[data-kind="progress"]')


def test_a_hint_after_a_wrong_answer_and_the_explanation_after_two_or_a_right_one(browser, path):
    page = browser.new_page()
    page.goto(path.as_uri())
    for place in (0, 4):
        asked, exercise = question(page, place), exercises(LESSON)[place]
        wrong = [option for option in exercise.options if option != exercise.solution] or ["3", "2", "1"]
        details = asked.locator("details")
        expect(details).to_be_hidden()
        asked.get_by_role("button", name="Check").click()
        expect(told(asked)).to_have_text("Answer first.")
        for _ in range(3):  # one wrong answer gets a hint, however often it is checked
            give(asked, wrong[0])
        expect(told(asked)).to_have_text(f"Not yet. Hint: {exercise.hint}")
        expect(details).not_to_have_attribute("open", "")
        give(asked, wrong[1])
        expect(details).to_have_attribute("open", "")
        give(asked, str(exercise.solution))
        expect(told(asked)).to_have_text("Right.")
        give(asked, wrong[2])
        expect(told(asked)).to_contain_text("Not yet.")
    give(question(page, 6), "8")
    expect(question(page, 6).locator("details p")).to_have_text(exercises(LESSON)[6].explanation)
    kept = page.evaluate(f"JSON.parse(localStorage['fragility-lessons:{LESSON}']).answers")
    first = kept[exercises(LESSON)[0].id]
    assert (first["tries"], len(first["wrong"]), first["correct"]) == (3, 2, True)
    expect(end(page).get_by_role("status").last).to_have_text("3 of 8 answered, 3 of them right.")
    page.close()


def test_numbers_are_read_as_in_python(browser, tmp_path):
    exercise = Exercise("x", "y", "What is 1/8?", 0.125, "Halve.", "One over eight.")
    file = tmp_path / "one.html"
    file.write_text(exercise.html, encoding="utf-8")
    page = browser.new_page()
    page.goto(file.as_uri())
    for spelling in SPELLINGS:
        give(question(page, 0), spelling)
        try:
            expected = "Right." if exercise.is_right(spelling) else "Not yet. Hint: Halve."
        except ValueError:
            expected = f"An answer is a number such as 0.01, 1e-2, 1/100 or 1 %, not “{spelling}”."
        assert told(question(page, 0)).text_content() == expected, spelling
    page.close()


def test_every_solution_is_accepted(browser, tmp_path):
    page, file = browser.new_page(), tmp_path / "all.html"
    asked = [each for lesson in LESSONS for each in exercises(lesson)]
    file.write_text('<meta charset="utf-8">' + "".join(each.html for each in asked), encoding="utf-8")
    page.goto(file.as_uri())
    for place, exercise in enumerate(asked):
        give(question(page, place), str(exercise.solution))
        assert told(question(page, place)).text_content() == "Right.", exercise.id
    page.close()


def test_answers_are_there_when_the_page_opens_again_until_they_are_cleared(browser, path):
    context = browser.new_context()
    page = opened(context, path)
    give(question(page, 1), "the bound grows")
    give(question(page, 4), "ln 64")  # no number, and no answer
    give(question(page, 7), "9")  # the question of an earlier lesson
    page.close()
    page = opened(context, path)
    expect(question(page, 1).get_by_role("radio", name="the bound grows")).to_be_checked()
    expect(told(question(page, 1))).to_contain_text("Not yet. Hint:")
    expect(question(page, 4).get_by_role("textbox")).to_have_value("")
    expect(question(page, 7).get_by_role("textbox")).to_have_value("9")
    expect(question(page, 7).locator("details p")).to_be_visible()
    expect(end(page).get_by_role("status").last).to_have_text("2 of 8 answered, 1 of them right.")
    end(page).get_by_role("button", name="Clear my answers").click()
    expect(end(page).get_by_role("status").last).to_contain_text("2 of 8")  # asked again first
    end(page).get_by_role("button", name="Clear them all?").click()
    for _ in range(2):
        expect(end(page).get_by_role("status").last).to_contain_text("0 of 8")
        expect(page.get_by_role("radio", checked=True)).to_have_count(0)
        expect(question(page, 7).get_by_role("textbox")).to_have_value("")
        page.reload()
    context.close()


def test_where_nothing_may_be_stored_questions_work_and_say_so(browser, path):
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.with_name("frame.html").as_uri())
    frame = page.frame_locator("iframe")
    give(question(frame, 4), "4.16")
    expect(told(question(frame, 4))).to_have_text("Right.")
    expect(end(frame).get_by_role("status").last).to_contain_text("1 of 8 answered")
    expect(end(frame)).to_contain_text("This browser keeps no answers once the page is closed. Save them.")
    assert errors == []
    page.close()


def test_a_page_without_scripts_says_what_is_asked_and_no_answer(browser, path):
    context = browser.new_context(java_script_enabled=False)
    page = opened(context, path)
    for place, exercise in enumerate(exercises(LESSON)):
        expect(question(page, place)).to_contain_text(exercise.question)
        assert all(option in question(page, place).inner_text() for option in exercise.options)
        assert exercise.explanation[:40] not in page.content() and exercise.hint[:40] not in page.content()
    context.close()


def test_what_is_kept_by_mistake_or_by_others_does_no_harm(browser, path):
    for kept in ("{", "null", "3", '{"answers": 3}', '{"answers": {"scaled-values": {"answer": 1}, "none": null}}'):
        context = browser.new_context()
        page = opened(context, path)
        page.evaluate("kept => localStorage.setItem('fragility-lessons:attention_error', kept)", kept)
        page.reload()
        give(question(page, 4), "4.16")
        expect(end(page).get_by_role("status").last).to_have_text("1 of 8 answered, 1 of them right.")
        context.close()


def test_saved_answers_are_what_the_lecturer_collects(browser, path, tmp_path):
    page = browser.new_page()
    page.goto(path.as_uri())
    give(question(page, 4), "3")
    give(question(page, 4), "4.16")
    end(page).get_by_label("Your name").fill("Zoë Ångström/2")
    with page.expect_download() as download:
        end(page).get_by_role("button", name="Save my answers").click()
    assert download.value.suggested_filename == "answers_attention_error_Zoë-Ångström-2.json"
    download.value.save_as(tmp_path / "one.json")
    assert json.loads((tmp_path / "one.json").read_text("utf-8")).keys() >= {"lesson", "version", "student", "saved"}
    table, problems = collect(tmp_path)
    assert problems == [] and len(table) == 1
    row = table.iloc[0]
    assert (row.student, row.question, row.answer, row.tries) == (
        "Zoë Ångström/2",
        "margin-of-largest-jacobian",
        "4.16",
        2,
    )
    assert row.correct and row.wrong == "3"
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_and_no_one_is_kept_out(browser, path, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = opened(context, path)
    for state in ("empty", "answered"):
        if state == "answered":
            give(question(page, 1), "the bound grows")
            give(question(page, 4), "4.16")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert serious(page) == []
    context.close()


def test_keys_reach_the_choices_in_turn(browser, path):
    page = browser.new_page()
    page.goto(path.as_uri())
    question(page, 0).get_by_role("radio").first.focus()
    page.keyboard.press("ArrowDown")
    expect(question(page, 0).get_by_role("radio").nth(1)).to_be_checked()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(told(question(page, 0))).to_have_text("Right.")
    page.close()


def another_browser(browser: Browser, lab) -> Page:
    """A page that knows nothing of what another one has stored."""
    lab.clear()
    page = browser.new_context(viewport={"width": 1280, "height": 1000}).new_page()
    page.set_default_timeout(ENOUGH)
    open_notebook(page, lab, NOTEBOOK)
    return page


def close(page: Page) -> None:
    choose(page, "File", "Close Tab")


def test_the_notebook_keeps_answers_without_a_run(page, lab, browser):
    file = lab.root / f"notebooks/{NOTEBOOK}.ipynb"
    before = file.read_bytes()
    open_notebook(page, lab, NOTEBOOK)
    expect(page.locator('[data-kind="question"][data-live]').first).to_be_visible()
    expect(page.locator(".jp-InputPlaceholder:visible")).to_have_count(0)  # no bars for folded code
    close(page)  # an untouched notebook asks nothing
    expect(page.locator(".jp-NotebookPanel")).to_have_count(0)
    expect(page.locator(".jp-Dialog")).to_have_count(0)
    assert file.read_bytes() == before

    open_notebook(page, lab, NOTEBOOK)
    asked = question(page, 0)
    asked.get_by_role("radio").first.focus()
    page.keyboard.press("ArrowDown")  # which JupyterLab would take for the next cell
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(told(asked)).to_have_text("Right.")
    save(page)
    stored = json.loads(file.read_text("utf-8"))["metadata"]["lesson_answers"][LESSON]
    assert stored["answers"]["scaled-values"]["correct"] is True
    table, problems = collect(file.parent)  # the other lessons have no answers yet
    assert len(problems) == 6 and list(table.question) == ["scaled-values"]

    other = another_browser(browser, lab)
    expect(question(other, 0).get_by_role("radio").nth(1)).to_be_checked()
    expect(told(question(other, 0))).to_have_text("Right.")
    close(other)  # to look is not to touch
    expect(other.locator(".jp-NotebookPanel")).to_have_count(0)
    other.context.close()
    file.write_bytes(notebook_path(NOTEBOOK).read_bytes())
