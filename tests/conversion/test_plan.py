"""The plan: what converts, what is kept and why."""

import re
from collections import Counter

import pytest
import torch
import transformers
from torch import nn
from torchmetrics import Metric
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.mamba.modeling_mamba import MambaConfig, MambaMixer
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D as HfConv1D

from lightning_lowprec import plan
from tests.toys import gelu_block


class Decoder(nn.Module):
    def __init__(self, tie=False):
        super().__init__()
        self.embed = type("Scaled", (nn.Embedding,), {})(64, 32)  # as Gemma has, which scales
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn": nn.MultiheadAttention(32, 2), "up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
            for _ in range(2)
        )
        self.lm_head = nn.Linear(32, 64, bias=False)
        if tie:
            self.lm_head.weight = self.embed.weight


def reasons(model, **options):
    return {row.fqn: row.kept_because for row in plan(model, **options).rows}


def test_stacked_experts_routers_gates_beside_experts_and_adapters():
    experts = nn.Module()
    experts.w1 = nn.Parameter(torch.empty(4, 64, 32))
    experts.register_parameter("bias", None)
    model = nn.ModuleDict({"experts": experts, "up": nn.Linear(32, 64), "audio": nn.Conv1d(32, 64, 3)})
    stacked, up = plan(model).rows
    assert stacked.kept_because.startswith("stacked experts of an unknown class (Module); autocast leaves grouped prod")
    assert (stacked.fqn, stacked.per_token) == ("experts.w1", 4), "without a `top_k`, a token may use all"
    assert (up.fqn, up.kept_because, up.per_token) == ("up", None, 1)
    model = nn.Module()
    model.moe = nn.ModuleDict({"gate": nn.Linear(16, 16), "experts": nn.ModuleList([nn.Linear(16, 16)])})
    model.moe["shared_gate"], model.my_router = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16))
    model.choice = type("TopKRouter", (nn.Module,), {})()
    model.choice.weight = nn.Parameter(torch.zeros(4, 16))
    model.router = nn.Sequential(nn.Linear(16, 16))
    model.mlp = nn.ModuleDict({"gate": nn.Linear(16, 16), "gate_proj": nn.Linear(16, 16)})
    model.lora_A = nn.ModuleDict({"default": nn.Linear(16, 16)})
    assert reasons(model) == {
        "moe.gate": "gate beside experts", "moe.experts.0": None, "moe.shared_gate": "gate beside experts",
        "my_router.0": "router (by name)", "router.0": "router (by name)",
        "mlp.gate": None, "mlp.gate_proj": None, "lora_A.default": "LoRA adapter",
        "choice": "no Linear (router)",
    }  # fmt: skip
    rows = {row.fqn: (row.runs_in, row.shape) for row in plan(model).rows}
    assert [fqn for fqn, (dtype, _) in rows.items() if dtype] == ["lora_A.default"], "routers may run in float32"
    assert rows["choice"] == (None, "16 -> 4")
    chosen = reasons(model, only=["router", "mlp"])  # no built-in rule applies
    assert (chosen["router.0"], chosen["moe.experts.0"]) == (None, "not in `only`")


def test_a_tie_wins_over_a_name_and_a_declared_head_over_both():
    class Declared(Decoder):
        def get_output_embeddings(self):
            return self.blocks[0]["up"]

    kept = reasons(nn.ModuleDict({"net": Declared(tie=True)}))
    assert kept["net.blocks.0.up"] == "output head (get_output_embeddings())"
    assert kept["net.lm_head"] is None
    tied = Decoder(tie=True)
    assert reasons(tied)["lm_head"] == "output head (tied to the embedding 'embed')"
    tied.head = nn.Linear(32, 32)
    assert reasons(tied)["head"] is None


@pytest.mark.parametrize("name", ["lm_head", "output", "head", "embed_out"])
def test_heads_by_name_at_any_depth(name):
    model = nn.ModuleDict({"body": nn.Linear(16, 16), "wrap": nn.ModuleDict({name: nn.Linear(16, 16)})})
    assert reasons(model) == {"body": None, f"wrap.{name}": "output head (by name)"}


class Distance(Metric):
    update = compute = nn.Module.forward

    def __init__(self, shared):
        super().__init__()
        self.encoder, self.shared = nn.Sequential(nn.Linear(16, 16), nn.Conv1d(2, 2, 2)), shared


def test_networks_of_metrics_are_kept_unless_the_model_has_them_too():
    model = nn.ModuleDict({"net": nn.Linear(16, 16)})
    model["distance"] = Distance(model["net"])
    rows = plan(model, only=["*"]).all_rows
    inside = "kept: inside of a torchmetrics.Metric"
    assert {row.fqn: row.kept_because and row.kept for row in rows} == {
        "net": None,
        "distance.encoder.0": inside,
        "distance.encoder.1.weight": inside,
    }


