"""Find dead links of a static site: ``python tools/check_links.py FOLDER``.

Every local link of every HTML page must lead to a file of the folder, and its fragment to an anchor of that page. Links
into the web are not followed. Prints what is dead and exits with 1 if anything is.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Links(HTMLParser):
    """The links of a page, and the anchors that links may name."""

    def __init__(self, page: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attributes if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        self.links += [found[name] for name in ("href", "src") if name in found]


def dead_links(folder: Path) -> list[tuple[Path, str]]:
    """(page, link) of every local link that leads nowhere."""
    folder = folder.resolve()
    files = [page for page in sorted(folder.rglob("*.html")) if "_static" not in page.relative_to(folder).parts]
    pages = {page: Links(page.read_text(encoding="utf-8")) for page in files}  # files of a theme are templates
    dead = []
    for page, found in pages.items():
        for link in dict.fromkeys(found.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = there / "index.html" if there.is_dir() else there
            fragment = unquote(parts.fragment)
            if not target.is_file() or (fragment and target in pages and fragment not in pages[target].anchors):
                dead.append((page.relative_to(folder), link))
    return dead


if __name__ == "__main__":
    found = dead_links(Path(sys.argv[1]))
    print("\n".join(f"{page}: {link}" for page, link in found) or "no dead links")
    sys.exit(bool(found))
