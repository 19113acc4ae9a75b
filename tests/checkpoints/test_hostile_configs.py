"""Configs of strangers: `lowprec plan` reads one, or names it in an error; nothing is fetched or called."""

import copy
import importlib.machinery
import json
import random
import re
import sys
import types

import pytest

from lightning_lowprec.tools.cli import main

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 48,
    "intermediate_size": 32, "hidden_act": "silu", "architectures": ["LlamaForCausalLM"], "attn_implementation": "sdpa",
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 48}
STRANGE = [
    None, -1, 0, 3, 2**70, 1.5, "", "x", "../x", "a/b", "Trainer", "torch.nn.Linear", [], [5], ["Trainer"], {},
    {"x": 1}, True, "os.system", "\0", ["pipeline"], 2, 4, 64, 128, "gelu",
]  # fmt: skip


def config(generator):
    values = dict(generator.choice((LLAMA, GPT2)))
    for _ in range(generator.randint(1, 2)):
        names = [*values, "_attn_implementation", "attn_implementation", "_experts_implementation", "torch_dtype"]
        values[generator.choice(names)] = copy.deepcopy(generator.choice(STRANGE))
    return values


@pytest.fixture
def hub(monkeypatch):
    asked = []
    module = types.ModuleType("kernels")
    module.__spec__ = importlib.machinery.ModuleSpec("kernels", None)
    module.get_kernel = lambda repository, *args, **kwargs: asked.append(repository)
    monkeypatch.setitem(sys.modules, "kernels", module)
    return asked


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_a_config_makes_a_model_or_an_error_that_names_the_file(seed, tmp_path, hub, capsys):
    generator = random.Random(seed)
    refused = 0
    for index in range(30):
        file = tmp_path / f"config-{index}.json"
        file.write_text(json.dumps(config(generator)))
        refused += (status := main(["plan", str(file)])) == 2
        said = capsys.readouterr().err
        assert status != 2 or file.name in said or "is no model; expected" in said, file.read_text()
    assert 5 < refused < 30, "some values are right, most are not"
    assert hub == []


@pytest.mark.parametrize("where", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
@pytest.mark.parametrize("word", ["evil/k", "paged|evil/k", {"": "sdpa", "x": "evil/k"}, [None, "evil/k"]])
def test_a_config_cannot_name_a_repository_of_kernels(where, word, tmp_path, hub, capsys):
    file = tmp_path / "config.json"
    for values in ({**LLAMA, where: word}, {**LLAMA, "text_config": {where: word}}):
        file.write_text(json.dumps(values))
        assert main(["plan", str(file)]) == 2
        assert re.search(rf"config\.json has {where}=.*expected one of: eager, sdpa", capsys.readouterr().err)
    assert hub == []


def test_only_models_are_made_and_known_kernels_need_not_be_installed(tmp_path, hub, capsys):
    file = tmp_path / "config.json"
    for names in (["Trainer"], ["pipeline"], ["AutoModel"], ["logging"], [5], {"a": 1}, "LlamaModel"):
        file.write_text(json.dumps({**LLAMA, "architectures": names}))
        assert main(["plan", str(file)]) == 2
        assert "config.json has architectures=" in capsys.readouterr().err
    file.write_text(json.dumps({**LLAMA, "_attn_implementation": "flash_attention_2", "architectures": ["LaterLM"]}))
    assert main(["plan", str(file)]) == 0
    assert hub == []
