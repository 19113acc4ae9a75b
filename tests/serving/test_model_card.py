"""The model card of an exported folder, read by the library of the Hub, and its code, run."""

import lightning as L
import pytest
from huggingface_hub import ModelCard

import lightning_lowprec
from lightning_lowprec import __version__
from tests.serving.models import llama


def exported(folder, precision, **options):
    model = llama()
    model.config._name_or_path = options.pop("base", "")
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)
    lightning_lowprec.export(fabric.setup_module(model), folder / "small", progress=False, **options)
    return ModelCard.load(folder / "small" / "README.md")


def test_front_matter_and_code(tmp_path, monkeypatch):
    tokenizer = tmp_path / "base"
    tokenizer.mkdir()
    (tokenizer / "README.md").write_text("---\nlicense: apache-2.0\ntags: [base]\n---\n# Base\n")
    card = exported(tmp_path, "fp8-rowwise", base="owner/base-1b", tokenizer=tokenizer)
    assert card.data.to_dict() == {
        "base_model": "owner/base-1b",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "license": "apache-2.0",
        "tags": ["fp8", "compressed-tensors", "lightning_lowprec"],
    }
    assert f"lightning_lowprec {__version__}, torch " in card.text
    assert "| codes as in the last step | 7 of 7 weights |" in card.text
    assert "| precision of the training | not known |" in card.text  # no Trainer
    assert "license" not in card.text
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(card.text.split("~~~python\n")[1].split("~~~")[0], scope)
    assert type(scope["model"]).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("base", ["", "/a/folder/on/disk", "here"])
def test_what_is_not_known_is_left_out(tmp_path, base):
    card = exported(tmp_path, "bf16-mixed", format="hf", base=base)
    assert card.data.to_dict() == {"library_name": "transformers", "tags": ["lightning_lowprec"]}
    assert "name the license before you publish" in card.text
    assert "0 weights are stored in FP8 (e4m3), all others in bf16." in card.text