class Plain(nn.Linear):
    def __init__(self, features):
        super().__init__(features, features)


class Doubled(Plain):
    def forward(self, x):
        return 2 * super().forward(x)


class Counted(Plain):
    def __call__(self, x):
        return super().__call__(x)


class Halved(Plain):
    def __init__(self, features):
        super().__init__(features)
        self.stored = self._parameters.pop("weight")

    @property
    def weight(self):
        return self.stored / 2


class Marked(torch.Tensor):
    pass


class Conv1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32))


def changed(layer, **attributes):
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def without_weight(layer):
    del layer.weight  # a hypernetwork gives one to each forward
    return layer


def test_other_reasons():
    model = nn.ModuleDict(
        {
            "fp16": nn.Linear(16, 16).half(),
            "own": Plain(16),
            "falcon": FalconLinear(16, 32),
            "replaced": changed(nn.Linear(16, 16), forward=lambda x: x),
            "float64": nn.Linear(16, 16).double(),
            "complex64": nn.Linear(16, 16, dtype=torch.complex64),
            "lazy": nn.LazyLinear(16),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            "pruned": nn.utils.prune.identity(nn.Linear(16, 16), "weight"),
            "generated": without_weight(nn.Linear(16, 16)),
            "doubled": Doubled(16),
            "counted": Counted(16),
            "halved": Halved(16),
            "marked": changed(Plain(16), weight=nn.Parameter(torch.randn(16, 16).as_subclass(Marked))),
            "attention": nn.MultiheadAttention(16, 2),
            "convolution": nn.Conv1d(2, 2, 2).double(),
        }
    )
    assert {row.fqn: row.kept_because and row.kept.removeprefix("kept: ") for row in plan(model).all_rows} == {
        "fp16": None,
        "own": None,
        "pruned": None,
        "falcon": None,
        "replaced": "its forward is replaced on the instance",
        "float64": "weights of torch.float64",
        "complex64": "weights of torch.complex64",
        "lazy": "a subclass of Linear (LazyLinear) whose weight is a UninitializedParameter, bf16",
        "normed": "a subclass of Linear (ParametrizedLinear), bf16",
        "generated": "it has no weight before its forward, bf16",
        "doubled": "a subclass of Linear (Doubled)",
        "counted": "a subclass of Linear (Counted), bf16",
        "halved": "a subclass of Linear (Halved), bf16",
        "marked": "a subclass of Linear (Plain) whose weight is a Marked, bf16",
        "attention.out_proj": "out_proj of a MultiheadAttention, which never calls it, bf16",
        "attention.in_proj_weight": "no Linear (in_proj of a MultiheadAttention), bf16",
        "convolution.weight": "no Linear (Conv1d)",
    }
    model["normed"].bias.requires_grad_(False)
    assert all(row.trains for row in plan(model).all_rows)


def test_a_conv1d_of_transformers_converts():
    names = ["c_attn", "c_fc", "narrow", "copied", "own", "lm_head", "replaced"]
    sizes = {"c_attn": (48, 16), "narrow": (24, 16)}  # out, in
    made = {name: HfConv1D(*sizes.get(name, (32, 16))) for name in names}
    model = nn.ModuleDict({**made, "copied": Conv1D(), "own": type("OwnConv1D", (HfConv1D,), {})(32, 16)})
    model.replaced.forward = lambda x: x
    rows = {row.fqn: (row.kind, row.in_features, row.out_features, row.parts) for row in plan(model).rows}
    assert rows["c_attn"] == ("Conv1D", 16, 48, 16)
    assert rows["c_fc"] == rows["copied"] == ("Conv1D", 16, 32, 16)
    assert reasons(model, keep=["c_fc"]) == {
        "c_attn": None,
        "c_fc": "kept by 'c_fc'",
        "narrow": "features are no multiples of 16",
        "copied": "no Linear (Conv1D)",
        "own": "a subclass of Conv1D (OwnConv1D)",
        "lm_head": "output head (by name)",
        "replaced": "its forward is replaced on the instance",
    }
    assert [fqn for fqn, reason in reasons(model, only=["c_*"]).items() if reason is None] == ["c_attn", "c_fc"]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        config = transformers.MixtralConfig(hidden_size=32, intermediate_size=48, num_local_experts=2)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 64), "down": HfConv1D(32, 64), "moe": MixtralExperts(config)})
            for _ in range(3)
        )


