"""Recipes per layer: `FP8TorchAO(recipe={pattern: recipe})`."""

import copy
import logging
from functools import partial

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO, Int8TorchAO, plain
from lightning_lowprec.tools.cli import main
from tests.toys import Block, Operations, Stack, convert

MIXED = {"blocks.[0-1].*": "bf16", "*.down": "rowwise", "blocks.2.up": {"forward": "bf16"}, "*": "tensorwise"}


class Net(Stack):
    def __init__(self, depth=4):
        super().__init__(partial(Block, norm=False, activation=torch.relu), depth, head=("lm_head", 32, 16), seed=0)


def set_up(model=None, **options):
    plugin, model = FP8TorchAO(**options), Net() if model is None else model
    L.Fabric(accelerator="cpu", plugins=plugin).setup(model)
    return plugin, model


def test_the_first_pattern_that_matches_wins_after_the_other_rules(caplog):
    caplog.set_level(logging.INFO)
    plugin, model = set_up(recipe=MIXED, keep=["blocks.3.down"])
    assert {row.fqn: row.recipe or row.kept_because for row in plugin.plan.rows} == {
        "blocks.0.up": "'bf16' in `recipe` ('blocks.[0-1].*')",
        "blocks.0.down": "'bf16' in `recipe` ('blocks.[0-1].*')",
        "blocks.1.up": "'bf16' in `recipe` ('blocks.[0-1].*')",
        "blocks.1.down": "'bf16' in `recipe` ('blocks.[0-1].*')",
        "blocks.2.up": "tensorwise, forward in bf16",
        "blocks.2.down": "rowwise",
        "blocks.3.up": "tensorwise",
        "blocks.3.down": "kept by 'blocks.3.down'",
        "lm_head": "output head (by name)",
    }
    coded = [name for name, layer in model.named_modules() if type(layer).__name__ == "FP8Linear"]
    assert coded == list(plugin.plan.converted)
    assert plugin.precision == "fp8-torchao-per-layer"
    assert Int8TorchAO({"*": {"forward": "bf16"}}, base="fp16").precision == "int8-mixed-per-layer-fp16"
    recipes = "(1 tensorwise, forward in bf16; 1 rowwise; 1 tensorwise)"
    assert f"fp8-torchao-per-layer: converted 3 of 9 linear layers {recipes}" in caplog.text
    assert plugin.state_dict() == {"backend": "torchao"}


def test_layers_that_no_pattern_matches_are_kept_unless_all_patterns_say_fp32():
    plans = [set_up(recipe={"lm_head": "fp32", **rest})[0].plan for rest in ({}, {"*": "tensorwise"})]
    assert plans[0] == plans[1]
    assert plans[0].converted
    plugin, _ = set_up(recipe={"*.up": {"forward": "bf16", "grad_input": "fp8"}})
    kept = {row.fqn: row.kept_because for row in plugin.plan.rows if row.kept_because}
    assert kept.pop("lm_head") == "output head (by name)"
    assert kept == {f"blocks.{i}.down": "no pattern of `recipe` matches" for i in range(4)}
    assert {str(recipe) for recipe in plugin.plan.recipes.values()} == {"tensorwise, forward in bf16"}


