"""The teaching notebooks as a student uses them: opened, run, moved by keyboard, answered, saved, opened again."""

import re
import shutil
import subprocess
from statistics import median

import nbformat
import pytest
from playwright.sync_api import Locator, Page, expect

from fragility_lab import paths
from fragility_lab.running.execute import notebook_names, notebook_path
from fragility_lab.running.refresh import PYTHON

TEACHING = [name for name in notebook_names() if name.startswith("theory/")]
ENOUGH = 180_000  # milliseconds for a notebook to open or to run, on a busy machine
PICTURES = paths.OUTPUTS / "browser"
EXPLORER = "1_floating_point_and_softmax"

# JupyterLab shows a traceback with the MIME type of stderr.
COMPLAINTS = ", ".join(f'[data-mime-type="application/vnd.jupyter.{kind}"]' for kind in ("error", "stderr"))
# A folded cell shows no execution count, so the model is asked for it.
ENDED = rf"""() => document.querySelector('{COMPLAINTS}') !== null ||
    [...jupyterapp.shell.currentWidget.content.model.cells].every(e => e.type !== 'code' || e.executionCount)"""
# Milliseconds from each key press to the change of the picture that it causes.
STOPWATCH = """explorer => {
    window.latencies = [];
    explorer.addEventListener('keydown', () => { window.pressed = performance.now(); }, true);
    new MutationObserver(() => window.latencies.push(performance.now() - window.pressed))
        .observe(explorer.querySelector('.sliders-row'), {childList: true});
}"""

LABELS = ".sliders-controls > label, .sliders-controls > span[id]"
# How many stops a slider or a row of buttons has after the present one.
LEFT = """control => control.type === 'range' ? control.max - control.value
    : [...control.parentElement.children].reverse().findIndex(e => e.ariaPressed === 'true')"""
LABEL_OF_FOCUS = """document.activeElement.labels?.[0]?.textContent ??
    document.activeElement.closest('[role=group]').previousElementSibling.textContent"""
MEDIAN = 100  # milliseconds from a key to its picture, on a free machine


def test_there_are_teaching_notebooks():
    assert TEACHING


def choose(page: Page, menu: str, entry: str) -> None:
    """One entry of JupyterLab's menu bar."""
    page.get_by_role("menuitem", name=menu, exact=True).click()
    page.locator(f'.lm-Menu-itemLabel:text-is("{entry}")').click()  # the item's name has its shortcut in it


def expect_idle(page: Page) -> None:
    expect(page.locator("#jp-main-statusbar").get_by_text("| Idle")).to_be_visible(timeout=ENOUGH)


def open_notebook(page: Page, lab, name: str) -> None:
    page.goto(lab.address(f"lab/tree/notebooks/{name}.ipynb"))
    expect(page.locator(".jp-CodeCell:visible").first).to_be_visible(timeout=ENOUGH)
    expect_idle(page)


def run_all(page: Page) -> None:
    """Run all cells from cleared outputs; every cell ends without error or warning, or the test fails at once."""
    choose(page, "Edit", "Clear Outputs of All Cells")
    choose(page, "Run", "Run All Cells")
    expect_complete_run(page)


def expect_complete_run(page: Page) -> None:
    page.wait_for_function(ENDED, timeout=ENOUGH)
    assert page.locator(COMPLAINTS).all_text_contents() == []
    expect_idle(page)


def figures_of(name: str) -> int:
    """The number of pictures with controls in a notebook."""
    source = notebook_path(name).read_text()
    return sum(source.count(f'"{shown}(') for shown in ("Explorer", "own_text.explorer", "controller.free"))


def expect_live(page: Page, name: str) -> None:
    explorers = page.locator(".sliders[data-picture]")
    expect(explorers).to_have_count(figures_of(name))
    for explorer in explorers.all():
        expect(explorer.locator("figure").first).to_be_visible()


def first_control(explorer: Locator) -> Locator:
    """The first slider, button or menu."""
    return explorer.locator("input, button, select").first


def move_by_keyboard(explorer: Locator) -> None:
    """Focus and a key redraw the figure and the numbers beside it."""
    picture, readout = explorer.locator(".sliders-row"), explorer.locator(".readout")
    before, numbers = explorer.get_attribute("data-picture"), readout.text_content()
    if first_control(explorer).get_attribute("type") == "range":
        first_control(explorer).press("ArrowRight")  # which focuses it
    else:
        explorer.locator("button[aria-pressed=true] + button").press("Enter")
    expect(explorer).not_to_have_attribute("data-picture", before)
    expect(readout).not_to_have_text(numbers)
    assert all(panel.get_attribute("aria-label") for panel in picture.locator("svg[role=img]").all())
    expect_accessible_names(explorer)


def expect_accessible_names(explorer: Locator) -> None:
    """Screen readers can name every control, and tell which button is pressed."""
    for label in explorer.locator(LABELS).all_text_contents():
        named = [explorer.get_by_role(role, name=label, exact=True) for role in ("slider", "combobox", "group")]
        assert sum(controls.count() for controls in named) == 1, label
    if explorer.locator(".sliders-buttons").count():
        expect(explorer.get_by_role("button", pressed=True)).to_have_count(1)


