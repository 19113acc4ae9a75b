"""Write a C++ file with a function for every name of a CUDA header that the null GPU's own sources do not define.

    python stubs.py HEADER RETURN_TYPE STATUS SOURCE... > stubs.cpp

Each such function writes a record "unknown" and returns the status STATUS ("not supported"), so that a library which
asks for more than the null GPU knows fails where it asks, and the record says for what.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DEFINED = re.compile(r"(?:NULLGPU_API [^(\n]*?\b|DOES_NOTHING\()(cu\w+)(?=[()])")


def declared(header: str, return_type: str) -> set[str]:
    """Return the functions that a header declares, with the names that its macros give them (``_v2``)."""
    words = rf"{return_type}\s+(?:CUDARTAPI|CUDAAPI|CUBLASWINAPI)"
    names = set(re.findall(rf"{words}\s+(cu\w+)\s*\(", header))
    renamed = dict(re.findall(r"#\s*define (cu\w+)\s+(?:__CUDART_API_PTSZ\()?(cu\w+?_v\d)\b", header))
    return names | {renamed[name] for name in names & set(renamed)}


def stubs(header: Path, return_type: str, status: str, sources: list[Path]) -> str:
    """Return the C++ text."""
    defined = {name for source in sources for name in DEFINED.findall(source.read_text())}
    missing = sorted(declared(header.read_text(), return_type) - defined)
    lines = [
        "#include <string>",
        "namespace nullgpu { void record(const char*, const std::string&, const std::string& = std::string()); }",
        '#define UNKNOWN(name) extern "C" __attribute__((visibility("default"))) int name(...) \\',
        f'  {{ nullgpu::record("unknown", #name); return {status}; }}',
    ]
    return "\n".join(lines + [f"UNKNOWN({name})" for name in missing]) + "\n"


if __name__ == "__main__":
    header, return_type, status, *sources = sys.argv[1:]
    print(stubs(Path(header), return_type, status, [Path(source) for source in sources]), end="")
