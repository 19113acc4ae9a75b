"""The text of ``convergence`` as tokens, made once per machine and output folder.

The text is that of ``benchmarks.convergence``: sources of the installed packages, because a machine without network has
no other text of this size. The digest tells the text of one machine from that of another: losses on different texts do
not compare. The tokenizer is a byte-level BPE as GPT-2's, trained on the beginning of the training text.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convergence import corpus as sources
from benchmarks.gpu_lane.item import stage

SUFFIX = "-tokens.npz"
"""Behind the name of the output folder. The file lies beside it, and is too large to come back from a GPU machine."""
END = "<|endoftext|>"
"""The token between two files."""
GROUP = 512
"""Files that are encoded at once."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much text, and how many different tokens."""

    bytes: int = 160_000_000
    """At most; about 40 million tokens, more than one run reads."""
    sample_bytes: int = 20_000_000
    """Of the training text, for the tokenizer: about 10 seconds on two CPU cores."""
    vocabulary: int = 50_257
    """GPT-2's."""


TOY = Size(bytes=1_000_000, sample_bytes=100_000, vocabulary=320)


@dataclass(frozen=True)
class Corpus:
    """Tokens, and what they were made of."""

    train: np.ndarray[Any, Any]
    """(N,) uint16."""
    val: np.ndarray[Any, Any]
    """(M,) uint16."""
    facts: dict[str, Any]
    """Digests of text and tokens, files, tokens, and the seconds that all of it took."""


def corpus(size: Size, out: Path | None, packages: Path | None = None) -> Corpus:
    """Return the tokens in the file beside the folder ``out``; make and keep them, if it has none of this size.

    ``packages`` is the folder of the sources; by default the one where packages are installed.
    """
    file = None if out is None else out.with_name(f"{out.name}{SUFFIX}")
    if file is not None and file.exists():
        with np.load(file) as kept:
            facts = json.loads(str(kept["facts"]))
            if facts["size"] == asdict(size):
                return Corpus(kept["train"], kept["val"], facts)
    made = make(size, packages or sources.PACKAGES)
    if file is not None:
        temporary = file.with_name(f".{file.name}")
        with temporary.open("wb") as stream:
            np.savez(stream, train=made.train, val=made.val, facts=np.array(json.dumps(made.facts)))
        os.replace(temporary, file)
    return made


def make(size: Size, packages: Path) -> Corpus:
    """Read the sources, train the tokenizer, and encode."""
    start = time.perf_counter()
    train, val, digest = texts(size, packages)
    read_s = time.perf_counter() - start
    stage("tokenizer", read_s=read_s)
    tokenizer = trained_tokenizer(cut(train, size.sample_bytes), size.vocabulary)
    tokenizer_s = time.perf_counter() - start - read_s
    stage("encoding", tokenizer_s=tokenizer_s)
    tokens = {name: encoded(tokenizer, several) for name, several in (("train", train), ("val", val))}
    lengths = {"train": sum(map(len, train)), "val": sum(map(len, val))}
    facts = {
        "digest": digest,
        "tokens_digest": hashlib.sha256(tokens["train"].tobytes()).hexdigest()[:16],
        "size": asdict(size), "vocabulary": tokenizer.get_vocab_size(),
        **{f"{name}_files": len(several) for name, several in (("train", train), ("val", val))},
        **{f"{name}_characters": length for name, length in lengths.items()},
        **{f"{name}_tokens": len(found) for name, found in tokens.items()},
        "read_s": read_s, "tokenizer_s": tokenizer_s,
        "encode_s": time.perf_counter() - start - read_s - tokenizer_s,
    }  # fmt: skip
    return Corpus(tokens["train"], tokens["val"], facts)


def texts(size: Size, packages: Path) -> tuple[list[str], list[str], str]:
    """Return the files' texts for training and for validation, in the order of the hashes, and the digest.

    The digest is the SHA-256 of all bytes: those for training before those for validation, each sorted by kind.

    Raises:
        ValueError: there is no text.
    """
    chosen: dict[tuple[str, str], list[bytes]] = {
        (part, kind): [] for part in ("train", "val") for kind in sources.KINDS
    }
    several: dict[str, list[str]] = {"train": [], "val": []}
    for name, content in sources.texts(packages, size.bytes):
        part = sources.part_of(name)
        chosen[part, sources.kind_of(name) or ""].append(content)
        several[part].append(content.decode(errors="replace"))
    if not all(several.values()):
        raise ValueError(f"{packages} has no sources for training and validation.")
    digest = hashlib.sha256()
    for content in chain(*chosen.values()):
        digest.update(content)
    return several["train"], several["val"], digest.hexdigest()


def cut(several: list[str], most: int) -> list[str]:
    """Return the first texts, with ``most`` characters at least if there are so many."""
    total = 0
    for index, text in enumerate(several):
        total += len(text)
        if total >= most:
            return several[: index + 1]
    return several


def trained_tokenizer(several: list[str], vocabulary: int) -> Any:
    """Return a byte-level BPE."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(several, trainer)
    return tokenizer


def encoded(tokenizer: Any, several: list[str]) -> np.ndarray[Any, Any]:
    """Return the tokens of all texts, one after the other, each with the end token behind it: (N,) uint16."""
    end = tokenizer.token_to_id(END)
    found = [
        np.array([*encoding.ids, end], dtype=np.uint16)
        for first in range(0, len(several), GROUP)
        for encoding in tokenizer.encode_batch_fast(several[first : first + GROUP])
    ]
    return np.concatenate(found)
