"""Exported folders: the codes of the run, what transformers loads, and what stays in high precision."""

import gc
import json
import shutil
from types import SimpleNamespace

import lightning as L
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from transformers import LlamaForCausalLM

import lightning_lowprec
from lightning_lowprec.serving import content, safetensors_files
from lightning_lowprec.serving.content import of_layers
from lightning_lowprec.serving.export import Options, served_model, write
from lightning_lowprec.serving.sources import config_of, live_model
from tests.serving.models import FP8_FORMATS, config, converted, decoded, gpt2, gpt_oss, llama, mixtral, served, tensors
from tests.toys import Task, causal_loss

UP = "model.layers.0.mlp.up_proj"
TOKENS = torch.arange(24).reshape(1, -1) % 96
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, about CPUs and what it deprecates


def export(model, out, format, **options):
    return lightning_lowprec.export(model, out, format=format, progress=False, **{"dtype": "fp32", **options})


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def with_one_scale(weight):
    return hp_tensor_to_float8_dynamic(weight.detach(), torch.float8_e4m3fn, LinearMMConfig())


CASTS = {
    "fp8-hybrid": {},
    "fp8-rowwise": {
        "scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1, "round_scales_to_power_of_2": True
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ["fp8-hybrid hf-fp8-block", *(f"{name} compressed-tensors" for name in CASTS)])
def test_codes_are_those_of_torchaos_own_cast(tmp_path, case):
    precision, format = case.split()
    model = converted(llama(), precision).train()
    done = export(model, tmp_path / "out", format)
    weight = model.get_submodule(UP).weight.detach()
    cast = hp_tensor_to_float8_dynamic(weight, torch.float8_e4m3fn, LinearMMConfig(), **CASTS[precision])
    assert same_bits(tensors(tmp_path / "out")[f"{UP}.weight"], cast._data)
    values = decoded(tmp_path / "out", format)[f"{UP}.weight"]
    assert torch.equal(values, cast._data.float() * cast._scale.reciprocal())
    assert (done.same, done.other, done.new) == (7, 0, 0)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_layer_whose_forward_ran_in_bf16_is_exported_in_high_precision(tmp_path, weights_only):
    """The folder's files say so, of a user's own class too."""
    model = type("Mine", (LlamaForCausalLM,), {})(llama().config)
    model.generation_config.max_new_tokens = 7
    plugin = lightning_lowprec.FP8TorchAO({"*.up_proj": {"forward": "bf16"}, "*": "tensorwise"})
    L.Fabric(accelerator="cpu", devices=1, plugins=plugin).setup(model)
    (tmp_path / "tokenizer.json").write_text("of the run")
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: shutil.copy(tmp_path / "tokenizer.json", folder))
    options = {"dtype": "fp16", "weights_only": weights_only, "tokenizer": tmp_path if weights_only else tokenizer}
    done = export(model, tmp_path / "out", "compressed-tensors", **options)
    assert (done.same, done.other, done.new) == (6, 0, 0)
    assert "6 weights in FP8, 2 linear layers kept in high precision" in done.text()
    assert done.kept["lm_head"] == "not converted" != done.kept[UP]
    stored = tensors(tmp_path / "out")
    coded = dict.fromkeys(done.coded, torch.float8_e4m3fn) | {f"{name}_scale": torch.float32 for name in done.coded}
    assert {name: t.dtype for name, t in stored.items() if t.dtype is not torch.float16} == coded
    assert torch.equal(stored[f"{UP}.weight"], model.get_submodule(UP).weight.half())
    said = config(tmp_path / "out")
    assert (said["dtype"], said["architectures"]) == ("float16", ["LlamaForCausalLM"])
    scheme = said["quantization_config"]
    assert sorted(scheme["ignore"]) == ["lm_head", UP]
    assert scheme["format"] == ("naive-quantized" if weights_only else "float-quantized")
    activations = scheme["config_groups"]["group_0"]["input_activations"]
    assert activations is None if weights_only else (activations["strategy"], activations["dynamic"]) == ("token", True)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "of the run"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["max_new_tokens"] == 7


