"""Configs, indexes and files of strangers: read, or an error that names the file; nothing is fetched or called."""

import copy
import importlib.machinery
import json
import random
import re
import struct
import sys
import types

import pytest

from lightning_lowprec.checkpoints.weights import open_weights
from lightning_lowprec.tools.planning.source import load

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 48,
    "intermediate_size": 32, "hidden_act": "silu", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 48}
STRANGE = [
    None, -1, 0, 3, 2**70, 1.5, "", "x", "../x", "a/b", "Trainer", "torch.nn.Linear", [], [5], ["Trainer"], {},
    {"x": 1}, True, "os.system", "\0", ["pipeline"], 2, 4, 64, 128, "gelu",
]  # fmt: skip


def refusal(read, path):
    """The message with which a file is refused, None if the file is read."""
    try:
        read(path)
    except ValueError as error:
        return str(error)
    return None


def config(generator):
    """One of two configs with one or two values, or names, changed."""
    values = dict(generator.choice((LLAMA, GPT2)))
    for _ in range(generator.randint(1, 2)):
        names = [*values, "_attn_implementation", "attn_implementation", "_experts_implementation", "torch_dtype"]
        values[generator.choice(names)] = copy.deepcopy(generator.choice(STRANGE))
    return values


@pytest.fixture
def hub(monkeypatch):
    """A package of kernels that notes what it is asked to fetch."""
    asked = []
    module = types.ModuleType("kernels")
    module.__spec__ = importlib.machinery.ModuleSpec("kernels", None)
    module.get_kernel = lambda repository, *args, **kwargs: asked.append(repository)
    monkeypatch.setitem(sys.modules, "kernels", module)
    return asked


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_a_config_makes_a_model_or_an_error_that_names_the_file(seed, tmp_path, hub):
    generator = random.Random(seed)
    refused = 0
    for index in range(30):
        file = tmp_path / f"config-{index}.json"
        file.write_text(json.dumps(config(generator)))
        message = refusal(lambda path: load(str(path), {}), file)
        refused += message is not None
        assert message is None or file.name in message or "`source=" in message, file.read_text()
    assert 5 < refused < 30, "some values are right, most are not"
    assert hub == []


@pytest.mark.parametrize("where", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
@pytest.mark.parametrize("word", ["evil/kernels", "paged|evil/kernels", {"": "evil/kernels"}, ["evil/kernels"]])
def test_a_config_cannot_name_a_repository_of_kernels(where, word, tmp_path, hub):
    file = tmp_path / "config.json"
    for values in ({**LLAMA, where: word}, {**LLAMA, "text_config": {where: word}}):
        file.write_text(json.dumps(values))
        with pytest.raises(ValueError, match=rf"config\.json has {where}=.*expected one of: eager, sdpa"):
            load(str(file), {})
    assert hub == []


def test_known_kernels_need_not_be_installed_for_a_plan(tmp_path, hub):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "_attn_implementation": "flash_attention_2"}))
    assert type(load(str(file), {}).model).__name__ == "LlamaForCausalLM"
    assert hub == []


@pytest.mark.parametrize("names", [["Trainer"], ["pipeline"], ["AutoModel"], ["logging"], [5], {"a": 1}, "LlamaModel"])
def test_only_models_are_made(names, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "architectures": names}))
    with pytest.raises(ValueError, match=r"config\.json has "):
        load(str(file), {})


def safetensors(entries):
    """The bytes of a file of safetensors with this header, and 64 bytes of values."""
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


@pytest.mark.parametrize("seed", range(2))
def test_an_index_reads_files_of_its_folder_or_names_itself(seed, tmp_path):
    generator = random.Random(seed)
    right = {"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
    (tmp_path / "outside.safetensors").write_bytes(safetensors(right))
    for index in range(25):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(safetensors(right))
        strange = generator.choice([*STRANGE, "../outside.safetensors", str(tmp_path / "outside.safetensors")])
        shown = generator.choice([{"weight_map": {"a": strange}}, {"weight_map": strange}, strange, {"x": strange}])
        (folder / "model.safetensors.index.json").write_text(json.dumps(shown))
        with pytest.raises(ValueError, match=re.escape(str(folder))):
            open_weights(folder)


def test_a_file_of_values_that_torch_cannot_read_is_named(tmp_path):
    file = tmp_path / "four-bits.safetensors"
    file.write_bytes(safetensors({"a.weight": {"dtype": "F4", "shape": [8, 16], "data_offsets": [0, 64]}}))
    with pytest.raises(ValueError, match=r"'a\.weight' of '.*four-bits.safetensors' has the format F4"):
        open_weights(file)
