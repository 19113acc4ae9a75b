"""What would be fused, and why not; without Transformer Engine."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.gpu_lane.models import TOY, Llama
from benchmarks.gpu_lane.setups import fusion_knows_the_block
from lightning_lowprec.conversion.matmuls import linears
from lightning_lowprec.te.fusion import Place, add_places, candidates, fuse, plan_fusion

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
NORM, ATTENTION, MLP = "input_layernorm", "self_attn", "post_attention_layernorm"


def llama(**options):
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def neox(**options):
    with torch.device("meta"):
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, **options))


def mixtral(**options):
    with torch.device("meta"):
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2, **options)
        return transformers.MixtralForCausalLM(config)


def rows(model, without=(), also=(), **options):
    """By fqn, of the first decoder layer."""
    allowed = {*linears(model), *also} - {fqn for fqn in linears(model) if fqn.endswith(tuple(without) or ("-",))}
    fusion = plan_fusion(model, may_convert=allowed, **options)
    return {row.fqn.rpartition("layers.0.")[2]: row for row in fusion.rows if "layers.1." not in row.fqn}


def layer(model):
    return model.model.layers[0]


def test_a_llama_is_fused_whole():
    fusion = plan_fusion(llama(), may_convert=linears(llama()))
    assert fusion.summary() == "fused 4 of 4 places (2 norm+linear, 2 norm+MLP)"
    first = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")]
    assert fusion.rows[0].linears == tuple(first)
    assert "model.layers.0.self_attn.o_proj" not in fusion.handled
    assert "model.layers.1.mlp.down_proj" in fusion.handled


@pytest.fixture
def no_added_places(monkeypatch):
    monkeypatch.setattr(candidates, "_added", [])


@pytest.mark.usefixtures("no_added_places")
def test_a_decoder_layer_of_the_users_own_is_fused_when_its_places_are_known():
    """The block of the GPU lane, and what the lane says of it."""
    model = Llama(TOY)
    assert plan_fusion(model, may_convert=linears(model)).rows == ()
    for _ in range(2):
        fusion_knows_the_block()
    fusion = plan_fusion(model, may_convert=linears(model))
    assert fusion.summary() == "fused 4 of 4 places (2 norm+linear, 2 norm+MLP)"
    block = fusion.rows[:2]
    assert [row.fqn for row in block] == ["layers.0.attention_norm", "layers.0.mlp_norm"]
    assert block[1].linears == tuple(f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
    assert len(candidates._added) == 2, "a place that is known is not added again"
    assert plan_fusion(llama(), may_convert=linears(llama())).fused, "the others stay known"


@pytest.mark.usefixtures("no_added_places")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linears": ()}, r"`linears=\(\)` of the place of 'a.Block'"),
        ({"down": ("c",)}, "`down=.* with `activation=''`"),
    ],
)
def test_a_place_that_cannot_be_is_refused(change, message):
    names = {"layer": "a.Block", "norm": "n", "norm_class": "a.Norm", "inside": "i", "inside_class": "a.I"}
    with pytest.raises(ValueError, match=message):
        add_places(Place(**{**names, "linears": ("q",), **change}))
    assert candidates._added == []


def test_an_exact_gelu_is_not_fused_with():
    fusion = plan_fusion(neox(), may_convert=linears(neox()))
    assert fusion.summary() == (
        "fused 4 of 4 places (4 norm+linear); 2 without the MLP: Transformer Engine has no activation equal to"
        " GELUActivation ('gpt_neox.layers.0.post_attention_layernorm' and 1 more)"
    )
    for act, kind in (("gelu_new", "norm+MLP"), ("gelu_pytorch_tanh", "norm+MLP"), ("relu2", "norm+MLP"),
                      ("quick_gelu", "norm+linear"), ("mish", "norm+linear")):  # fmt: skip
        assert plan_fusion(neox(hidden_act=act), may_convert=linears(neox())).rows[1].kind == kind


def test_experts_are_fused_where_their_parameters_may_convert():
    experts = [f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")]
    found = rows(mixtral(), also=experts)
    assert found["mlp.experts"].kept is None
    assert found["mlp.experts"].linears == tuple(experts[:2])
    assert MLP not in found  # the router reads that norm
    assert rows(mixtral(), also=experts[:1])["mlp.experts"].kept == "down_proj is kept in high precision"
    assert rows(mixtral())["mlp.experts"].kept == "gate_up_proj is kept in high precision"


@pytest.mark.parametrize(
    ("name", "experts", "kept"),
    [
        ("Qwen3Moe", "num_experts", None),
        ("Olmoe", "num_experts", None),
        ("GptOss", "num_local_experts", "its experts are ungated, have biases, or are stored transposed"),
    ],
)
def test_experts_of_other_models_by_their_layout(name, experts, kept):
    config = getattr(transformers, f"{name}Config")(**SIZES, num_key_value_heads=2, pad_token_id=0, **{experts: 4})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    names = [fqn for fqn, _ in model.named_parameters() if ".experts." in fqn]
    (row, _) = plan_fusion(model, may_convert=names).rows
    assert (row.kind, row.kept) == ("grouped experts", kept)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"without": ["k_proj"]}, "k_proj is kept in high precision"),
        ({"kept_norms": [f"model.layers.0.{NORM}"]}, "its norm is kept as it is"),
        ({"feature_alignment": 128}, "features of q_proj are no multiples of 128"),
    ],
)
def test_what_the_plan_keeps(options, reason):
    assert rows(llama(), **options)[NORM].kept == reason


def test_a_kept_second_layer_leaves_the_first_fused():
    found = rows(llama(), without=["down_proj"])[MLP]
    assert (found.kind, found.kept, found.note) == ("norm+linear", None, "down_proj is kept in high precision")
    assert found.linears == ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    assert rows(llama(), whole_mlp=False)[MLP].note == "the recipe's backward is not that of LayerNormMLP"


def hook(module):
    module.register_forward_hook(lambda *_: None)


def subclass(module):
    module.__class__ = type("Other", (type(module),), {})


def namesake(module):
    """Another class of the same name: a user's own, or one that an optimisation library makes."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})


