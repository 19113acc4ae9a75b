"""Build the package as setuptools does, with one file more in an editable install: ``lightning_lowprec_entry.py``.

setuptools writes the metadata of an editable install into the environment, and leaves the modules in the project's
folder. torch reads the metadata at every ``import torch`` and fails if the module of an entry point is missing, so this
module has to lie beside the metadata. ``pyproject.toml`` names this file as the build backend.
"""

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # the other hooks of a build backend
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ENTRY = "lightning_lowprec_entry.py"


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build the wheel of an editable install, add the entry file, and return the name of the wheel."""
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory, name)
    entry = Path(ENTRY).read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        files = {info: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(ENTRY, entry)
        for info, content in files.items():
            if info.filename.endswith(".dist-info/RECORD"):
                content = _record(entry) + content
            archive.writestr(info, content)
    return name


def _record(content: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{ENTRY},sha256={digest},{len(content)}\n".encode()