def test_every_option_chooses_from_linears_conv1ds_and_stacked_experts():
    model, names = Mixed(), ("up", "down", "moe.gate_up_proj", "moe.down_proj")

    def converted(**options):
        found = plan(model, **options)
        assert [row.fqn for row in found.rows] == [f"blocks.{n}.{name}" for n in range(3) for name in names]
        assert found.linears + found.stacked == tuple(sorted(found.converted, key=lambda fqn: "moe" in fqn))
        return found

    def fqns(chosen, blocks=range(3)):
        return tuple(f"blocks.{n}.{name}" for n in blocks for name in chosen)

    assert converted().converted == fqns(names)
    assert converted(first_last_layers_bf16=True).converted == fqns(names, [1])
    assert converted(keep=["down", "*.gate_up_proj"]).converted == fqns(["up", "moe.down_proj"])
    assert converted(only=["down", "*.gate_up_proj"]).converted == fqns(["down", "moe.gate_up_proj"])
    model.blocks[1].up.weight.requires_grad_(False)  # its bias trains
    model.blocks[1].moe.down_proj.requires_grad_(False)
    frozen = ("blocks.1.up", "blocks.1.moe.down_proj")
    assert tuple(row.fqn for row in converted().rows if not row.trains) == frozen
    assert converted(frozen="keep").converted == tuple(fqn for fqn in fqns(names) if fqn not in frozen)
    given = {"blocks.0.*": "bf16", "*.down": {"forward": "bf16"}, "*.moe.down_proj": "rowwise", "*.up": "rowwise"}
    assert {fqn: str(recipe) for fqn, recipe in converted(recipe=given).recipes.items()} == {
        f"blocks.{n}.{name}": recipe
        for n in (1, 2)
        for name, recipe in (
            ("up", "rowwise"), ("down", "tensorwise, forward in bf16"), ("moe.down_proj", "rowwise"))
    }  # fmt: skip


def test_first_and_last_blocks():
    kept = reasons(Decoder(), first_last_layers_bf16=True)
    assert kept["blocks.0.up"] == kept["blocks.1.down"] == "first or last block (first_last_layers_bf16)"
    stacks = nn.ModuleDict({  # the children of "encoder" are lists themselves
        "encoder": nn.ModuleList(nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in range(5)),
        "encoder2": nn.ModuleList(gelu_block(16, norm=False) for _ in range(3)),
        "one": nn.ModuleList([nn.Linear(16, 16)]),
    })  # fmt: skip
    for start, end, encoder, decoder in ((1, 1, {1, 2, 3}, {1}), (2, 1, {2, 3}, set()), (0, 4, {0}, set())):
        options = {"num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}
        names = [fqn.split(".") for fqn in plan(stacks, first_last_layers_bf16=True, **options).converted]
        assert Counter((stack, int(block)) for stack, block, *_ in names) == (
            {("encoder", n): 3 for n in encoder} | {("encoder2", n): 2 for n in decoder} | {("one", 0): 1}
        )
    converted = plan(stacks.encoder, first_last_layers_bf16=True).converted
    assert converted == tuple(f"{block}.{layer}" for block in (1, 2, 3) for layer in range(3))
    no_stacks = map(nn.ModuleList, ([nn.LayerNorm(16)] * 2, [nn.Linear(16, 16), Plain(16)], [nn.Linear(16, 16)]))
    with pytest.raises(ValueError, match=r"`first_last_layers_bf16=True` needs a stack of blocks.*`keep=\[\.\.\.\]`"):
        reasons(nn.Sequential(nn.Identity(), *no_stacks), first_last_layers_bf16=True)


@pytest.mark.parametrize(("pattern", "nearest"), [("p", ""), ("*.gate", ""), ("blocks.0.ups", "blocks.0.up'")])
def test_keep_that_matches_nothing_raises_with_the_nearest(pattern, nearest):
    match = rf"`keep='{re.escape(pattern)}'` matches no Linear of the model; the nearest are: '{nearest}"
    with pytest.raises(ValueError, match=match):
        plan(Decoder(), keep=[pattern])


def test_summary_and_table():
    made = plan(Decoder(), keep=["blocks.1"])
    assert made.summary() == (
        "converted 2 of 7 linear layers, kept 5 in bf16: out_proj of a MultiheadAttention, which never calls it"
        " ('blocks.0.attn.out_proj' and 1 more); kept by 'blocks.1' ('blocks.1.up' and 1 more);"
        " output head (by name) ('lm_head'); 2 in_proj of a MultiheadAttention do not run in FP8"
    )
    lines = str(made).split("\n")
    assert len(lines) == 9
    assert lines[1].split() == ["blocks.0.up", "32", "->", "64", "FP8"]
    assert lines[6].endswith("kept: output head (by name), bf16")
    assert lines[7].endswith("kept: no Linear (in_proj of a MultiheadAttention), bf16")
    assert "), kept 3 in fp16: " in plan(Decoder(), "fp8-hybrid-fp16", recipe={"*": "tensorwise"}).summary()
    for name in ("mxfp8", "mxfp8-te", "nvfp4-te"):
        assert "features are no multiples of 32" in plan(nn.Linear(32, 48), name).summary()
    mixed = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10), nn.Linear(16, 16).double(), nn.LSTM(16, 16, 2))
    mixed += nn.Sequential(nn.Conv1d(1, 1, 1), nn.Conv1d(1, 1, 1))
    assert plan(mixed).summary() == (
        "converted 1 of 3 linear layers, kept 2, 1 of them in bf16: features are no multiples of 16 ('1');"
        " weights of torch.float64 ('2'); 2 Conv1d, 1 LSTM do not run in FP8"
    )


