"""Look for layers whose FP8 forward loses more than 1 dB to the sums of a Hopper GPU, in 20 architectures.

    python -m benchmarks.accumulation --out FOLDER     # writes layers.json; some minutes of one core, 6 GB of memory
    python -m benchmarks.accumulation --table FOLDER   # prints the table of docs/how-it-works.md

Each architecture is its class of transformers with the published sizes, one block deep, in float32, on random tokens
or pictures. Its layers run twice: with the random weights of the class, and with *uneven* ones, which have what is
known of trained models (outlier channels: arXiv 2208.07339; rows of weights whose mean is not zero). How uneven is our
choice, not a measurement of trained weights.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowprec.conversion.matmuls import is_conv1d
from lightning_lowprec.numerics.tensor_cores import accumulate
from lightning_lowprec.tools.output import format_table

FILE = "layers.json"
RESULTS = Path(__file__).parent / "results"
TOKENS, COLUMNS = 48, 64
"""Rows of the input, and outputs, of which each layer's sums are computed."""
MEAN, OUTLIERS, FACTOR = 0.2, 0.005, 10.0
"""Uneven: the mean of a row of weights in standard deviations, the share of outlier channels, and their gain."""
LOST = 1.0
"""A layer is listed if it loses more, in dB."""


def _sizes(hidden: int, inner: int, heads: int, kv: int | None = None, **more: Any) -> dict[str, Any]:
    names = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return {**names, **({} if kv is None else {"num_key_value_heads": kv}), **more}


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 XL": ("gpt2", {"n_embd": 1600, "n_head": 25}),
    "GPT-J 6B": ("gptj", {"n_embd": 4096, "n_head": 16, "rotary_dim": 64}),
    "GPT-NeoX 20B": ("gpt_neox", _sizes(6144, 24576, 64)),
    "OPT 13B": ("opt", {"hidden_size": 5120, "ffn_dim": 20480, "num_attention_heads": 40, "word_embed_proj_dim": 5120}),
    "BLOOM 7B": ("bloom", {"hidden_size": 4096, "n_head": 32}),
    "Falcon 7B": ("falcon", {"hidden_size": 4544, "num_attention_heads": 71}),
    "Llama 3.1 8B": ("llama", _sizes(4096, 14336, 32, 8)),
    "Mistral 7B": ("mistral", _sizes(4096, 14336, 32, 8)),
    "Qwen2.5 14B": ("qwen2", _sizes(5120, 13824, 40, 8)),
    "Qwen3 8B": ("qwen3", _sizes(4096, 12288, 32, 8, head_dim=128)),
    "Gemma 2 9B": ("gemma2", _sizes(3584, 14336, 16, 8, head_dim=256)),
    "Phi-3 medium": ("phi3", _sizes(5120, 17920, 40, 10, pad_token_id=0)),
    "OLMo 2 13B": ("olmo2", _sizes(5120, 13824, 40, 40)),
    "StarCoder2 15B": ("starcoder2", _sizes(6144, 24576, 48, 4)),
    "Nemotron 15B": ("nemotron", _sizes(6144, 24576, 48, 8)),
    "Persimmon 8B": ("persimmon", _sizes(4096, 16384, 64)),
    "Arcee 4.5B": ("arcee", _sizes(2560, 18432, 20, 4, head_dim=128)),
    "T5 11B, encoder": ("t5", {"d_model": 1024, "d_ff": 65536, "num_heads": 128, "d_kv": 128}),
    "BERT large": ("bert", _sizes(1024, 4096, 16)),
    "ViT-H/14": ("vit", _sizes(1280, 5120, 16, patch_size=14)),
}
"""For each title: transformers' type of model, and the sizes of the published configuration."""


def block_of(kind: str, sizes: dict[str, Any]) -> nn.Module:
    """Return a model with one block and a small vocabulary, with the class's random weights."""
    from transformers import AutoConfig, AutoModel

    depth = {"gpt2": "n_layer", "gptj": "n_layer", "bloom": "n_layer", "t5": "num_layers"}
    config = AutoConfig.for_model(kind, **{depth.get(kind, "num_hidden_layers"): 1, "vocab_size": 256, **sizes})
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, 0)
    model: Any = AutoModel.from_config(config)
    return (model.encoder if kind == "t5" else model).eval()


