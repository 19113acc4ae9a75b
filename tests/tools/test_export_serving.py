"""`lowprec export --format`: from checkpoints to folders, `--check`, and what is refused."""

import json
import math
import os
import re
import sys
import warnings
from itertools import accumulate
from pathlib import Path

import lightning as L
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import lightning_lowprec
from lightning_lowprec.tools.cli import main
from tests.forked import python
from tests.serving.models import SIZES, Module, llama, tensors
from tests.toys import QUIET

ROOT = Path(lightning_lowprec.__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    data = torch.utils.data.DataLoader(torch.arange(128).reshape(8, 16) % 96, batch_size=4)
    module = Module(probe=torch.nn.Linear(2, 2))  # the checkpoint has more than the model
    trainer = L.Trainer(precision="fp8-rowwise", accelerator="cpu", max_steps=2, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data)
    trainer.save_checkpoint(folder / "trainer.ckpt")
    net = module.net
    torch.save({"model": net.state_dict(), "step": 2}, folder / "fabric.ckpt")
    save_file({n: t.contiguous() for n, t in net.state_dict().items()}, folder / "plain.safetensors")
    torch.save(net.state_dict() | {"step": 2}, folder / "old.pt", _use_new_zipfile_serialization=False)
    averaged = {f"ema.{name}": tensor / 3 for name, tensor in net.state_dict().items()}
    averaged["ema.seen"] = torch.ones(2, dtype=torch.bool)
    buffers = {"model.rotary_emb.inv_freq": torch.ones(16)}  # which older versions have saved
    of_net = {f"net.{name}": tensor for name, tensor in (net.state_dict() | buffers).items()}
    torch.save({"model": averaged, "weights": averaged | of_net}, folder / "two.ckpt")
    (folder / "model" / "tokenizer").mkdir(parents=True)  # no file
    net.config.save_pretrained(folder / "model")
    (folder / "model" / "generation_config.json").write_text('{"max_new_tokens": 9}')
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (folder / "model" / name).write_text(name)
    lightning_lowprec.export(net, folder / "live", format="compressed-tensors", progress=False)
    return folder


def export(folder, checkpoint, out, *options, format="compressed-tensors", precision="fp8-rowwise"):
    given = [] if precision is None else [f"--precision={precision}"]
    given += [] if any(option.startswith("--model") for option in options) else [f"--model={folder / 'model'}"]
    return main(["export", str(folder / checkpoint), str(out), f"--format={format}", *given, *options])


@pytest.mark.parametrize("checkpoint", ["trainer.ckpt", "fabric.ckpt", "plain.safetensors", "old.pt"])
def test_every_form_of_a_checkpoint_becomes_what_the_live_model_becomes(trained, tmp_path, capsys, checkpoint):
    others = [f"--model={trained / 'model' / 'config.json'}", "--precision=fp8-rowwise-gw-hp"]  # rounds alike
    assert export(trained, checkpoint, tmp_path / "out", *others * (checkpoint == "old.pt")) == 0, capsys.readouterr()
    said, errors = capsys.readouterr()
    assert "export:" not in errors, "a bar is for terminals"
    assert "7 weights: the codes are those of the last step, bit for bit" in said
    assert ("2 tensors of the checkpoint belong to other modules" in said) == (checkpoint == "trainer.ckpt")
    live, read = tensors(trained / "live"), tensors(tmp_path / "out")
    assert live.keys() == read.keys()
    assert all(torch.equal(live[name].view(torch.uint8), read[name].view(torch.uint8)) for name in live)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} < names
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"max_new_tokens": 9}'
    assert "notes.txt" not in names
    assert json.loads((tmp_path / "out" / "lowprec_export.json").read_text())["codes_of_the_last_step"] == 7


