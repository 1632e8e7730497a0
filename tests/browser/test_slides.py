"""The lessons as slides in Chromium: a slide does not scroll, its questions work, and the speaker has notes."""

import subprocess

import pytest
from playwright.sync_api import expect

from fragility_lab import paths

SPHINX = paths.PROJECT / ".site/bin/python"
# What has no shorter form: the table of all constants, and the explorer of plans.
TALL = {("3_layernorm_and_epsilon", "Appendix: constants and slack"), ("7_adjoint_predictor", "The model, live")}
LESSONS = sorted(path.stem for path in (paths.NOTEBOOKS / "theory").glob("*.ipynb"))
# Every slide is shown in turn, as it has no height before.
MEASURE = """async () => {
    const found = [];
    for (const slide of Reveal.getSlides()) {
        const {h, v} = Reveal.getIndices(slide);
        Reveal.slide(h, v);
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        found.push({
            title: slide.querySelector("h1, h2").textContent.trim(),
            over: Math.max(slide.scrollHeight - slide.clientHeight, slide.scrollWidth - slide.clientWidth),
            shown: slide.querySelectorAll(".lesson-exercise[data-kind=question], .readout").length,
            notes: slide.querySelectorAll("aside.notes").length,
        });
    }
    return found;
}"""


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    """The slides of this checkout."""
    assert SPHINX.exists(), "run `make slides` first: it installs Sphinx"
    folder = tmp_path_factory.mktemp("slides")
    command = [SPHINX, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/site/slides", "-d", folder / "doctrees"]
    subprocess.run([*command, "-b", "revealjs", ".", folder / "slides"], cwd=paths.PROJECT, check=True)
    return folder / "slides" / "notebooks" / "theory"


def opened(browser, path):
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_function("window.Reveal?.isReady() && (!window.MathJax || MathJax.startup.promise)")
    page.evaluate("async () => { await window.MathJax?.startup.promise; await document.fonts.ready; }")
    return page, errors


@pytest.mark.parametrize("name", LESSONS)
def test_one_idea_a_slide_without_scrolling(browser, slides, name):
    page, errors = opened(browser, slides / f"{name}.html")
    found = page.evaluate(MEASURE)
    assert len(found) >= 14 and all(slide["notes"] == 1 for slide in found)
    assert max(slide["shown"] for slide in found) == 1, "one picture or question a slide"
    over = {(name, slide["title"]) for slide in found if slide["over"] > 1}
    assert over == {place for place in TALL if place[0] == name}
    assert errors == []
    page.close()


def test_a_question_on_a_slide_is_answered_by_keyboard_and_notes_stay_hidden(browser, slides):
    page, errors = opened(browser, slides / "2_attention_error.html")
    page.evaluate("""() => { const slide = document.querySelector('[data-kind=question]').closest('section');
        const {h, v} = Reveal.getIndices(slide); Reveal.slide(h, v); }""")
    asked = page.locator('[data-kind="question"]').first
    asked.get_by_role("radio").nth(1).focus()
    place = page.evaluate("JSON.stringify(Reveal.getIndices())")
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")  # which reveal.js would take for the next slide
    expect(asked.locator(".le-verdict")).to_have_text("Right.")
    assert page.evaluate("JSON.stringify(Reveal.getIndices())") == place
    expect(page.locator("aside.notes").first).to_be_hidden()
    assert errors == []
    page.close()