@pytest.mark.parametrize("then", ["32-true", "bf16-mixed", "half-auto", "bf16-master", "bf16-sr"])
def test_the_codes_of_a_fit_outlive_an_evaluation_in_another_precision_and_no_fit(tmp_path, then):
    module = Task(llama(), causal_loss)
    module.validation_step = module.training_step
    data = torch.utils.data.DataLoader(TOKENS[0][None], batch_size=1)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "enable_progress_bar": False}
    L.Trainer(precision="fp8-hybrid-remainder", max_steps=1, **quiet).fit(module, data)
    export(module.net, tmp_path / "fit", "compressed-tensors")
    weight = module.net.get_submodule(UP).weight
    assert not torch.equal(weight, weight.bfloat16()), "float32 again; the run has multiplied by codes of bf16"
    L.Trainer(precision=then, **quiet).validate(module, data, verbose=False)
    assert export(module.net, tmp_path / "evaluated", "compressed-tensors").same == 7
    fit, evaluated = tensors(tmp_path / "fit"), tensors(tmp_path / "evaluated")
    assert all(same_bits(fit[name], evaluated[name]) for name in fit)
    assert same_bits(fit[f"{UP}.weight"], with_one_scale(weight.bfloat16())._data)
    L.Trainer(precision=then, max_steps=1, **quiet).fit(module, data)
    with pytest.raises(ValueError, match="has no layer that runs in FP8"):
        export(module.net, tmp_path / "out", "compressed-tensors")


