"""Which tensors and products stay float32 where others become half precision, and that the plan says so."""

import os
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from transformers.core_model_loading import build_glob_alternation

import lightning_lowprec
from lightning_lowprec import MSAMP, HalfMixed, plain
from tests.families.products import step
from tests.families.tiny import build, classes, config, families
from tests.toys import convert

pytestmark = pytest.mark.slow

SOME = ("deepseek_v3", "bailing_hybrid", "ernie4_5_moe", "afmoe", "gpt_oss", "t5", "rwkv", "mamba")
EVERY = "EVERY_FAMILY" in os.environ  # by `make test-dtypes`


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.up = nn.Linear(16, 16)
        self.A_log, self.dt_bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
        self.register_buffer("e_score_correction_bias", torch.zeros(4))
        self.register_buffer("inv_freq", torch.ones(8))
        self.register_buffer("mask", torch.ones(8))


KEPT = {"gate.bias", "A_log", "dt_bias", "e_score_correction_bias", "inv_freq"}


def tiny(family):
    return build(classes(f"transformers.models.{family}.modeling_{family}")[0])


def float32(model):
    return {fqn for fqn, tensor in model.state_dict().items() if tensor.dtype == torch.float32}


@pytest.mark.parametrize("form", [True, "remainder", "stochastic"])
def test_known_names_stay_float32_buffers_too(form):
    model = Mixture()
    plugin = HalfMixed("bf16", master_weights=form, buffer_dtype=torch.bfloat16)
    L.Fabric(accelerator="cpu", plugins=plugin).setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert float32(model) == KEPT


def test_named_tensors_stay_float32_and_become_it():
    model = Mixture()
    model.up.to(torch.bfloat16)
    model.tied, options = nn.Linear(16, 16), {"buffer_dtype": torch.bfloat16}
    model.tied.weight = model.up.weight
    plugin = HalfMixed("bf16", master_weights="remainder", keep_fp32=["tied", "experts.[01]", "mask"], **options)
    L.Fabric(accelerator="cpu", plugins=plugin).setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    named = {f"{layer}.{name}" for layer in ("tied", "experts.0", "experts.1") for name in ("weight", "bias")}
    assert float32(model) == KEPT | named | {"up.weight", "mask"}
    model.load_state_dict({**model.state_dict(), "up.bias": torch.full((16,), 1.001)})  # beside a float32 weight
    assert torch.equal(plain(model).up.bias, torch.full((16,), 1.001))


BY_NAME = ("A_log", "dt_bias", "e_score_correction_bias", "expert_bias")


