"""The pages of the docs and their fenced blocks of code."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FILES = [ROOT / "README.md", ROOT / ".github" / "upstream.md", *DOCS.rglob("*.md")]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in FILES)


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    number: int
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.removeprefix('docs/').removesuffix('.md')}-{self.number}"


def blocks(language: str | None = None) -> list[Block]:
    found = []
    for page in PAGES:
        counts: dict[str, int] = {}
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL):
            indent, kind, code = match.groups()
            counts[kind] = counts.get(kind, 0) + 1
            code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
            found.append(Block(page, kind, counts[kind], code))
    return [block for block in found if language in (None, block.language)]
