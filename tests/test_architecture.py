"""docs/architecture.md names files that are there, and every floor that the layering test holds."""

import re

from tests.test_layering import FLOORS, PACKAGE

ROOT = PACKAGE.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def test_every_path_and_every_name_in_the_diagrams_is_there():
    paths = set(re.findall(r"`([\w/]+(?:\.py|/))`", TEXT))
    assert len(paths) > 30
    assert [path for path in sorted(paths) if not (PACKAGE / path).exists() and not (ROOT / path).exists()] == []
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in ("Fp8GatherShard", "MsampWeight", "LowPrecision", "Transposable", "wire_format"):
        assert name in TEXT
        assert re.search(rf"\b{name}\b", code), name


def test_every_room_stands_on_its_floor():
    drawn = TEXT.split("```")[1]
    floors = re.split(r"floor \d", drawn)[1:]
    rooms = [set(re.findall(r"(?:^|\s)(\w+)(?:/|\.py)(?=\s|$)", floor)) for floor in floors]
    assert rooms == FLOORS