def test_fp32_runs_a_layer_in_float32_whatever_other_rules_say():
    recipe = {"lm_head": "fp32", "blocks.0.up": "fp32", "*": "tensorwise"}
    for masters, weights in ((False, "float32"), ("remainder", "float32"), (False, "keep")):
        model = Net().bfloat16() if weights == "keep" else None
        plugin, model = set_up(model, recipe=recipe, master_weights=masters, weights=weights)
        rows = {row.fqn: row for row in plugin.plan.rows}
        assert rows["lm_head"].kept == "kept: 'fp32' in `recipe` ('lm_head'), fp32"
        assert {rows[fqn].runs_in for fqn in ("lm_head", "blocks.0.up")} == {"fp32"}
        assert model.lm_head.weight.dtype == model.blocks[0].up.bias.dtype == torch.float32
        x = torch.randn(4, 32).bfloat16()
        with plugin.forward_context():
            out = copy.deepcopy(model).lm_head(input=x) if masters else copy.deepcopy(model).lm_head(x)
        assert torch.equal(out, nn.functional.linear(x.float(), model.lm_head.weight, model.lm_head.bias))
        assert plain(model) is model
        assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": {"*.gone": "rowwise", "*": "block"}}, r"`recipe\['\*.gone'\]` matches no .*'blocks.0.down'"),
        (
            {"recipe": {"*.up": "block", "*.down": "rowwise", "*.?.up": "block"}, "keep": ["blocks.0.up"]},
            r"\.up'\]` matches only layers that earlier patterns take \('blocks\.1\.up'\)",
        ),
        ({"recipe": {"*": "rowwise", "*.up": "bf16"}}, r"\['\*\.up'\]` matches only layers that earlier patterns take"),
        ({"recipe": {"lm_head": "block", "*": "rowwise"}}, r"keep \('lm_head': output head \(by name\)\).*`only="),
        ({"recipe": {"up": "rowwise"}}, r"`recipe\['up'\]` matches no linear layer.*A pattern matches a whole fqn"),
        ({"recipe": {}}, r"`recipe=\{\}` is not valid; expected patterns of fqns with a recipe each"),
        ({"recipe": {"*": "bf16"}}, "computes nothing in FP8"),
        ({"recipe": {"*": "tensorwize"}}, r"`recipe\['\*'\]='tensorwize'` is not valid; expected one of: 'tensorwise'"),
        ({"recipe": {"*": {"fwd": "bf16"}}}, "mapping of forward, grad_input, grad_weight to 'bf16' or 'fp8'"),
        ({"recipe": {"*": {"forward": "fp4"}}}, r"`recipe\['\*'\]=\{'forward': 'fp4'\}` is not valid"),
        ({"recipe": {"*": {"recipe": "block"}}}, r"`recipe\['\*'\]=\{\}` is not valid; expected a mapping of forward"),
        ({"recipe": {"": "rowwise"}}, r"`recipe=\{'': 'rowwise'\}` is not valid"),
        ({"recipe": {3: "rowwise"}}, r"`recipe=\{3: 'rowwise'\}` is not valid"),
        ({"recipe": "rowwise", "base": "fp16"}, r"`base='fp16'` is not valid with `recipe='rowwise'`.*through bf16"),
        ({"recipe": MIXED, "base": "fp16"}, "`base='fp16'` is not valid with `recipe='rowwise'`"),
        ({"recipe": {"*": "rowwise"}, "weight_codes": "per_forward"}, "codes='per_forward'`.* it is for 'tensorwise'"),
        ({"recipe": {"*": "rowwise"}, "fp8_format": "hybrid"}, "`fp8_format='hybrid'` is not valid with"),
        ({"recipe": "mxfp8", "base": "fp16"}, "`base='fp16'` is not valid with `recipe='mxfp8'`: its kernels take"),
        ({"recipe": {"a": "tensorwise", "*": "block"}, "base": "fp16"}, "with `recipe='block'`: its kernels return"),
        ({"recipe": "block", "fast_accum": "all"}, "`fast_accum='all'` is not valid with `recipe='block'`"),
        ({"recipe": "mxfp8", "experts": "fp8"}, "`experts='fp8'` is not valid with `recipe='mxfp8'`"),
        ({"recipe": "block", "experts": "bf16"}, "`experts='bf16'` is not valid with `recipe='block'`"),
        ({"recipe": {"*": {"recipe": "blok", "forward": "bf16"}}}, r"`recipe\['\*'\]\['recipe'\]='blok'` is not valid"),
    ],
)
def test_bad_maps_patterns_that_decide_nothing_and_options_that_no_format_reads(options, message):
    with pytest.raises(ValueError, match=message):
        set_up(**options)


CLASS = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False), nn.Linear(64, 16, bias=False))
"""


def test_the_plan_command_shows_the_recipe_of_each_row(tmp_path, capsys):
    (tmp_path / "net.py").write_text(CLASS)
    source = f"{tmp_path / 'net.py'}:Net"
    patterns = ["--recipe", '0={"forward": "bf16"}', "1=rowwise", "*=tensorwise"]
    assert main(["plan", source, "--precision=fp8-hybrid", *patterns]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()}
    for row, recipe in enumerate(("tensorwise, forward in bf16", "rowwise", "tensorwise")):
        assert f"FP8 ({recipe})" in lines[f"{row}"]
    for wrong, message in (
        (["0"], "expected PATTERN=RECIPE"),
        (["0={forward}"], "is no JSON"),
        (["7=rowwise", "*=rowwise"], "`recipe['7']` matches no linear layer"),
    ):
        assert main(["plan", source, "--precision=fp8-hybrid", "--recipe", *wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["plan", source, "--precision=msamp-o2", "--recipe", "*=rowwise"]) == 2
    assert "has no recipes per layer" in capsys.readouterr().err


FAST = {"forward": [True, False, False], "all": [True] * 3, "none": [False] * 3}
"""By choice, the flags of forward, grad_input and grad_weight, or of grad_weight and grad_input: they are alike."""


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", {"*": {"grad_weight": "bf16"}}], ids=str)
@pytest.mark.parametrize("choice", FAST)
def test_the_choice_of_accumulation_reaches_every_kernel(choice, recipe):
    """On a GPU's kernels: ``tests/ledger/test_products.py``. A product in bf16 has no flag."""
    if recipe == "rowwise" and torch.__version__ < "2.13":
        pytest.skip("this torch has no rowwise FP8 kernel for CPU (2.13 has)")
    layer = nn.Linear(32, 64)
    plugin = FP8TorchAO(recipe, fast_accum=choice, emulate=False, compile=False)
    convert(plugin, layer)
    torchaos = layer.settings.mm_config
    assert [getattr(torchaos, gemm).use_fast_accum for gemm in ("output", "grad_input", "grad_weight")] == FAST[choice]
    expected = FAST[choice] if isinstance(recipe, str) else FAST[choice][:2]
    with torch.autocast("cpu", torch.bfloat16), Operations() as operations:
        layer(torch.rand(16, 32, requires_grad=True)).float().sum().backward()
    products = [args for func, args, _ in operations.seen if func is torch.ops.aten._scaled_mm.default]
    assert [args[7] if len(args) > 7 else False for args in products] == expected


