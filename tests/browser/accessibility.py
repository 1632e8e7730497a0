"""What keeps people from using a page, by axe-core."""

from playwright.sync_api import Page
from prepare import AXE

WIDTHS = (1400, 900, 390)
RUN = """async () => (await axe.run()).violations
    .filter(v => ['serious', 'critical'].includes(v.impact))
    .map(v => v.id + ': ' + v.nodes.map(n => n.html + ' ' + n.failureSummary).slice(0, 3).join(' | '))"""


def serious(page: Page) -> list[str]:
    """The serious violations that axe-core finds on ``page`` as it is."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    return page.evaluate(RUN)