def declared(model, dtype):
    """Return the tensors that ``from_pretrained(dtype=dtype)`` loads as float32."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return set()
    found, _, _ = build_glob_alternation(list(plan))
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {fqn for fqn, tensor in tensors if tensor.is_floating_point() and found.search(fqn)}


def reasons(model):
    """Return the parameters that may be float32 without being declared strictly."""
    vectors = {fqn for fqn in declared(model, torch.float16) if fqn in dict(model.named_parameters())}
    vectors = {fqn for fqn in vectors if model.get_parameter(fqn).ndim < 2}
    by_name = {fqn for fqn, _ in model.named_parameters() if fqn.rpartition(".")[2] in BY_NAME}
    norms = {
        f"{fqn}.{name}"
        for fqn, m in model.named_modules()
        if isinstance(m, _NormBase)
        for name, _ in m.named_parameters()
    }
    routers = {fqn for fqn, p in model.named_parameters() if fqn.endswith(("gate.bias", "router.bias")) and p.ndim == 1}
    parts = ("router.", "_router.", "gate.")
    routers |= {fqn for fqn, p in model.named_parameters() if fqn.endswith(".bias") and any(s in fqn for s in parts)}
    return vectors | by_name | norms | routers


def look(cls):
    """Return declared tensors that were cast, float32 parameters without a reason, and the number of all others."""
    with torch.device("meta"):
        model = cls(config(cls.config_class))
    strict, allowed = declared(model, torch.bfloat16), reasons(model)
    convert(HalfMixed("bf16", master_weights="remainder", buffer_dtype=torch.bfloat16), model)
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    kept = {fqn for fqn, p in model.named_parameters() if p.dtype == torch.float32}
    return {fqn for fqn in strict if tensors[fqn].dtype != torch.float32}, kept - strict - allowed, len(kept)


@pytest.mark.parametrize("family", families() if EVERY else [f"transformers.models.{f}.modeling_{f}" for f in SOME])
def test_a_family_of_transformers(family):
    for cls in classes(family) if EVERY else classes(family)[:1]:
        try:
            lost, groundless, kept = look(cls)
        except Exception as error:  # models of other people, which ask for more than a tiny config
            if not EVERY:
                raise
            print(f"not built: {cls.__name__}: {' '.join(str(error).split())[:100]}")
            continue
        assert (lost, groundless) == (set(), set()), cls
    if family.endswith("_t5"):  # its declared tensors are matrices
        assert kept == 0
    elif not EVERY and "deepseek_v3" not in family:  # a buffer; its router's weight too from transformers 5.24 on
        assert kept > 0


@pytest.mark.parametrize("name", ["fp16-master", "bf16-master"])
def test_the_list_for_fp16_counts_with_fp16(name):
    model = nn.ModuleDict({"w": tiny("mamba"), "wo": tiny("t5")})  # one begins as the other; "wo" is declared
    L.Fabric(accelerator="cpu", precision=name).setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    kept = {fqn for fqn in float32(model["wo"]) if ".wo." in fqn}
    assert bool(kept) == (name == "fp16-master")
    assert float32(model["wo"]) == kept


def test_what_keep_fp32_refuses():
    for plugin in (
        HalfMixed("bf16", keep_fp32=["gat"]),
        HalfMixed("bf16", master_weights=True, keep_fp32=["gate", "gat"]),
    ):
        with pytest.raises(ValueError, match=r"`keep_fp32='gat'` matches no .*; the nearest are: '.*gate\.\w+'"):
            L.Fabric(accelerator="cpu", plugins=plugin).setup(Mixture())
    with pytest.raises(TypeError, match="keep_fp32"):
        MSAMP("O2", keep_fp32=["gate"])
    plugin = HalfMixed("bf16", master_weights=True, keep_fp32=["gate"])
    engine = SimpleNamespace(name="DeepSpeed")
    with pytest.raises(ValueError, match=r"`keep_fp32=\['gate'\]` is not possible under DeepSpeed"):
        plugin.bind_engine(engine)


def test_a_later_precision_that_keeps_more_takes_the_masters_over():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    exact = {fqn: p.detach().clone() for fqn, p in net.named_parameters()}
    for keep in ((), ("1",), ()):
        plugin = HalfMixed("bf16", master_weights="remainder", keep_fp32=keep)
        L.Fabric(accelerator="cpu", plugins=plugin).setup(net, optimizer)
        assert net[1].weight.dtype == (torch.float32 if keep else torch.bfloat16)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        assert all(torch.equal(p, exact[fqn]) for fqn, p in plain(net, copy=True).named_parameters())


@pytest.mark.parametrize("name", ["half-auto", "fp8-rowwise", "msamp-o2"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_a_step_of_a_mixture_has_no_float32_products_that_nobody_asked_for(family, name):
    products = step(tiny(family), name)
    assert products.rows
    assert products.faults() == []
    assert name != "half-auto" or products.backward_surplus() <= 0


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "gpt2", "bert", "nemotron_h"])
def test_the_plan_says_the_dtype_that_a_kept_weight_runs_in(family):
    model = tiny(family)
    rows = [row for row in lightning_lowprec.plan(model, keep=["*"]).rows if row.runs_in is not None]
    assert {row.runs_in for row in rows} == {"bf16"}
    assert any(row.kind != "Linear" for row in rows) or family == "bert"
    products = step(model, "half-auto").rows
    for row in rows:
        fqn = row.fqn if row.kind != "stacked experts" else row.fqn.rpartition(".")[0]
        dtypes = {
            dtype for product in products if product.module == fqn and not product.backward for dtype in product.dtypes
        }
        assert dtypes == {torch.bfloat16}, row