def labels_reached_by_tab(page: Page, explorer: Locator) -> set[str]:
    """The labels of the controls of ``explorer`` that Tab reaches from the first one."""
    reached = set()
    first_control(explorer).focus()
    while explorer.evaluate("explorer => explorer.querySelector('.sliders-controls').contains(document.activeElement)"):
        reached.add(page.evaluate(LABEL_OF_FOCUS))
        page.keyboard.press("Tab")
    return reached


def answer(exercise: Locator) -> None:
    """A check gives a hint, and the explanation stays hidden until then."""
    verdict, explanation = exercise.locator(".le-verdict"), exercise.locator("details p")
    exercise.get_by_role("button", name="Check").click()
    expect(verdict).to_have_text("Answer first.")
    expect(explanation).to_be_hidden()
    if exercise.get_by_role("textbox").count():
        exercise.get_by_role("textbox").fill("-12345")
        exercise.get_by_role("textbox").press("Enter")
        expect(verdict).to_contain_text("Not yet. Hint: ")
        exercise.locator("summary").click()
    else:
        for choice in exercise.get_by_role("radio").all():
            choice.check()
            expect(verdict).to_have_text("")  # that of the last choice is gone
            exercise.get_by_role("button", name="Check").click()
        expect(verdict).to_contain_text(re.compile("Right|Not yet"))
    expect(explanation).to_be_visible()


def expect_ready(page: Page, name: str) -> None:
    """Without a run: every figure is alive, with words for it and numbers, and every question may be answered."""
    source = notebook_path(name).read_text()
    readouts = page.locator(".jp-OutputArea-output .readout")
    expect(readouts).to_have_count(figures_of(name), timeout=ENOUGH)
    asked = page.locator('[data-kind="question"]:not([data-kind="progress"] *)')
    expect(asked).to_have_count(source.count(".EXERCISES["), timeout=ENOUGH)
    for exercise in asked.all():
        expect(exercise.get_by_role("button", name="Check")).to_be_visible()
    expect(page.locator(".jp-InputPlaceholder:visible")).to_have_count(0)  # no bars for folded code
    expect_live(page, name)
    assert all(panel.get_attribute("aria-label") for panel in page.locator(".sliders svg[role=img]").all())
    for image in page.locator(".jp-OutputArea-output img").all():
        assert image.get_attribute("alt") and image.evaluate("e => e.decode().then(() => e.naturalWidth)") > 100
    expect(page.get_by_text("model not found")).to_have_count(0)
    expect(page.locator(".jupyter-widgets")).to_have_count(0)


@pytest.mark.parametrize("name", TEACHING)
def test_notebook(page, lab, name):
    open_notebook(page, lab, name)
    expect_ready(page, name)
    page.screenshot(path=PICTURES / f"{name}.png")

    run_all(page)
    expect_live(page, name)
    latencies = []
    for number, explorer in enumerate(page.locator(".sliders").all(), 1):
        explorer.evaluate(STOPWATCH)
        for _ in range(min(5, first_control(explorer).evaluate(LEFT))):
            move_by_keyboard(explorer)
        latencies += page.evaluate("latencies")
        labels = explorer.locator(LABELS).all_text_contents()
        assert labels and labels_reached_by_tab(page, explorer) == set(labels)
        explorer.screenshot(path=PICTURES / f"{name}_figure_{number}.png")
    assert median(latencies) <= 3 * MEDIAN
    questions = page.locator('[data-kind="question"]')
    for number, exercise in enumerate(questions.all(), 1):
        answer(exercise)
        exercise.screenshot(path=PICTURES / f"{name}_exercise_{number}.png")
    progress = page.locator('[data-kind="progress"]')
    expect(progress).to_contain_text(f"{questions.count()} of {questions.count()} answered")
    progress.screenshot(path=PICTURES / f"{name}_progress.png")


def test_a_text_of_ones_own_is_read(page, lab):
    open_notebook(page, lab, "theory/6_one_window_layer_by_layer")
    run_all(page)
    cell = page.locator(".jp-CodeCell:has-text('own_text.explorer')").last
    explorer = cell.locator(".sliders[data-picture]")
    for text, tokens in (("Join the words.", 6), ("word " * 99, 64)):
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(f'own_text.explorer("{text}")')
        page.keyboard.press("Control+Enter")
        expect(explorer.locator(".sliders-buttons button")).to_have_count(tokens, timeout=ENOUGH)
    expect(explorer.locator(".readout")).to_contain_text("first 64 tokens")
    explorer.locator(".sliders-buttons button").nth(7).press("Space")
    expect(explorer.locator(".readout")).to_contain_text("token 7 “")
    expect_accessible_names(explorer)
    explorer.screenshot(path=PICTURES / "own_text.png")


