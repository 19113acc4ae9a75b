"""Look through a built site: every link, picture and anchor is there, and no page loads anything from another host.

python -m tools.site.check site
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""What a browser loads by itself, and the attribute with its address. A link of an ``a`` waits for the reader."""


class Page(HTMLParser):
    """The anchors of one HTML page and the addresses that the page names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {"", "__top"}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note anchors, links and what is loaded."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADED and LOADED[tag] in found and found.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(found[LOADED[tag]])


def faults(site: Path) -> list[str]:
    """Return a line for every fault of the site in the folder ``site``."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site} has no page"]
    found = [fault for path, page in pages.items() if path.name != "404.html" for fault in _of_page(path, page, pages)]
    found += [
        f"{path.relative_to(site)}: loads {address}"
        for path in sorted(site.rglob("*.css"))
        for address in re.findall(r"url\([\"']?((?:https?:)?//[^\"')]+)", path.read_text(encoding="utf-8"))
    ]
    return found + _not_searchable(site, pages)


def _of_page(path: Path, page: Page, pages: dict[Path, Page]) -> list[str]:
    found = [f"{path.name}: loads {address}" for address in page.loaded if _elsewhere(address)]
    for address in [*page.links, *page.loaded]:
        parts = urlsplit(address)
        if _elsewhere(address) or parts.scheme in ("mailto", "data"):
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
        known = {known.resolve(): entry for known, entry in pages.items()}
        if not target.is_file():
            found.append(f"{path.name}: {address} leads nowhere")
        elif target in known and unquote(parts.fragment) not in known[target].anchors:
            found.append(f"{path.name}: {address} has no such anchor")
    return found


def _elsewhere(address: str) -> bool:
    return urlsplit(address).scheme in ("http", "https") or address.startswith("//")


def _not_searchable(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return a line for every page that the index of the search lacks."""
    index = site / "search" / "search_index.json"
    if not index.is_file():
        return [f"{index} is missing: the site has no search"]
    entries = json.loads(index.read_text(encoding="utf-8"))["docs"]
    indexed = {entry["location"].partition("#")[0] for entry in entries}
    names = [path.relative_to(site).as_posix() for path in pages if path.name != "404.html"]
    return [f"{name}: the search does not know the page" for name in names if name not in indexed]


def main(argv: Sequence[str]) -> int:
    """Print the faults, and return 1 if there are any."""
    (folder,) = argv
    found = faults(Path(folder))
    print("\n".join(found) or f"{folder}: every link, picture and anchor is there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