H100 = [  # torchao's figures, of the nearest shape by the logarithms of its sizes; None below their break-even
    (1024, 8192, 1.43, None), (8192, 7168, 1.73, 1.73), (3584, 8192, 1.71, 1.71),
    (8192, 2560, 1.73, 1.73), (1536, 16384, 1.43, 1.43), (8192, 1024, 1.73, None), (4096, 1024, None, None),
    (2048, 4096, 1.71, None), (2560, 4096, 1.71, 1.71), (8192, 2048, 1.73, None),
]  # fmt: skip


def test_the_gain_of_a_layer_is_that_of_its_recipe():
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(k, n) for k, n, *_ in (*H100, *H100))
    by_row = {f"{number}": "rowwise" for number in range(len(H100), 2 * len(H100))}
    rows = plan(model, recipe={**by_row, "*": "tensorwise"}).rows
    assert [row.gain for row in rows] == [row[2] for row in H100] + [row[3] for row in H100]


def attention(package, name, **attributes):
    module = type(name, (nn.Module,), {"__module__": f"{package}.models.some"})()
    return changed(module, qkv=nn.Linear(16, 48), proj=nn.Linear(16, 16), **attributes)


def test_known_classes_that_read_a_weight_themselves():
    """Transformers' Mamba is the real class; torchvision's and timm's are known by name and by `q_bias`."""
    said = "reads its weight and never calls it"
    swin = attention("torchvision", "ShiftedWindowAttention")
    for _ in range(2):
        assert set(reasons(swin).values()) == {f"ShiftedWindowAttention {said}"}
        swin.__class__ = type("Mine", (type(swin),), {})  # a user's subclass
    assert set(reasons(attention("mine", "ShiftedWindowAttention")).values()) == {None}
    bias = nn.Parameter(torch.zeros(16))
    for attributes, reason in (
        ({"q_bias": bias}, f"EvaAttention {said}"),
        ({"q_bias": bias, "qkv_bias_separate": False}, f"EvaAttention {said}"),
        ({"q_bias": bias, "qkv_bias_separate": True}, None),
        ({"q_bias": None}, None),
        ({}, None),
    ):
        assert reasons(attention("timm", "EvaAttention", **attributes)) == {"qkv": reason, "proj": None}
    config = MambaConfig(hidden_size=64, time_step_rank=16)
    assert reasons(MambaMixer(config, layer_idx=0))["dt_proj"] == f"MambaMixer {said}"


def test_a_thousand_layers_are_as_many_rows_as_differ():
    with torch.device("meta"):
        sizes = [64] * 480 + [256] * 20
        layers = [nn.ModuleDict({"up": nn.Linear(64, size), "down": nn.Linear(size, 64)}) for size in sizes]
        model = nn.ModuleDict({"blocks": nn.ModuleList(layers), "lm_head": nn.Linear(64, 256)})
    for layer in layers[490:]:
        layer.requires_grad_(False)
    planned = plan(model, recipe={"blocks.[0-9].up": "rowwise", "*": "tensorwise"})
    summary, *lines = repr(planned).splitlines()
    assert summary == planned.summary()
    assert [line.split("  ")[0] for line in lines] == [
        "10 x blocks.*.up", "480 x blocks.*.down", "470 x blocks.*.up", "10 x blocks.*.up", "10 x blocks.*.down",
        "10 x blocks.*.up", "10 x blocks.*.down", "lm_head",
    ]  # fmt: skip
    assert ["64 -> 64" in lines[0], "256 -> 64" in lines[4], "64 -> 256" in lines[7]] == [True] * 3
    said = ["FP8 (rowwise)", *["FP8 (tensorwise)"] * 6, "kept: output head (by name), bf16"]
    assert [line.split("  ")[-1] for line in lines] == said