def test_the_options_of_a_run_choose_the_layers_and_those_of_the_checkpoint_its_weights(trained, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("of another folder")
    options = ["--key=weights", "--strip_prefix=net.", "--keep", "*.up_proj", f"--tokenizer={tmp_path / 'other'}"]
    assert export(trained, "two.ckpt", tmp_path / "out", *options, "--weights_only", "--dtype=fp16", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    live, read = tensors(trained / "live"), tensors(tmp_path / "out")
    kept = "model.layers.0.mlp.up_proj"
    assert live.keys() - read.keys() == {f"{kept}.weight_scale"}
    codes = [name for name, tensor in read.items() if tensor.dtype is torch.float8_e4m3fn]
    assert all(torch.equal(live[name].view(torch.uint8), read[name].view(torch.uint8)) for name in codes)
    assert read[f"{kept}.weight"].dtype is torch.float16
    assert {name for name, why in said["kept"].items() if "up_proj" in why} == {kept}
    assert (said["dtype"], said["weights_only"], said["weights_in_fp8"]) == ("fp16", True, len(codes))
    written = {"tensors_written": len(read), "tensors_left_out": 13, "adapter_layers": 0, "check": None}
    written |= {"out": str(tmp_path / "out"), "bytes": sum(tensor.nbytes for tensor in read.values())}
    assert said == written | json.loads((tmp_path / "out" / "lowprec_export.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "of another folder"


def measured_by_hand(folder, out, tokens, new):
    """SNR of the logits, equal greedy tokens and perplexities of some tokens, by transformers' own `generate`."""
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder / "model")).eval()
    reference.load_state_dict(torch.load(folder / "fabric.ckpt")["model"])
    served = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    with torch.no_grad():
        texts = [model(tokens).logits[0].float() for model in (reference, served)]
        greedy = reference.generate(tokens[:, :32], max_new_tokens=new, min_new_tokens=new, do_sample=False)
        chosen = served(greedy).logits[0].argmax(-1)
    noise, signal = (texts[1] - texts[0]).square().sum(), texts[0].square().sum()
    losses = [torch.nn.functional.cross_entropy(text[:-1], tokens[0, 1:]).item() for text in texts]
    return 10 * torch.log10(signal / noise).item(), (chosen[31:-1] == greedy[0, 32:]).sum().item(), losses


def test_check_prints_three_numbers_and_ends_with_1_beyond_a_bound(trained, tmp_path, capsys):
    assert export(trained, "trainer.ckpt", tmp_path / "out", "--check", "--min_snr=99", format="hf-fp8-block") == 1
    said = capsys.readouterr().out
    assert said.endswith("\ncheck failed: the logits' SNR is below --min_snr 99 dB\n")
    random = torch.randint(0, 96, (1, 128), generator=torch.Generator().manual_seed(0))
    snr_of_all, same, (before, after) = measured_by_hand(trained, tmp_path / "out", random, 256)
    assert f"logits {snr_of_all:.1f} dB from the checkpoint's" in said
    assert f"{same} of 256 greedy tokens are the same" in said
    found = re.search(r"perplexity ([\d.e+]+), the checkpoint's ([\d.e+]+) \(", said).groups()
    assert [float(value) for value in found] == pytest.approx([math.exp(after), math.exp(before)], rel=1e-3)
    words = 3 * torch.arange(1, 600) % 7
    (tmp_path / "text").write_text(" ".join(f"w{word}" for word in words))
    vocabulary = {f"w{word}": 10 + word for word in range(7)} | {"?": 0}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    config = json.loads((trained / "model" / "config.json").read_text())
    bounds = ["--check", f"--min_snr={snr_of_all + 9}", "--min_agreement=1", "--max_perplexity=1e-9", "--json"]
    options, is_worse = (f"--model={tmp_path / 'model'}", f"--check_text={tmp_path / 'text'}", *bounds), []
    for places, read, new in ((200, 200, 168), (1000, 512, 256)):  # as many as the model has places for
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": places}))
        out = tmp_path / str(places)
        assert export(trained, "trainer.ckpt", out, *options, format="hf-fp8-block") == 1
        found = json.loads(capsys.readouterr().out)["check"]
        snr, same, (before, after) = measured_by_hand(trained, out, 10 + words[None, :read], new)
        failed = [re.findall(r"--\w+ \S+", failure) for failure in found["failures"]]
        assert failed == [[f"--min_snr {snr_of_all + 9:g}"], ["--min_agreement 1"], ["--max_perplexity 1e-09"]]
        assert found["greedy_tokens"] == new
        assert found["greedy_agreement"] == pytest.approx(same / new)
        assert found["snr_db"] == pytest.approx(snr)
        assert found["perplexity_change"] == pytest.approx(math.exp(after - before) - 1)
        is_worse.append(after > before)
    assert is_worse == [True, False], "the bound holds for both; if not, take another text"


def test_a_check_that_is_not_possible_is_refused_before_anything_is_written(trained, tmp_path, capsys, monkeypatch):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    for kind in ("Bert", "MPNet"):  # the second kind of config has no causal model
        config = getattr(transformers, f"{kind}Config")(**small)
        getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path / kind)
        options = (f"--model={tmp_path / kind}", "--check")
        assert export(tmp_path, kind, tmp_path / "out", *options, format="hf", precision=None) == 2
        assert f"`--check` takes causal language models, and {kind}" in capsys.readouterr().err
    assert export(trained, "fabric.ckpt", tmp_path / "out", "--check", "--check_text=none.txt") == 2
    assert "`check_text='none.txt'` is no file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert export(trained, "fabric.ckpt", tmp_path / "out", "--check", format="hf-fp8-block") == 2
    assert "`--check` of `--format hf-fp8-block` needs accelerate" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"Bert", "MPNet"}