def make_uneven(model: nn.Module) -> None:
    """Give some channels of each norm a larger gain, and each row of the layers' weights a mean."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 1:
            weight.data[torch.rand(len(weight)) < OUTLIERS] *= FACTOR
        elif (rows := _rows(module)) is not None:
            rows.add_(MEAN * float(rows[0].std()) * (2.0 * torch.randint(0, 2, (len(rows), 1)) - 1))


def _rows(module: nn.Module) -> Tensor | None:
    """Return the weight of a layer, [N, K], a view; None for another module."""
    if isinstance(module, nn.Linear):
        return module.weight.data
    return module.weight.data.t() if is_conv1d(module) else None  # type: ignore[operator, union-attr]


@torch.no_grad()
def losses(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Run the model once, and yield what the sums of each layer's forward lose; layers of one input and size once."""
    inputs: dict[str, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given[0]}))
        for name, module in model.named_modules()
        if _rows(module) is not None
    ]
    config: Any = model.config
    if (size := getattr(config, "image_size", None)) is not None:
        model(pixel_values=torch.randn(1, config.num_channels, size, size))
    else:
        model(input_ids=torch.randint(1, 256, (1, TOKENS)))
    for handle in handles:
        handle.remove()
    for name, input in inputs.items():
        rows = _rows(model.get_submodule(name))
        assert rows is not None
        x = input.reshape(-1, input.shape[-1])
        yield {"layer": name, "k": rows.shape[1], **lost(x[:TOKENS], rows[:: max(1, len(rows) // COLUMNS)])}


def lost(x: Tensor, weight: Tensor) -> dict[str, float]:
    """Return noise beside [M, K] @ [N, K].T in dB: of rounding to e4m3 with one scale, of sums, of both together.

    ``rounding`` compares exact sums of codes with sums of values; ``fast`` and ``promoted`` compare sums on Hopper
    with exact sums of codes; ``lost`` is by how much fast sums lower the ratio of the layer's output.
    """
    scales = [448 / part.abs().max().float() for part in (x, weight)]
    a, b = ((part * scale).to(torch.float8_e4m3fn) for part, scale in zip((x, weight), scales, strict=True))
    values = x.double() @ weight.double().t() * (scales[0].double() * scales[1].double())
    exact = a.double() @ b.double().t()
    fast, promoted = (accumulate(a, b, "hopper", choice).double() for choice in (True, False))
    rounding = _db(exact, values)
    found = {"rounding": rounding, "fast": _db(fast, exact), "promoted": _db(promoted, exact)}
    found["lost"] = rounding - _db(fast, values)
    return {name: round(value, 2) for name, value in found.items()}


def _db(one: Tensor, other: Tensor) -> float:
    noise = float((one - other).norm() / other.norm())
    return -20 * math.log10(noise) if noise else math.inf


def write(folder: Path) -> None:
    """Measure every architecture, and write the file."""
    rows = []
    for title, (kind, sizes) in ARCHITECTURES.items():
        torch.manual_seed(0)
        model = block_of(kind, sizes)
        for weights in ("random", "uneven"):
            if weights == "uneven":
                make_uneven(model)
            rows += [{"architecture": title, "weights": weights, **row} for row in losses(model)]
        print(title, max(row["lost"] for row in rows if row["architecture"] == title), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


def table(folder: Path) -> str:
    """Return the layers that lose more than ``LOST`` in Markdown, and below it how many do not."""
    rows = json.loads((folder / FILE).read_text(encoding="utf-8"))
    bad = sorted((row for row in rows if row["lost"] > LOST), key=lambda row: -row["lost"])
    cells = [["architecture", "layer", "K", "weights", "rounding", "fast sums", "promoted sums", "lost"]]
    for row in bad:
        layer = ".".join(part for part in row["layer"].split(".")[-2:])
        noise = [f"{row[name]:.0f} dB" for name in ("rounding", "fast", "promoted")]
        cells.append([row["architecture"], layer, f"{row['k']:,}", row["weights"], *noise, f"{row['lost']:.1f} dB"])
    said = []
    for weights in ("random", "uneven"):
        of = [row for row in rows if row["weights"] == weights]
        more = sum(row["lost"] > LOST for row in of)
        worst = max((row["lost"] for row in of if row["lost"] <= LOST), default=0.0)
        said.append(
            f"With {weights} weights {more} of {len(of)} layers lose more than 1 dB, the others at most {worst:.2f} dB."
        )
    return "\n".join([*format_table(cells, right=(2, 4, 5, 6, 7), markdown=True), "", " ".join(said)])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--out", type=Path, metavar="FOLDER")
    which.add_argument("--table", type=Path, metavar="FOLDER")
    options = parser.parse_args(argv)
    if options.table is not None:
        print(table(options.table))
    else:
        write(options.out)


if __name__ == "__main__":
    main()
