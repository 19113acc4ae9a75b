"""NVFP4: codes bit for bit those of torchao, a Hadamard matrix and stochastic rounding by mathematics, and defaults.

Transformer Engine's reference quantizer is compared in ``tests/te/test_te_nvfp4.py``.
"""

import logging
from math import ceil

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowprec import HalfMixed, MXFP8TorchAO, NVFP4TorchAO
from lightning_lowprec.callbacks import PrecisionSchedule
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.names import TABLE
from lightning_lowprec.private.torch_products import _in_blocks
from lightning_lowprec.products.nvfp4 import NVFP4, Codes, encode, transformed
from lightning_lowprec.torchao import linear as coded
from tests.torchao.test_prototypes import needs_mxfp8, results

CPU = torch.device("cpu")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP MX formats, table 5
UNIT = 6 * 448
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def matrix(dtype=torch.float32, rows=64, columns=96, spread=2.0):
    """Values of very different sizes, a row of zeros and one of small values."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=made) * torch.exp(spread * torch.randn(rows, 1, generator=made))
    x[3], x[5] = 0, 1e-5 * x[5]
    return x.to(dtype)


def decoded(codes):
    return codes.decoded() * (codes.amax / UNIT)


@needs_mxfp8  # as new a torchao
@DTYPES
def test_codes_and_scales_are_torchaos_bit_for_bit(dtype):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    x = matrix(dtype)
    scale, codes = nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))
    found = Codes(*encode(x, False, False, "torchao"))
    assert torch.equal(found.codes, codes)
    assert torch.equal(found.scale.float(), scale.view(len(x), -1).float())
    assert torch.equal(found.amax, x.abs().max().float())
    other = Codes(*encode(x, False, False, "transformer_engine"))
    assert not torch.equal(other.codes, codes), "torchao has no scales below 2^-6"


def test_all_codes_decode_to_the_values_of_the_format():
    packed = (torch.arange(0, 16, 2) | torch.arange(1, 16, 2) << 4).to(torch.uint8)
    scale = torch.tensor([[0.875], [448.0]]).to(torch.float8_e4m3fn)
    found = Codes(packed.expand(2, 8), scale, torch.tensor(1.0)).decoded()
    assert torch.equal(found, E2M1 * torch.tensor([[0.875], [448.0]]))


@pytest.mark.parametrize("reference", ["transformer_engine", "torchao"])
@pytest.mark.parametrize("tiles", [False, True])
def test_a_code_is_the_nearest_value_for_its_scale(tiles, reference):
    x = matrix(spread=0.5)
    found = Codes(*encode(x, tiles, False, reference))
    blocks = x.view(4, 16, 6, 16).transpose(1, 2).abs().amax((-1, -2)).repeat_interleave(16, 0) if tiles else None
    largest = x.view(64, 6, 16).abs().amax(-1) if blocks is None else blocks
    expected = largest.double() / 6 * UNIT / found.amax.double()  # rounded to 3 bits: at most 1 / 16 off
    assert (found.scale.double() / expected - 1).abs()[expected >= 2**-6].max() <= 1 / 16
    step = found.scale.double().repeat_interleave(16, 1) * found.amax.double() / UNIT
    errors = (x.double().unsqueeze(-1) - E2M1.double() * step.unsqueeze(-1)).abs().amin(-1)
    assert torch.allclose((decoded(found).double() - x.double()).abs(), errors, rtol=1e-5, atol=1e-6)


def test_weights_have_the_same_codes_in_both_layouts():
    weight = NVFP4(emulate=True).operand(matrix(spread=0.5), "weight", torch.float32)
    assert torch.equal(weight.rows().decoded(), weight.columns().decoded().t())


def test_the_hadamard_matrix_is_orthogonal_and_spreads_a_spike():
    matrix_of = transformed(torch.eye(16))
    assert torch.equal(matrix_of @ matrix_of.t(), torch.eye(16))
    assert torch.equal(matrix_of.abs(), torch.full((16, 16), 0.25))
    assert (matrix_of.sum(1) != 0).sum() == 1, "all rows but one of a Hadamard matrix have as many signs of each kind"
    assert 4 < (matrix_of[:, 0] < 0).sum() < 12, "and signs are changed at random"
    spike = torch.zeros(1, 32)
    spike[0, 5] = 8.0
    assert torch.equal(transformed(spike).abs(), torch.cat([torch.full((1, 16), 2.0), torch.zeros(1, 16)], 1))


def test_the_transform_of_both_operands_leaves_a_weight_gradient_as_it_is():
    """Exact on integers: sums of 16 of them, divided by 4, are exact in float32."""
    x, gradient = (torch.randint(-8, 9, (64, n), generator=torch.Generator().manual_seed(n)).float() for n in (96, 32))
    assert torch.equal(transformed(gradient.t()) @ transformed(x.t()).t(), gradient.t() @ x)
    by = NVFP4(emulate=True, stochastic=False)
    for role, changes in (("input", True), ("gradient", True), ("weight", False)):
        found, plain = (NVFP4.operand(how, x, role, x.dtype) for how in (by, NVFP4(emulate=True, hadamard=False)))
        assert torch.equal(found.rows().decoded(), plain.rows().decoded()) or role == "gradient"
        assert torch.equal(found.columns().decoded(), plain.columns().decoded()) is not changes


def test_stochastic_rounding_has_no_bias_and_touches_gradients_only():
    values = torch.tensor([0.1, 0.3, 0.85, 1.2, 2.25, 3.7, 4.5, 5.9, -0.6, -2.9, -5.0, 0.0, 1.5, -4.0, 6.0, 0.5])
    by = NVFP4(emulate=True, hadamard=False)
    rows = values.repeat(4000, 2)
    drawn = decoded(by.operand(rows, "gradient", torch.float32).rows()).view(-1, 16)
    below = torch.stack([E2M1[v >= E2M1].max() for v in values])
    above = torch.stack([E2M1[v <= E2M1].min() for v in values])
    assert (torch.isclose(drawn, below) | torch.isclose(drawn, above)).all()
    deviation = ((values - below) * (above - values) / len(drawn)).sqrt()
    assert ((drawn.double().mean(0) - values).abs() <= 4.5 * deviation + 1e-5).all()
    for role in ("input", "weight"):
        once, again = (decoded(by.operand(rows, role, torch.float32).rows()) for _ in range(2))
        assert torch.equal(once, again)


def test_scales_lie_in_memory_as_torchao_lays_them():
    from torchao.prototype.mx_formats.utils import to_blocked

    scale = torch.randn(200, 10).to(torch.float8_e4m3fn)
    assert torch.equal(_in_blocks(scale).float(), to_blocked(scale).flatten().float())


def layers(plugin, count=1, width=64):
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(
        [nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(count)]
    )
    plugin.bind_device(CPU)
    plugin.convert_module(model)
    return model


@needs_mxfp8
@pytest.mark.parametrize(("forward", "backward"), [("nvfp4", "mxfp8"), ("mxfp8", "nvfp4")])
def test_directions_may_have_other_formats(forward, backward):
    of = {"nvfp4": NVFP4TorchAO(stochastic_rounding=False), "mxfp8": MXFP8TorchAO()}
    mixed = NVFP4TorchAO(gemms={"forward": forward, "backward": backward}, stochastic_rounding=False)
    found, *pure = (
        results(nn.Linear(128, 192) if plugin is None else layer_of(plugin)) for plugin in (mixed, *of.values())
    )
    pure = dict(zip(of, pure, strict=True))
    for gemm, kind in (("forward", forward), ("grad_input", backward), ("grad_weight", backward)):
        assert torch.equal(found[gemm], pure[kind][gemm]), gemm
        assert not torch.equal(pure["nvfp4"][gemm], pure["mxfp8"][gemm])


def layer_of(plugin):
    torch.manual_seed(0)
    layer = nn.Linear(128, 192)
    plugin.bind_device(CPU)
    plugin.convert_module(layer)
    return layer


@pytest.mark.parametrize(("count", "kept"), [(1, 0), (3, 0), (6, 1), (20, 3)])
def test_the_last_15_percent_of_blocks_stay_in_bf16(count, kept):
    plugin = NVFP4TorchAO()
    model = layers(plugin, count)
    reasons = {row.fqn: row.kept_because for row in plugin.plan.rows if row.kept_because}
    expected = [f"blocks.{n}.{layer}" for n in range(count - kept, count) for layer in (0, 1)]
    assert reasons == dict.fromkeys(expected, "in the last 15% of blocks (last_blocks_bf16)")
    assert make_plan(layers(HalfMixed("bf16"), count), None, TABLE["nvfp4-torchao"].plan_request()) == plugin.plan
    for other in (NVFP4TorchAO(last_blocks_bf16=0.0), NVFP4TorchAO(only=["blocks"])):
        layers(other, count)
        assert len(other.plan.converted) == 2 * count
    assert len(coded.coded_layers(model)) == 2 * (count - kept)


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.forwards = nn.Linear(32, 32), []

    def training_step(self, batch, _):
        self.forwards.append("forward" not in getattr(self.net, "in_bf16", ()))
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "callbacks", "steps", "in_nvfp4"),
    [
        ({}, [], 20, ceil(0.82 * 20)),
        ({"forward_finish": 0.5}, [], 5, 3),
        ({"forward_finish": 0.0}, [], 20, 20),
        ({}, [], 1, 1),
        ({"schedule": [{"until": 4}, {"gemms": "bf16"}]}, [], 20, 4),
        ({}, [PrecisionSchedule([{"until": 4}, {"gemms": "bf16"}])], 20, 4),
    ],
    ids=["default", "half", "off", "one-step", "schedule", "callback"],
)
def test_the_forward_ends_in_bf16(options, callbacks, steps, in_nvfp4):
    module = Regression()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    plugin = NVFP4TorchAO(**options)
    trainer = L.Trainer(accelerator="cpu", max_steps=steps, plugins=plugin, callbacks=callbacks, **quiet)
    trainer.fit(module, DataLoader(torch.randn(64, 32), batch_size=1))
    assert module.forwards == [True] * in_nvfp4 + [False] * (steps - in_nvfp4)


def test_fabric_has_a_finish_where_it_tells_the_step_and_says_so_where_not(caplog):
    def run(**told):
        plugin = NVFP4TorchAO()
        fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
        torch.manual_seed(0)
        module = fabric.setup_module(nn.Linear(32, 32))
        found = []
        for step in range(10):
            if told:
                plugin.set_step(step, **told)
            found.append(module(torch.ones(32, 32)))
        return found

    with caplog.at_level(logging.INFO):
        untold, unknown, known = run(), run(total=None), run(total=10)
    assert caplog.text.count("no later phase, because the length of the run is not known") == 2
    assert "over 10 steps: steps 0 to 8: NVFP4; step 9" in caplog.text or "from step 9: forward in bf16" in caplog.text
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        high = nn.Linear(32, 32)(torch.ones(32, 32))
    assert not torch.equal(known[0], high)
    assert all(torch.equal(a, known[0]) for a in (*untold, *unknown, *known[:9]))
    assert torch.equal(known[9], high)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NVFP4TorchAO(gemms={"forward": "mxfp8", "backward": "mxfp8"}), "computes nothing in NVFP4"),
        (lambda: NVFP4TorchAO(gemms={"forward": "bf16"}), "`gemms={'forward': 'bf16'}` is not valid"),
        (lambda: NVFP4TorchAO(last_blocks_bf16=1.0), "`last_blocks_bf16=1.0` is not valid"),
        (lambda: NVFP4TorchAO(forward_finish=-0.1), "`forward_finish=-0.1` is not valid"),
        (lambda: NVFP4TorchAO(reference="cutlass"), "`reference='cutlass'` is not valid"),
        (lambda: NVFP4TorchAO(head="fp8"), "`schedule` with `gemms` in bf16 is not valid with `head='fp8'`"),
    ],
    ids=["gemms", "bf16", "blocks", "finish", "reference", "head"],
)
def test_options_that_are_not_valid_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_devices_without_nvfp4_are_refused_unless_the_user_asks_for_emulation(monkeypatch):
    assert NVFP4TorchAO(emulate=False).refusal(CPU) == "cpu has no NVFP4 kernels. Leave `emulate=False` out"
    assert "sums of NVFP4 are not modelled" in NVFP4TorchAO(emulate="blackwell").refusal(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU X")
    cuda = torch.device("cuda", 0)
    assert "has no products of float4 with a scale per 16 values" in NVFP4TorchAO().refusal(cuda)
    assert NVFP4TorchAO(emulate=True).refusal(cuda) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert NVFP4TorchAO().refusal(cuda) is None