def test_what_a_student_writes_is_checked(page, lab):
    open_notebook(page, lab, f"theory/{EXPLORER}")
    run_all(page)
    cell = page.locator(".jp-CodeCell:has-text('CODING.check')").last
    output = cell.locator(".jp-OutputArea-output")
    expect(output).to_contain_text("Not yet. Hint: return one number.")
    for line, told in (
        ("x", "Not yet. Hint: for the arguments"),
        ("2 ** (e + 1 - t) * round(x / 2 ** (e + 1 - t))", "Right."),
    ):
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(
            f"def rounded(x, e, t):\n    return {line}\n\n\nprint(floating_point.CODING.check(rounded))"
        )
        page.keyboard.press("Control+Enter")
        expect(output).to_contain_text(told)


def restart_kernel(page: Page, entry: str) -> None:
    choose(page, "Kernel", entry)
    page.locator(".jp-Dialog .jp-mod-accept").click()


def test_pictures_and_questions_outlive_the_kernel(page, lab):
    open_notebook(page, lab, f"theory/{EXPLORER}")
    run_all(page)
    restart_kernel(page, "Restart Kernel…")
    move_by_keyboard(page.locator(".sliders").first)
    answer(page.locator('[data-kind="question"]').first)

    page.evaluate("document.querySelectorAll('.jp-OutputArea-output').forEach(e => e.classList.add('of-before'))")
    restart_kernel(page, "Restart Kernel and Run All Cells…")
    expect(page.locator(".of-before")).to_have_count(0, timeout=ENOUGH)
    expect_complete_run(page)
    move_by_keyboard(page.locator(".sliders").first)


def save(page: Page) -> None:
    with page.expect_response(lambda response: response.request.method == "PUT" and "ipynb" in response.url):
        choose(page, "File", "Save Notebook")
    expect(page.locator(".jp-mod-dirty")).to_have_count(0)


def git(lab, *words: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    return subprocess.run(["git", *identity, *words], cwd=lab.root, check=True, capture_output=True, text=True).stdout


def without_pictures(notebook: str) -> str:
    """A CPU that rounds otherwise moves a curve by a millionth of a point, and so all bytes of a picture."""
    return re.sub(r"data:image/[a-z+]+;base64,[A-Za-z0-9+/=]+", "picture", notebook)


@pytest.mark.parametrize("name", [f"theory/{EXPLORER}"])
def test_a_notebook_that_is_run_and_saved_opens_as_it_was_committed(page, lab, name):
    git(lab, "init", "--quiet")
    git(lab, "add", "--all")
    git(lab, "commit", "--quiet", "--message=start")
    open_notebook(page, lab, name)
    save(page)
    assert git(lab, "diff") == ""

    run_all(page)
    expect_live(page, name)
    save(page)
    stored = nbformat.read(lab.root / f"notebooks/{name}.ipynb", as_version=4)
    assert "widgets" not in stored.metadata and "application/vnd.jupyter.widget" not in str(stored)
    file = f"notebooks/{name}.ipynb"
    assert git(lab, "diff", "--name-only").split() in ([], [file])
    saved = (lab.root / file).read_text(encoding="utf-8")
    assert without_pictures(saved) == without_pictures(git(lab, "show", f"HEAD:{file}"))
    page.goto("about:blank")
    lab.clear()
    open_notebook(page, lab, name)
    expect_live(page, name)  # who has run a notebook trusts it, and no kernel is asked
    shutil.rmtree(lab.root / ".git")


def test_panels_stack_on_a_narrow_page(page, lab):
    open_notebook(page, lab, f"theory/{EXPLORER}")
    run_all(page)
    for width, stacked in ((1400, False), (900, True)):
        page.set_viewport_size({"width": width, "height": 1000})
        figure = page.locator(".sliders-row:has(figure + figure)").first
        figure.scroll_into_view_if_needed()
        page.wait_for_timeout(1000)  # the panels are drawn again for the new width
        first, second = (panel.bounding_box() for panel in figure.locator("figure").all())
        assert (second["y"] >= first["y"] + first["height"]) == stacked
        assert min(first["width"], second["width"]) > 400
        page.screenshot(path=PICTURES / f"width_{width}.png")


def test_an_error_of_a_cell_ends_the_wait(page, lab):
    cells = [nbformat.v4.new_code_cell(source) for source in ("1 / 0", "2")]
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": PYTHON}), lab.root / "notebooks/broken.ipynb"
    )
    open_notebook(page, lab, "broken")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_all(page)


def test_start_page_opens_first_and_leads_to_notebooks_and_outputs(page, lab):
    page.goto(lab.address(""))
    link = page.locator(".jp-RenderedMarkdown a[href*='theory/']").first
    expect(link).to_be_visible(timeout=ENOUGH)
    expect_idle(page)
    page.screenshot(path=PICTURES / "start.png")
    link.click()
    expect(page.locator(".jp-CodeCell:visible").first).to_be_visible(timeout=ENOUGH)
    expect_idle(page)
    page.goto(lab.address("lab/tree/outputs/embedded/tables"))
    expect(page.locator(".jp-DirListing-itemName").first).to_be_visible(timeout=ENOUGH)
