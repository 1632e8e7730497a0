"""Write docs/sentence.svg, the broken sentence as README has it: one text in four precisions (``make docs``)."""

import html
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fragility_lab.explorer.sentence import DATA
from fragility_lab.running.files import write_whole

FIGURE = Path(__file__).parents[1] / "sentence.svg"
NAMES = {
    "fp32": ("fp32", "32 bits"), "bf16": ("bf16", "16 bits"), "fp8-dynamic": ("fp8", "8 bits"),
    "w4a16-g128": ("int4", "4-bit weights"),
}  # fmt: skip
WIDTH, LEFT, LINE, LETTERS = 840, 126, 23, 76  # of the picture, of the names, of a line, and its most letters
# Letters have the size of the reader's own font, so a mark is a colour and a line below, whose place needs no width.
STYLE = """
text { font: 17px system-ui, "DejaVu Sans", sans-serif; fill: #1b1f24 }
.name { font-weight: 700 } .small { font-size: 14px; fill: #57606a }
.first { font-weight: 700; fill: #a33d00; text-decoration: underline } .after { fill: #a33d00 }
.page { fill: #fff } .rule { stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ed } .small { fill: #a8b1bb } .first, .after { fill: #ffb454 }
  .page { fill: #14171b } .rule { stroke: #3d444d }
}
"""


def shown(word: str) -> str:
    """A ``word`` in quotes, without the space before it."""
    return f"“{word.strip() or 'a line break'}”"


def because(text: dict[str, Any], recipe: dict[str, Any]) -> str:
    """Why the first word that ``recipe`` changes is another one, or that none is."""
    if not recipe["changed"]:
        return "Every word stays."
    change = recipe["changed"][0]
    wanted, said = shown(text["words"][change["word"]]), shown(change["said"])
    moved = f"{change['fp32'] - change['low']:.2f} logits from a lead of {change['fp32']:.2f}"
    told = f"{said} for {wanted}: rounding takes {moved}."
    return f"{told} {change['saved'][0].capitalize()} in fp32 would keep {wanted}." if change["saved"] else told


def marked(piece: str, kind: str) -> str:
    """A ``piece`` of a line in the style ``kind``, but for the spaces before it."""
    inner = piece.lstrip()
    spaces = " " * (len(piece) - len(inner))
    return f'{spaces}<tspan class="{kind}">{html.escape(inner)}</tspan>' if kind and inner else html.escape(piece)


def lines_of(text: dict[str, Any], words: list[str]) -> Iterator[str]:
    """The ``words`` as lines of SVG; the first word that is not that of fp32, and all after it, are marked."""
    first = next((place for place, (a, b) in enumerate(zip(words, text["words"])) if a != b), len(words))
    told, ends = "", []
    for part in (words[:first], words[first : first + 1], words[first + 1 :]):
        told = " ".join((told + "".join(part)).split())
        ends.append(len(told))
    start = 0
    for line in textwrap.wrap(told, LETTERS):
        start = told.index(line, start)
        edges = [0, *(min(max(end - start, 0), len(line)) for end in ends)]
        yield "".join(marked(line[a:b], kind) for kind, a, b in zip(("", "first", "after"), edges, edges[1:]))
        start += len(line)


def figure(texts: list[dict[str, Any]], model: str) -> str:
    """The picture of the first of ``texts`` by ``model``."""
    text, y = texts[0], 30
    found = [f'<text x="16" y="{y}" class="small">{model} goes on: {html.escape(text["prompt"])} …</text>']
    for row in [{"name": "fp32", "words": text["words"]}, *text["recipes"]]:
        y += 14
        found.append(f'<line class="rule" x1="16" x2="{WIDTH - 16}" y1="{y}" y2="{y}"/>')
        name, bits = NAMES[row["name"]]
        found.append(f'<text x="16" y="{y + LINE}" class="name">{name}</text>')
        found.append(f'<text x="16" y="{y + 2 * LINE - 3}" class="small">{bits}</text>')
        for line in lines_of(text, row["words"]):
            y += LINE
            found.append(f'<text x="{LEFT}" y="{y}" xml:space="preserve">{line}</text>')
        if "changed" in row:
            y += LINE
            found.append(f'<text x="{LEFT}" y="{y}" class="small">{html.escape(because(text, row))}</text>')
    y += 18
    about = f"One text that {model} writes in fp32, bf16, fp8 and int4"
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    opened = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{about}</title>\n<style>{STYLE}</style>'
    )
    page = f'<rect class="page" width="{WIDTH}" height="{y}"/>'
    return "\n".join([opened, page, *found, "</svg>\n"])


def main() -> None:
    write_whole(FIGURE, figure(**json.loads(DATA.read_text("utf-8"))))
    print(f"written: {FIGURE}")


if __name__ == "__main__":
    main()
