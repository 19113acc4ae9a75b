"""``lowprec doctor --report``: what a bug report needs to know about a machine, without the folders of paths."""

import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_lowprec.conversion.name_suffixes import in_words
from lightning_lowprec.tools.output import format_table
from lightning_lowprec.version import __version__

_PATH: Final = re.compile(r"(?<![\w.>/\\])(?:~|[A-Za-z]:)?[/\\](?:[^\s'\"`:;,()<>|/\\]+[/\\])+")
"""The folders of an absolute path, without the last part."""
_QUOTED: Final = re.compile(r"(?<=['\"`])(?:~|[A-Za-z]:)?[/\\][^'\"`\n]*[/\\](?=[^'\"`/\\\n]+['\"`])")
"""The same in quotes, where folders may have spaces."""


def markdown(facts: Mapping[str, Any], verdicts: Sequence[tuple[str, str, str]]) -> str:
    """Return the report."""
    versions = {**facts["versions"], "lightning-lowprec": __version__}
    machine = [
        ("what", "found"),
        ("system", f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".rstrip(", ")),
        ("Python", f"{platform.python_implementation()} {facts['python']}"),
        ("device", facts["device"]),
        ("architecture", facts["architecture"]),
        ("bf16", "yes" if facts["bf16"] else "no"),
        ("driver", facts["driver"] or "no NVIDIA driver"),
        ("CUDA of torch", facts["cuda"] or "none"),
        *((library, number or "not installed") for library, number in versions.items()),
        ("names", facts["names"]),
        *((f"backend {title}", " ".join(status.split())) for title, status in facts["backends"].items()),
        *((f"{library} does not import", why) for library, why in facts["broken"].items()),
        ("private names that moved", ", ".join(facts["moved"]) or "none"),
    ]
    rows = [(word, names, " ".join(reason.split())) for word, names, reason in by_reason(verdicts)]
    tables = [*format_table(machine, markdown=True), "", *format_table(rows, markdown=True)]
    return without_folders("\n".join(["### `lowprec doctor --report`", "", *tables]))


def by_reason(verdicts: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return the cells of a table with one row per answer and reason, header first."""
    rows = [("runs", "precisions", "how, or why not")]
    for word, reason in dict.fromkeys((word, reason) for _, word, reason in verdicts):
        rows.append((word, in_words([v[0] for v in verdicts if v[1:] == (word, reason)]), reason))
    return rows


def without_folders(text: str) -> str:
    """Return a text whose absolute paths have their last part only: folders name users and projects."""
    return _PATH.sub(".../", _QUOTED.sub(".../", text))