def test_a_checkpoint_of_another_precision_or_another_model_is_refused(trained, tmp_path, capsys):
    for precision, text in (
        (None, "was trained by torchao, and does not say by which recipe. Name the precision of the run"),
        ("msamp-o3", "`precision='msamp-o3'` is not valid: the checkpoint was trained by torchao"),
        ("bf16-mixed", "`precision='bf16-mixed'` is not valid: the checkpoint was trained by torchao"),
    ):
        assert export(trained, "trainer.ckpt", tmp_path / "out", precision=precision) == 2
        assert text in capsys.readouterr().err
    assert export(trained, "trainer.ckpt", tmp_path / "out", "--keep", "*") == 2
    assert "the plan of 'fp8-rowwise' converts no layer" in capsys.readouterr().err
    assert export(trained, "live", tmp_path / "out") == 2
    assert "the checkpoint holds codes of low precision" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    config = json.loads((trained / "model" / "config.json").read_text())
    for change, text in (
        ({"num_hidden_layers": 2}, "it lacks 9: 'model.layers.1.self_attn.q_proj.weight'"),
        ({"intermediate_size": 512}, "'model.layers.0.mlp.gate_proj.weight' is (256, 128) in the checkpoint and (512,"),
        ({"num_hidden_layers": 0}, "self_attn.v_proj.weight', .... Give the"),
        ({"mlp_bias": True}, "mlp.down_proj.bias'. Give the"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        options = {"format": "hf", "precision": None}
        assert export(trained, "trainer.ckpt", tmp_path / "out", f"--model={tmp_path}", **options) == 2
        said = capsys.readouterr().err
        assert "the checkpoint is of another model than `--model`" in said
        assert text in said
    torch.save({"other": torch.ones(2)}, tmp_path / "other.pt")
    assert export(tmp_path, "other.pt", tmp_path / "out", f"--model={trained / 'model'}", **options) == 2
    assert "it lacks 12: 'model.embed_tokens.weight'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_without_fp8_gets_the_formats_own_scales_and_one_of_te_those_it_had(trained, tmp_path, capsys):
    assert export(trained, "fabric.ckpt", tmp_path / "out", precision="bf16-mixed") == 0
    assert "7 weights: rounded for the first time, by the format's own scales" in capsys.readouterr().out
    name = "model.layers.0.mlp.up_proj.weight"
    weight = torch.load(trained / "fabric.ckpt")["model"][name]
    scale = (448 / weight.abs().amax(1, keepdim=True).double()).float()
    assert torch.equal(tensors(tmp_path / "out")[f"{name}_scale"], scale.reciprocal())
    options = (trained, "plain.safetensors", tmp_path / "blocks")
    assert export(*options, format="hf-fp8-block", precision="fp8-block-te") == 0, capsys.readouterr().err
    assert "7 weights: the codes are those of the last step" in capsys.readouterr().out
    amax = weight.reshape(2, 128, 128).abs().amax((1, 2)).double()
    scale = torch.exp2(torch.floor(torch.log2(448 / amax))).float()  # Float8BlockScaling: powers of two
    stored = tensors(tmp_path / "blocks")
    assert torch.equal(stored[f"{name}_scale_inv"], scale.reciprocal().reshape(2, 1))
    codes = (weight * scale.repeat_interleave(128)[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(stored[name].view(torch.uint8), codes.view(torch.uint8))


def test_an_adapter_in_a_checkpoint_needs_its_config_and_is_merged(trained, tmp_path, capsys):
    import peft

    torch.manual_seed(2)
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), lora)
    torch.save({"state_dict": {f"net.{n}": t for n, t in model.state_dict().items()}}, tmp_path / "lora.ckpt")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 12}')  # of PEFT's first versions
    options = [f"--model={trained / 'model'}", "--dtype=fp32"]
    assert export(tmp_path, "lora.ckpt", tmp_path / "out", *options, format="hf", precision=None) == 2
    assert "Give PEFT's `adapter_config.json`, or its folder, with `--adapter_config`" in capsys.readouterr().err
    for given in ('{"peft_type": "IA3", "lora_alpha": 1}', '{"peft_type": "LORA"}'):
        (tmp_path / "given.json").write_text(given)
        wrong = [*options, f"--adapter_config={tmp_path / 'given.json'}"]
        assert export(tmp_path, "lora.ckpt", tmp_path / "out", *wrong, format="hf", precision=None) == 2
        assert "is no config of a LoRA adapter; expected `peft_type='LORA'`" in capsys.readouterr().err
    options += [f"--adapter_config={tmp_path}", "--merge_adapters", "--check"]
    assert export(tmp_path, "lora.ckpt", tmp_path / "out", *options, format="hf", precision=None) == 0
    merged, values = model.merge_and_unload().state_dict(), tensors(tmp_path / "out")
    for name, value in merged.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_memory_is_that_of_some_rows_and_not_of_a_tensor(tmp_path):
    """The largest tensor has 410 MB; its file has holes in place of zeros."""
    large = {"vocab_size": 100_000, "hidden_size": 1024, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**SIZES | large)
    config.save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        sizes = {name: [*p.shape] for name, p in transformers.LlamaForCausalLM(config).named_parameters()}
    begins = [0, *accumulate(4 * math.prod(size) for size in sizes.values())]
    head = json.dumps({
        name: {"dtype": "F32", "shape": size, "data_offsets": begins[i : i + 2]}
        for i, (name, size) in enumerate(sizes.items())
    }).encode()  # fmt: skip
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(file.tell() + begins[-1])
    arguments = ["export", str(tmp_path / "big.safetensors"), str(tmp_path / "out"), "--format=compressed-tensors"]
    arguments += [f"--model={tmp_path / 'model'}", "--precision=fp8-rowwise"]
    code = f"""
import resource
from lightning_lowprec.tools.cli import main
import transformers.models.llama.modeling_llama
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main({arguments!r}) == 0
print("GREW", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ended = python("-c", code, cwd=tmp_path, environ={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
    assert int(re.search(r"GREW (\d+)", ended.stdout)[1]) * 1024 < 0.25e9