@pytest.mark.parametrize(("word", "choice"), [("promoted", "none"), ("fast", "all"), ("slow", None)])
def test_a_word_for_the_accumulation_of_one_product_says_the_option(word, choice):
    with pytest.raises(ValueError, match=r"recipe\['\*'\]=.* is not valid.* to 'bf16' or 'fp8', e\.g\.") as raised:
        set_up(recipe={"*": {"forward": word, "grad_input": word}})
    assert str(raised.value).count("Write `FP8TorchAO(fast_accum=") == (choice is not None)
    assert choice is None or f"Write `FP8TorchAO(fast_accum={choice!r})`" in str(raised.value)


FORMATS = ["tensorwise", "rowwise", "block"] + ([] if FP8TorchAO("mxfp8").refusal(torch.device("cpu")) else ["mxfp8"])


def layers(*names):
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(128, 64) for name in names})


def results(layer):
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = layer(x)
    return output, *torch.autograd.grad(output.square().sum(), (x, layer.weight))


def test_each_layer_has_the_bits_of_its_own_format():
    mixed, recipe = layers(*FORMATS), {"slim*": FORMATS[-1], **{name: name for name in reversed(FORMATS)}}
    mixed["fits"], mixed["slim"], mixed["slim2"] = nn.Linear(48, 48), nn.Linear(48, 64), nn.Linear(64, 48)
    plugin, _ = set_up(mixed, recipe={**recipe, "fits": "tensorwise"})
    kept = {row.fqn: row.kept_because for row in plugin.plan.rows if row.kept_because}
    assert kept == (dict.fromkeys(("slim", "slim2"), "features are no multiples of 32") if "mxfp8" in FORMATS else {})
    assert plugin.plan.converted[: len(FORMATS)] == tuple(FORMATS)
    assert (plugin.weight_codes, plugin.plan.format) == ("per_forward", "FP8"), "whichever comes first"
    for name in FORMATS:
        _, alone = set_up(layers(*FORMATS), recipe=name)
        found, expected = results(mixed[name]), results(alone[name])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), name


@pytest.mark.skipif("mxfp8" not in FORMATS, reason="torchao has no MXFP8")
def test_a_layer_whose_device_cannot_run_its_format_is_named():
    model = nn.ModuleDict({**layers("up", "down"), "slim": nn.Linear(48, 48)})
    set_up(model, recipe={"slim": "mxfp8", "*": "tensorwise"}, emulate="hopper")  # no layer has it: 'slim' does not fit
    with pytest.raises(RuntimeError, match=r"`recipe='mxfp8'` of layer 'down' cannot run: .*'hopper'` is not valid"):
        set_up(model, recipe={"up": "tensorwise", "*": "mxfp8"}, emulate="hopper")


def test_gathered_codes_have_one_kind_of_scale_and_serve_evaluation_too():
    plugin = FP8TorchAO({"a": "block", "*": "tensorwise"})
    assert plugin.gathers(None) == "'block' and 'tensorwise' in `recipe` have different scales"
    assert FP8TorchAO(fp8_eval=False).gathers(None).startswith("`fp8_eval=False` evaluates with the weights in high")
    assert FP8TorchAO({"a": "rowwise", "*": "block"}, weight_codes="per_gemm").gathers(None) is None


@pytest.mark.parametrize("recipe", [{"lm_head": "fp32", "*": "tensorwise"}, {"*.up": "tensorwise", "*": "rowwise"}])
def test_keep_fp32_counts_beside_the_fp32_layers_of_a_map(recipe):
    _, model = set_up(recipe=recipe, master_weights="remainder", keep_fp32=["blocks.0.up", "blocks.1.up.bias"])
    wide = {fqn for fqn, p in model.named_parameters() if p.dtype == torch.float32}
    head = {"lm_head.weight", "lm_head.bias"} if "lm_head" in recipe else set()
    assert wide == {"blocks.0.up.weight", "blocks.0.up.bias", "blocks.1.up.bias"} | head
