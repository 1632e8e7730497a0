"""The teaching notebooks as a student uses them: opened, run, moved by keyboard, exercises answered."""

import pytest
from playwright.sync_api import Locator, Page, expect

from fragility_lab import paths
from fragility_lab.running.execute import notebook_names, notebook_path

TEACHING = [name for name in notebook_names() if name.startswith("theory/")]
ENOUGH = 180_000  # milliseconds for a notebook to open or to run, on a busy machine
PICTURES = paths.OUTPUTS / "browser"

ENDED = r"""() => document.querySelector('[data-mime-type="application/vnd.jupyter.error"]') !== null ||
    [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].every(e => /^\[\d+\]:$/.test(e.textContent))"""
# Milliseconds from each key pressed to the change of the picture it leads to.
STOPWATCH = """explorer => {
    window.latencies = [];
    explorer.addEventListener('keydown', () => { window.pressed = performance.now(); }, true);
    new MutationObserver(() => window.latencies.push(performance.now() - window.pressed))
        .observe(explorer.querySelector('.picture'), {childList: true, subtree: true});
}"""

LABEL_OF_FOCUS = """document.activeElement.closest('.widget-inline-hbox, .widget-toggle-buttons')
    .querySelector('label').textContent"""


def test_there_are_teaching_notebooks():
    assert TEACHING


def choose(page: Page, menu: str, entry: str) -> None:
    """One entry of JupyterLab's menu bar."""
    page.get_by_role("menuitem", name=menu, exact=True).click()
    page.get_by_role("menuitem", name=entry, exact=True).click()


def expect_idle(page: Page) -> None:
    expect(page.locator("#jp-main-statusbar").get_by_text("| Idle")).to_be_visible(timeout=ENOUGH)


def open_notebook(page: Page, lab, name: str) -> None:
    page.goto(lab.address(f"lab/tree/{name}.ipynb"))
    expect(page.locator(".jp-CodeCell").first).to_be_visible(timeout=ENOUGH)
    expect_idle(page)


def expect_complete_run(page: Page, name: str) -> None:
    """Every cell ran without error or warning, and shows what it has live."""
    page.wait_for_function(ENDED, timeout=ENOUGH)
    expect_idle(page)
    for kind in ("error", "stderr"):
        complaints = page.locator(f'[data-mime-type="application/vnd.jupyter.{kind}"]')
        assert complaints.all_text_contents() == []
    expect(page.locator(".explorer .picture img")).to_have_count(notebook_path(name).read_text().count('"Explorer('))


def first_control(explorer: Locator) -> Locator:
    """What the focus comes to first: a slider, or the first of a row of buttons."""
    return explorer.locator("[role=slider], button").first


def move_by_keyboard(explorer: Locator) -> None:
    """Focus and a key redraw the figure and the numbers beside it."""
    picture, readout = explorer.locator("img"), explorer.locator(".readout")
    pixels, numbers = picture.get_attribute("src"), readout.text_content()
    if first_control(explorer).get_attribute("role") == "slider":
        first_control(explorer).press("ArrowRight")  # which focuses it
    else:
        explorer.locator("button.mod-active + button").press("Enter")
    expect(readout).not_to_have_text(numbers)
    expect(picture).not_to_have_attribute("src", pixels)
    assert picture.get_attribute("alt") == readout.text_content()


def labels_reached_by_tab(page: Page, explorer: Locator) -> set[str]:
    """Labels of the controls of ``explorer`` that have the focus in turn, from the first on."""
    reached = set()
    first_control(explorer).focus()
    while explorer.evaluate("explorer => explorer.contains(document.activeElement)"):
        reached.add(page.evaluate(LABEL_OF_FOCUS))
        page.keyboard.press("Tab")
    return reached


def answer(exercise: Locator) -> None:
    """A check says what is wrong, and the answer stays hidden until asked for."""
    verdict, solution = exercise.get_by_role("status"), exercise.locator("details p")
    exercise.get_by_role("button", name="Check").click()
    expect(verdict).to_have_text("Answer first.")
    if exercise.get_by_role("textbox").count():
        exercise.get_by_role("textbox").fill("-12345")
        exercise.get_by_role("textbox").press("Enter")
        expect(verdict).to_contain_text("Not yet")
    expect(solution).to_be_hidden()
    exercise.locator("summary").click()
    expect(solution).to_be_visible()


def expect_static(page: Page, name: str) -> None:
    """As committed, before any cell ran: a picture for each explorer, every answer there and folded away."""
    source = notebook_path(name).read_text()
    expect(page.locator(".jp-OutputArea-output img")).to_have_count(source.count('"Explorer('), timeout=ENOUGH)
    answers = page.locator(".jp-OutputArea-output details p")
    expect(answers).to_have_count(source.count(".EXERCISES["), timeout=ENOUGH)
    for solution in answers.all():
        expect(solution).to_be_hidden()


@pytest.mark.parametrize("name", TEACHING)
def test_notebook(page, lab, name):
    open_notebook(page, lab, name)
    expect_static(page, name)
    page.screenshot(path=PICTURES / f"{name}.png")

    choose(page, "Edit", "Clear Outputs of All Cells")
    choose(page, "Run", "Run All Cells")
    expect_complete_run(page, name)
    latencies = ["figure,milliseconds"]
    for number, explorer in enumerate(page.locator(".explorer").all(), 1):
        explorer.evaluate(STOPWATCH)
        for _ in range(5):
            move_by_keyboard(explorer)
        latencies += [f"{number},{milliseconds:.0f}" for milliseconds in page.evaluate("latencies")]
        labels = explorer.locator("label.widget-label:visible").all_text_contents()
        assert labels and labels_reached_by_tab(page, explorer) == set(labels)
        explorer.screenshot(path=PICTURES / f"{name}_figure_{number}.png")
    for number, exercise in enumerate(page.locator(".exercise").all(), 1):
        answer(exercise)
        exercise.screenshot(path=PICTURES / f"{name}_exercise_{number}.png")
    # Written down and not judged, as other work on the machine counts too; test_widgets judges the kernel's part.
    (PICTURES / f"{name}_latencies.csv").write_text("\n".join(latencies) + "\n")

    page.evaluate("document.querySelectorAll('.jp-OutputArea-output').forEach(e => e.classList.add('of-before'))")
    choose(page, "Kernel", "Restart Kernel and Run All Cells…")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    expect(page.locator(".of-before")).to_have_count(0, timeout=ENOUGH)
    expect_complete_run(page, name)
    move_by_keyboard(page.locator(".explorer").first)


def test_start_page_opens_first_and_leads_to_a_notebook(page, lab):
    page.goto(lab.address(""))
    link = page.locator(".jp-RenderedMarkdown a[href*='theory/']").first
    expect(link).to_be_visible(timeout=ENOUGH)
    expect_idle(page)
    page.screenshot(path=PICTURES / "start.png")
    link.click()
    expect(page.locator(".jp-CodeCell").first).to_be_visible(timeout=ENOUGH)
    expect_idle(page)