def replaced(module):
    module.forward = module.forward


@pytest.mark.parametrize(
    ("change", "where", "reason"),
    [
        (lambda m: hook(layer(m).self_attn.v_proj), NORM, "hooks on its Linear would see no normalised tensor"),
        (lambda m: hook(layer(m).input_layernorm), NORM, "hooks on its LlamaRMSNorm would see no normalised tensor"),
        (lambda m: hook(layer(m).self_attn), NORM, "hooks on its LlamaAttention would see no normalised tensor"),
        (lambda m: replaced(layer(m).mlp), MLP, "the forward of its LlamaMLP is replaced on the instance"),
        (lambda m: layer(m).self_attn.compile(), NORM, "the forward of its LlamaAttention is replaced on the instance"),
        (lambda m: subclass(layer(m).self_attn.q_proj), NORM, "q_proj is no plain Linear (Other)"),
        (lambda m: layer(m).input_layernorm.bfloat16(), NORM, "its weights have several dtypes or devices"),
        (lambda m: layer(m).self_attn.double() and layer(m).input_layernorm.double(), NORM, "its weights have several"),
        (
            lambda m: setattr(layer(m).self_attn.k_proj, "weight", layer(m).self_attn.v_proj.weight),
            NORM, "its weights are used in several places",
        ),
        (
            lambda m: parametrizations.weight_norm(layer(m).mlp.up_proj),
            MLP, "up_proj is no plain Linear (ParametrizedLinear)",
        ),
    ],
)  # fmt: skip
def test_what_is_not_exactly_what_we_know(change, where, reason):
    model = llama()
    change(model)
    found = rows(model)
    assert found[where].kept.startswith(reason)
    assert found[MLP if where == NORM else NORM].kept is None


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("the layer", lambda m: namesake(layer(m))),
        ("its norm", lambda m: namesake(layer(m).input_layernorm)),
        ("its attention", lambda m: namesake(layer(m).self_attn)),
    ],
)
def test_other_classes_are_not_known_at_all(part, change):
    model = llama()
    change(model)
    assert NORM not in rows(model), part


def test_a_layer_in_two_places_is_left_alone():
    model = llama()
    model.model.layers[1] = layer(model)
    assert {row.kept for row in rows(model).values()} == {"its weights are used in several places"}


@pytest.mark.parametrize(
    ("norm", "linear", "reason"),
    [
        (nn.LayerNorm(32), nn.Linear(32, 32), None),
        (nn.RMSNorm(32, 1e-5), nn.Linear(32, 32, bias=False), None),
        (nn.LayerNorm(32, bias=False), nn.Linear(32, 32), "a LayerNorm without bias"),
        (nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 32), "a norm without weight"),
        (nn.LayerNorm((4, 32)), nn.Linear(32, 32), "the norm is over more than the features"),
        (nn.RMSNorm(32), nn.Linear(32, 32), "an RMSNorm whose eps depends on the dtype"),
        (nn.LayerNorm(32), nn.Linear(32, 24), "features of 1 are no multiples of 16"),
    ],
)
def test_sequentials(norm, linear, reason):
    model = nn.Sequential(norm, linear)
    (row,) = plan_fusion(model, may_convert=["1"]).rows
    assert row.kept == reason
    assert row.fqn == "0"


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 32)),
        nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)),
        nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 32)),
        nn.ModuleList([nn.LayerNorm(32), nn.Linear(32, 32)]),
        nn.Linear(32, 32),
    ],
)
def test_no_structure_no_fusion(model):
    fusion = plan_fusion(model, may_convert=linears(model))
    assert fusion.rows == ()
    assert fusion.summary() == "fused nothing: no structure that fusion knows"


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="it is installed here")
def test_without_transformer_engine_fuse_says_what_to_install():
    with pytest.raises(ModuleNotFoundError, match="`fuse='auto'` needs transformer_engine, which is not installed"):
        fuse(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)), may_convert=["1"])


def test_no_public_name_is_a_module_too():
    import lightning_lowprec.te.fusion as fusion

    files = {path.stem for path in Path(fusion.__file__).parent.glob("*.py")}
    assert not files & set(fusion.__all__)  # importing such a module later would hide the name
