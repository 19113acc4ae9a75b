"""The model card of an exported folder: ``README.md`` with the front matter that the Hugging Face Hub reads."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightning_lowprec.extras import installed, require
from lightning_lowprec.version import __version__

FILE: Final = "README.md"
_PACKAGES: Final = ("torch", "lightning", "pytorch-lightning", "torchao", "transformer-engine", "transformers")
_ON_THE_HUB: Final = re.compile(r"[\w.-]+/[\w.-]+")
_TEXT: Final = """\
# {title}

{weights}

| | |
|---|---|
{rows}

~~~python
from transformers import {auto}

model = {auto}.from_pretrained("{title}")
~~~

Written by lightning_lowprec.{license}
"""


def write(
    folder: Path, title: str, model: Any, report: Mapping[str, Any], files_from: Path | None, precision: str | None
) -> None:
    """Write the card of a folder from the export's ``report``, with the license of the card in ``files_from``."""
    hub = require("huggingface_hub", "a model card")
    coded, format, dtype = report["weights_in_fp8"], report["format"], report["dtype"]
    path = str(model.config.name_or_path)
    base = path if _ON_THE_HUB.fullmatch(path) and not Path(path).exists() else None
    old = None if files_from is None else files_from / FILE
    license = hub.ModelCard.load(old, ignore_metadata_errors=True).data.license if old and old.is_file() else None
    data = hub.ModelCardData(
        base_model=base,
        base_model_relation=("quantized" if coded else "finetune") if base else None,
        library_name="transformers",
        license=license,
        tags=[*(["fp8", format] if coded else []), "lightning_lowprec"],
    )
    versions = {"lightning_lowprec": __version__, **installed(_PACKAGES)}
    rows = {
        "precision of the training": f"`{precision}`" if precision else "not known",
        "format": f"`{format}`; `{dtype}` for weights that are no codes",
        "codes as in the last step": f"{report['codes_of_the_last_step']} of {coded} weights",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items() if number),
    }
    is_causal = any(cls.__name__.endswith("ForCausalLM") for cls in type(model).__mro__)
    text = _TEXT.format(
        title=title,
        weights=f"{coded} weights are stored in FP8 (e4m3), all others in {dtype}.",
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        auto="AutoModelForCausalLM" if is_causal else "AutoModel",
        license="" if license else " No license was found beside the tokenizer: name the license before you publish.",
    )
    (folder / FILE).write_text(f"---\n{data.to_yaml()}\n---\n{text}", encoding="utf-8")
