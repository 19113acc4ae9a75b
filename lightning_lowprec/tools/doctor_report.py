"""``lowprec doctor --report``: what a bug report needs to know about a machine, and nothing about its owner."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning_lowprec.conversion.name_suffixes import in_words
from lightning_lowprec.tools.output import format_table
from lightning_lowprec.version import __version__

_PATH: Final = re.compile(r"(?<![\w.>/\\])(?:~|[A-Za-z]:)?[/\\](?:[^\s'\"`:;,()<>|/\\]+[/\\])+")
"""The folders of an absolute path, without the last part."""
_QUOTED: Final = re.compile(r"(?<=['\"`])(?:~|[A-Za-z]:)?[/\\][^'\"`\n]*[/\\](?=[^'\"`/\\\n]+['\"`])")
"""The same in quotes, where folders may have spaces."""
_SECRET: Final = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL", re.IGNORECASE)
_TOO_SHORT: Final = 2  # letters: a name of one letter would be found everywhere
_NO_SECRET: Final = 6  # letters: a shorter value, such as KEYMAP=us, is no secret, and would be found inside of words
_OWN_WORDS: Final = re.compile(
    "cpu|cuda|gpu|cublas|driver|linux|python|cpython|torch|torchao|triton|lightning|transformer|transformers|engine"
    "|jsonargparse|matplotlib|system|device|backend|user|host|yes|no|not|none",
    re.IGNORECASE,
)
"""Words that every report has. A user or host of such a name is not named by them, and the report stays readable."""


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
    return without_owner("\n".join(["### `lowprec doctor --report`", "", *tables]))


def by_reason(verdicts: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return the cells of a table with one row per answer and reason, header first."""
    rows = [("runs", "precisions", "how, or why not")]
    for word, reason in dict.fromkeys((word, reason) for _, word, reason in verdicts):
        rows.append((word, in_words([v[0] for v in verdicts if v[1:] == (word, reason)]), reason))
    return rows


def without_owner(text: str) -> str:
    """Return a text without folders of paths, user name, host name, home folder, and values of secret variables."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _NO_SECRET and not _OWN_WORDS.fullmatch(value):
            text = text.replace(value, "SECRET")
    for folder in {str(Path.home()), str(Path.home().resolve())} - {"/"}:
        text = text.replace(folder, "~")
    text = _PATH.sub(".../", _QUOTED.sub(".../", text))
    host, user = socket.gethostname(), ""
    with suppress(OSError, KeyError):  # a container whose user has no name
        user = getpass.getuser()
    for name, placeholder in ((host, "HOST"), (host.partition(".")[0], "HOST"), (user, "USER")):
        if len(name) >= _TOO_SHORT and not _OWN_WORDS.fullmatch(name):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", placeholder, text)
    return text