@pytest.mark.parametrize("format", FP8_FORMATS)
def test_codes_that_are_kept_for_products_are_what_is_exported(tmp_path, format):
    model = converted(llama(), "msamp-o3")
    weights = {name: p.e4m3.float() / p.e4m3_scale for name, p in model.named_parameters() if "_proj" in name}
    export(model, tmp_path / "out", format)
    values = decoded(tmp_path / "out", format)
    assert len(weights) == 7
    assert all(torch.equal(values[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("precision", ["fp8-hybrid", "msamp-o3"])
def test_exports_between_forward_and_backward_leave_the_run_as_it_is(tmp_path, precision):
    for case in ("alone", "with exports"):
        fabric, model = L.Fabric(accelerator="cpu", devices=1, precision=precision), llama()
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(2):
            loss = wrapped(input_ids=TOKENS, labels=TOKENS).loss
            if case != "alone":
                export(model, tmp_path / f"step {step}", "compressed-tensors")
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        export(model, tmp_path / case, "compressed-tensors")
    first, alone, between = (tensors(tmp_path / name) for name in ("step 0", "alone", "with exports"))
    assert all(same_bits(alone[name], between[name]) for name in alone)
    assert not same_bits(first[f"{UP}.weight"], alone[f"{UP}.weight"]), "the weights moved"


def test_scales_of_blocks_follow_the_rule_of_the_run(tmp_path):
    """A run with a scale per row, a power of two; the weight has 2 blocks of 128 x 128."""
    model = converted(llama(), "fp8-rowwise")
    done = export(model, tmp_path / "out", "hf-fp8-block")
    weight = model.get_submodule(UP).weight.detach()
    largest = weight.abs().unflatten(0, (2, 128)).amax((1, 2))
    scale = torch.exp2(torch.floor(torch.log2(448 / largest))).repeat_interleave(128)[:, None]
    codes = (weight * scale).to(torch.float8_e4m3fn)
    assert same_bits(tensors(tmp_path / "out")[f"{UP}.weight"], codes)
    assert torch.equal(decoded(tmp_path / "out", "hf-fp8-block")[f"{UP}.weight"] * scale, codes.float())
    assert (done.same, done.other) == (0, 7)
    assert "7 weights: rounded again, since the format needs other scales than the run had" in done.text()
    of_others = export(converted(llama(intermediate_size=192), "fp8-rowwise"), tmp_path / "others", "hf-fp8-block")
    assert {name for name, why in of_others.kept.items() if why == "features are no multiples of 128"} == {
        f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")
    }  # [192, 128] and [128, 192]; k_proj, [64, 128], is a part of a block
    report = json.loads((tmp_path / "others" / "lowprec_export.json").read_text())
    assert report["kept"] == of_others.kept
    counts = ("weights_in_fp8", "codes_of_the_last_step", "codes_with_other_scales", "codes_rounded_for_the_first_time")
    assert [report[name] for name in counts] == [4, 0, 4, 0]


def test_weights_of_int8_get_the_scales_of_the_format(tmp_path):
    model = llama()
    weight = model.get_submodule(UP).weight.detach().clone()
    done = export(converted(model, "int8-mixed"), tmp_path / "out", "compressed-tensors")
    assert (done.same, done.other, done.new) == (0, 0, len(done.coded))
    stored = tensors(tmp_path / "out")
    scale = stored[f"{UP}.weight_scale"]
    torch.testing.assert_close(scale, weight.abs().amax(1, keepdim=True) / 448)
    spacing = (weight.abs() / 2**3).clamp(min=2**-9 * scale)  # of e4m3 around a value, at most
    assert ((stored[f"{UP}.weight"].float() * scale - weight).abs() <= 0.5001 * spacing).all()


@pytest.mark.parametrize("format", ["hf", *FP8_FORMATS])
def test_transformers_loads_the_stored_values(tmp_path, format):
    model = converted(llama(tie_word_embeddings=True), "fp8-rowwise").eval()
    model.config.quantization_config = {"quant_method": "mxfp4"}  # of the checkpoint that was trained further
    export(model, tmp_path / "out", format, weights_only=format == "compressed-tensors")
    values = decoded(tmp_path / "out", format)
    assert "lm_head.weight" not in values  # tied
    loaded = served(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert ("quantization_config" in config(tmp_path / "out")) == (format != "hf")
    with torch.no_grad():
        loaded(TOKENS)  # compressed-tensors decodes weights at the first forward
    state = loaded.state_dict()
    assert all(torch.equal(state[name].float(), value) for name, value in values.items())


@pytest.mark.parametrize("format", ["hf", "hf-fp8-block", "compressed-tensors"])
def test_experts_are_published_one_by_one_with_the_codes_of_the_stack(tmp_path, format):
    model = converted(mixtral(), "fp8-hybrid").train()
    export(model, tmp_path / "out", format, weights_only=format == "compressed-tensors")
    stack = model.model.layers[0].mlp.experts
    loaded = served(tmp_path / "out").model.layers[0].mlp.experts
    if format == "hf":
        assert torch.equal(loaded.gate_up_proj, stack.gate_up_proj)
        return
    ignored = config(tmp_path / "out")["quantization_config"]
    ignored = ignored.get("ignore") or ignored["modules_to_not_convert"]
    gates = ("model.layers.0.mlp.gate", "model.layers.0.block_sparse_moe.gate")  # for transformers, for vLLM
    assert sorted(ignored) == sorted(["lm_head", *gates])
    cast = with_one_scale(stack.gate_up_proj)
    gate, up = cast._data.chunk(2, dim=1)
    found = tensors(tmp_path / "out")
    for expert in range(3):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}"
        assert same_bits(found[f"{prefix}.w1.weight"], gate[expert].contiguous())
        assert same_bits(found[f"{prefix}.w3.weight"], up[expert].contiguous())
    assert torch.equal(loaded.gate_up_proj, cast._data.float() * cast._scale.reciprocal())


def test_a_weight_of_two_layers_stays_in_high_precision_and_both_layers_are_said(tmp_path):
    model, names = llama(), [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")]
    model.get_submodule(names[0]).weight = model.get_submodule(names[1]).weight
    done = export(converted(model, "fp8-hybrid"), tmp_path / "out", "compressed-tensors")
    assert done.same == 5
    assert sorted(config(tmp_path / "out")["quantization_config"]["ignore"]) == ["lm_head", *names]
    assert {done.kept[name] for name in names} == {"another layer has the same weight"}


def test_experts_that_a_model_publishes_as_one_tensor_stay_in_high_precision(tmp_path):
    model = converted(gpt_oss(), "fp8-hybrid").train()
    done = export(model, tmp_path / "out", "compressed-tensors")
    stacked = {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    assert {name for name, why in done.kept.items() if "publishes the experts as one tensor" in why} == stacked
    stored, own = tensors(tmp_path / "out"), dict(model.named_parameters())
    assert all(torch.equal(stored[name], own[name]) for name in stacked)
    assert done.same == 4, "the products of attention"


def test_a_lora_adapter_is_kept_beside_codes_of_the_last_step(tmp_path):
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = converted(peft.get_peft_model(llama(), lora), "fp8-rowwise")
    done = export(model, tmp_path / "out", "compressed-tensors", weights_only=True)
    assert (done.same, done.adapter_layers, done.kept.keys()) == (7, 2, {"lm_head"})
    assert done.text().endswith(f"the LoRA adapter of 2 layers is in {tmp_path / 'out' / 'adapter'}, not merged")
    loaded = served(tmp_path / "out")
    with torch.no_grad():
        loaded(TOKENS)
    plain = peft.PeftModel.from_pretrained(loaded, tmp_path / "out" / "adapter")
    own = model.base_model.model.model.layers[0].mlp.up_proj
    other = plain.base_model.model.model.layers[0].mlp.up_proj
    assert torch.equal(own.lora_A["default"].weight, other.lora_A["default"].weight)
    assert own.scaling == other.scaling == {"default": 3.0}
    export(model, tmp_path / "half", "hf", dtype="bf16")
    adapter = tmp_path / "half" / "adapter"
    assert {t.dtype for t in load_file(adapter / "adapter_model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((adapter / "adapter_config.json").read_text())["inference_mode"]


@pytest.mark.parametrize("format", FP8_FORMATS)
@pytest.mark.parametrize("precision", ["fp8-rowwise", "fp8-hybrid"])
def test_several_files_written_in_parts_hold_what_one_holds(tmp_path, monkeypatch, precision, format):
    """As ``fp8_state`` does, under autocast too, also of weights with an adapter."""
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = converted(peft.get_peft_model(llama(), lora), precision)
    whole = export(model, tmp_path / "one", format, merge_adapters=True)
    monkeypatch.setattr(content, "_ELEMENTS", 156 * 128)  # 128 rows at a time, of 256: parts begin with a block
    options = Options(format=format, dtype="fp32", shard_bytes=100_000, merge_adapters=True, progress=False)
    inner = served_model(model)
    parts = write(live_model(inner), inner, of_layers(inner), tmp_path / "more", options, config_of(inner))
    files = sorted((tmp_path / "more").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 130_000 for file in files)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = dict(lightning_lowprec.fp8_state(model, format=format, dtype="fp32", merge_adapters=True))
    one = tensors(tmp_path / "one")
    for more in (tensors(tmp_path / "more"), state):
        assert one.keys() == more.keys()
        assert [name for name in one if not same_bits(one[name], more[name])] == []
    assert not (tmp_path / "one" / "adapter").exists()
    assert (whole.new, whole.same) == (2, parts.same)
    served(tmp_path / "more")


def test_fp8_state_reads_a_module_that_fabric_has_wrapped_and_keeps_no_tensor():
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="fp8-rowwise")
    model = nn.Sequential(nn.Linear(32, 208), nn.BatchNorm1d(208), nn.Linear(208, 32))
    model.register_buffer("empty", torch.ones(0, 0))
    model = fabric.setup_module(model)
    for dtype, of_others in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = {}
        for name, tensor in lightning_lowprec.fp8_state(model, dtype=dtype):
            found[name] = tensor.dtype
            codes = [t.shape for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype is torch.float8_e4m3fn]
            assert name != "2.weight" or (208, 32) not in codes, "those of 0.weight"
        others = ("0.bias", "2.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "empty")
        expected = dict.fromkeys(others, of_others) | {"1.num_batches_tracked": torch.int64}
        for name in ("0.weight", "2.weight"):
            expected |= {name: torch.float8_e4m3fn, f"{name}_scale": torch.float32}
        assert found == expected


def test_a_weight_without_a_value_no_space_and_ctrl_c_leave_nothing(tmp_path, monkeypatch):
    model = converted(llama(), "fp8-rowwise")
    for value in ("nan", "inf"):
        with torch.no_grad():
            model.get_submodule(UP).weight[3, 5] = float(value)
        with pytest.raises(ValueError, match=rf"'{UP}.weight' cannot be rounded to FP8: it holds NaN or inf"):
            export(model, tmp_path / "out", "compressed-tensors")
        assert len(dict(lightning_lowprec.fp8_state(model))) == 19, "without a wait for the device"
    with pytest.raises(OSError, match=r"needs 1e\+06 TB, and its disk has"):
        safetensors_files.new_folder(tmp_path / "out", 10**18).__enter__()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    folder = safetensors_files.new_folder(tmp_path / "out", 1)
    (folder.__enter__() / "half").write_text("written")
    assert not folder.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None), "the interrupt goes on"
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_write_one_folder_the_first_wins_and_the_other_raises(tmp_path):
    out = tmp_path / "out"
    slow, fast = safetensors_files.new_folder(out, 1), safetensors_files.new_folder(out, 1)
    for folder, text in ((slow.__enter__(), "slow"), (fast.__enter__(), "fast")):
        (folder / "of").write_text(text)
    fast.__exit__(None, None, None)
    with pytest.raises(ValueError, match="exists; expected a new folder"):
        slow.__exit__(None, None, None)
    assert (out / "of").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "usual").mkdir()
    assert out.stat().st_mode == (tmp_path / "usual").stat().st_mode, "a server of another user reads it"


def test_what_cannot_be_served_is_refused_and_conv1d_is_exported_in_high_precision(tmp_path):
    plain, conv1d = llama(), converted(gpt2(), "fp8-rowwise")
    lora = peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    of_experts = peft.get_peft_model(mixtral(), lora)

    def adapted(**more):
        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], **more))

    several = adapted()
    several.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    for model, format, options, message in (
        (plain, "gguf", {}, "`format='gguf'` is not valid; expected one of: hf, hf-fp8-block"),
        (plain, "compressed-tensors", {}, "no layer that runs in FP8"),
        (torch.nn.Linear(16, 16), "hf", {}, "holds 0 models of transformers"),
        (nn.ModuleList([plain, llama()]), "hf", {}, "holds 2 models of transformers; .* Pass the model itself"),
        (adapted(use_dora=True), "hf", {}, "lora_magnitude_vector.*; expected one plain LoRA adapter"),
        (adapted(modules_to_save=["lm_head"]), "hf", {}, "modules_to_save.*; expected one plain LoRA adapter"),
        (adapted(alpha_pattern={"q_proj": 2}), "hf", {}, "`alpha_pattern={'q_proj': 2}`.* Merge the adapter by PEFT"),
        (adapted(rank_pattern={"q_proj": 2}), "hf", {}, "`rank_pattern={'q_proj': 2}`, which is not supported here"),
        (adapted(trainable_token_indices=[1]), "hf", {}, r"`trainable_token_indices=\[1\]`, which is not supported"),
        (several, "hf", {}, "the adapters default, second; expected one plain LoRA adapter"),
        (plain, "hf", {"merge_adapters": True}, "`merge_adapters=True` is not valid: the model has no LoRA adapter"),
        (conv1d, "compressed-tensors", {}, "Conv1D.*Use `format='hf'`"),
        (of_experts, "hf", {"merge_adapters": True}, "'model.layers.0.mlp.experts' belongs to a Parameter of its own"),
        (
            converted(llama(), "fp8-rowwise"), "hf-fp8-block", {"weights_only": True},
            "`weights_only=True` is not valid with `format='hf-fp8-block'`",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            export(model, tmp_path / "out", format, **options)
    assert list(tmp_path.iterdir()) == []
    plain.model.norm.inside = nn.Sequential(llama().model)  # as a vision model has a language model with a model inside
    assert export(plain.model, tmp_path / "nested", "hf").tensors == 11 + 11
    export(conv1d, tmp_path / "out", "hf")
    loaded = served(tmp_path / "out")
    assert torch.equal(loaded.transformer.h[0].attn.c_attn.weight, conv1d.transformer.h[0].attn.c_attn.weight)
    with pytest.raises(ValueError, match="exists; expected a new folder"):
        export(conv1d, tmp_path / "out", "hf")


@pytest.mark.parametrize("shard_bytes", [3 + 8 * 4, 16])
def test_a_tensor_without_values_is_a_part_of_its_file(tmp_path, shard_bytes):
    """Also as the last one, and alone in a file: behind a tensor that is larger than a file may be."""
    values = {"a": torch.arange(3, dtype=torch.int8), "b": torch.arange(8.0), "c": torch.empty(0, 3)}
    stored = [safetensors_files.Stored(name, tuple(t.shape), t.dtype) for name, t in values.items()]
    progress = []
    with safetensors_files.ShardFiles(tmp_path, stored, shard_bytes, progress.append) as files:
        for name, tensor in values.items():
            files.write(name, tensor)
        files.finish()
    assert sum(progress) == 3 + 8 * 4
    found, file_of = {}, {}
    for path in tmp_path.glob("*.safetensors"):
        found |= load_file(path)
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        head = json.loads(content[8:begin])
        del head["__metadata__"]
        file_of |= dict.fromkeys(head, path.name)
        starts = {name: begin + said["data_offsets"][0] for name, said in head.items()}
        assert not any(start % values[name].element_size() for name, start in starts.items()), "all are aligned"
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in values.items())
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text()) if index.exists() else None
    assert said == ({"metadata": {"total_size": 3 + 8 * 4}, "weight_map": file_of} if shard_bytes == 16 else None)
    assert len(set(file_of.values())) == (3 if shard_bytes == 16 else 1)


@pytest.mark.parametrize("of_rows", [False, True], ids=["Linear", "Conv1D"])
def test_an_adapter_in_bf16_is_merged_in_float32_and_rounded_once(tmp_path, monkeypatch, of_rows):
    monkeypatch.setattr(content, "_ELEMENTS", 1)  # 128 rows at a time, of 256
    name = "c_proj" if of_rows else "up_proj"  # Conv1D's weight is [in, out]
    options = {"target_modules": [f"mlp.{name}"], "use_rslora": of_rows, "fan_in_fan_out": of_rows}
    lora = peft.LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, **options)
    model = peft.get_peft_model(gpt2() if of_rows else llama(), lora).bfloat16()
    export(model, tmp_path / "out", "hf", merge_adapters=True)
    (layer,) = (module for fqn, module in model.named_modules() if fqn.endswith(f"mlp.{name}"))
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    part = 12 / 4**0.5 * (b @ a).t() if of_rows else 12 / 4 * (b @ a)
    merged = (layer.base_layer.weight.float() + part).bfloat16()
    (found,) = (t for fqn, t in tensors(tmp_path / "out").items() if fqn.endswith(f"mlp.{name}.weight"))
    assert torch.equal(found, merged.float())
