"""docs/names.md tells the truth about names and suffixes, by hand and in the list that the build writes."""

import re

from lightning_lowprec import FP8TE, FP8TorchAO, Int8TorchAO
from lightning_lowprec.conversion.name_suffixes import families, split
from lightning_lowprec.names import TABLE
from tests.site.pages import DOCS

PAGE = (DOCS / "names.md").read_text()


def test_the_table_lists_exactly_the_registered_names():
    rows = re.findall(r"^\| (`.*?) \|", PAGE, flags=re.MULTILINE)
    listed = [name for row in rows if "precision=" not in row for name in re.findall(r"`([^`]+)`", row)]
    suffixes = {name for name in listed if name.startswith("-")}
    assert sorted({*listed} - suffixes) == sorted(name for stems in families(TABLE).values() for name in stems)
    assert suffixes == {suffix for found in families(TABLE) for suffix in found} - {"-fp16"}  # two names have it


def test_the_lines_of_endings_say_which_names_have_them():
    """The table of endings, and the names that it excepts."""
    text = " ".join(PAGE.split())
    having = {ending: {stem for found, stems in families(TABLE).items() if ending in found for stem in stems}
              for ending in ("-fp16", "-sr")}  # fmt: skip
    assert having["-fp16"] == {"fp8-hybrid", "fp8-hybrid-te"}
    assert all(f"`{name}-fp16`" in text for name in having["-fp16"])
    plugins = (FP8TorchAO, FP8TE, Int8TorchAO)
    fp8 = {name for name in TABLE if TABLE[name].plugin in plugins and not split(name)[1]}
    assert fp8 - having["-sr"] == {"mxfp8-te", "nvfp4-te"}
    assert "every FP8 and int8 format except `mxfp8-te` and `nvfp4-te`" in text
