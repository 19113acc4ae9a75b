"""docs/names.md tells the truth about names and suffixes, by hand and in the list that the build writes."""

import re

from lightning_lowprec import FP8TE, FP8TorchAO, Int8TorchAO, MXFP8TorchAO, NVFP4TorchAO
from lightning_lowprec.conversion.name_suffixes import families, split
from lightning_lowprec.names import TABLE
from tests.site.pages import DOCS

PAGE = (DOCS / "names.md").read_text()


def test_the_table_lists_exactly_the_registered_names():
    rows = re.findall(r"^\| (`.*?) \|", PAGE, flags=re.MULTILINE)
    listed = [name for row in rows if "precision=" not in row for name in re.findall(r"`([^`]+)`", row)]
    suffixes = {name for name in listed if name.startswith("-")}
    assert sorted({*listed} - suffixes) == sorted(name for stems in families(TABLE).values() for name in stems)
    assert suffixes == {suffix for found in families(TABLE) for suffix in found}


def test_the_lines_of_suffixes_say_which_names_have_them():
    """`-fp16` after: names. The others: all FP8 names but those that the line excepts."""
    line = next(line for line in PAGE.split("\n\n") if "`NAME-fp16`" in line)
    having = {suffix: {stem for found, stems in families(TABLE).items() if suffix in found for stem in stems}
              for suffix in ("-fp16", "-sr")}  # fmt: skip
    said = re.findall(r"`([^`]+)`", line.split("`NAME-fp16`")[1].split(".")[0])
    assert set(said) == having["-fp16"]
    fp8 = {
        name
        for name in TABLE
        if TABLE[name].plugin in (FP8TorchAO, FP8TE, Int8TorchAO, MXFP8TorchAO, NVFP4TorchAO) and not split(name)[1]
    }
    assert fp8 - having["-sr"] == {"mxfp8", "mxfp8-te", "nvfp4", "fp8-lean"}
    assert "`int8-mixed` and every FP8 name except `mxfp8`, `mxfp8-te`, `nvfp4` and `fp8-lean`" in " ".join(
        PAGE.split()
    )
