"""Weights that do not train, in FP8 alone (`fp8_params=True`): what they hold, and where they may go."""

import copy
import io
import math

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowprec import FP8TE, FP8TorchAO
from lightning_lowprec.te.fp8_weight import FrozenWeight
from lightning_lowprec.te.layer import convert_linears, store_frozen_in_fp8, te_linears
from tests.fsdp2.ranks import run
from tests.quality import sqnr
from tests.te.reference import losses_of
from tests.te.subjects import Net, fabric_for

DECIBELS = 10 * math.log10(12 * 4**3 * 3 / (2 * math.log(2)))
"""SQNR of e4m3 for values that are even over the logarithm, 32.2: a step is 2**-3 in [1, 2), an error's square that of
the step over 12, the mean square 3 / (2 ln 2). Normal numbers, which have some in the subnormals, are near it."""
FROZEN = [f"blocks.{i}.{j}.weight" for i in (0, 1) for j in (1, 3)]


def net():
    """Two blocks are frozen, the third and the head train."""
    model = Net()
    model.blocks[:2].requires_grad_(False)
    return model


@pytest.fixture
def model(pretend_gpu):
    model = net()
    fabric_for(FP8TE("current", fp8_params=True)).setup(model)
    return model


def test_one_byte_each_and_the_same_parameters(pretend_gpu):
    model = net()
    before = dict(model.named_parameters())
    before[FROZEN[0]].hung_by_the_user = 3
    optimizer = torch.optim.AdamW(model.parameters())
    fabric_for(FP8TE("delayed", fp8_params=True)).setup(model, optimizer)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert [name for name, p in after.items() if isinstance(p, FrozenWeight)] == FROZEN
    assert after[FROZEN[0]].hung_by_the_user == 3
    for name in FROZEN:
        p = after[name]
        assert p.codes.untyped_storage().nbytes() == p.numel()
        assert (p.dtype, p.requires_grad, p.shape) == (torch.float32, False, before[name].shape)


def test_values(pretend_gpu):
    torch.manual_seed(0)
    model, weight = net(), torch.randn(64, 32) * 0.02
    model.blocks[0][1].weight.data.copy_(weight)
    fabric_for(FP8TE("current", fp8_params=True)).setup(model)
    frozen = model.blocks[0][1].weight
    scale = 2.0 ** math.floor(math.log2(448 / weight.abs().max().item()))
    assert torch.equal(frozen.values(), (weight * scale).to(torch.float8_e4m3fn).float() / scale)
    assert sqnr(weight, frozen.values()) > DECIBELS - 1


def test_state_dicts_are_plain_and_come_back(model):
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    plain = Net()
    plain.load_state_dict(state)
    frozen = dict(model.named_parameters())[FROZEN[0]]
    assert torch.equal(plain.blocks[0][1].weight, frozen.values())
    codes, inv_scale = frozen.codes.clone().view(torch.uint8), frozen.inv_scale.clone()
    for dtype in (torch.float32, torch.bfloat16):
        frozen.codes.zero_()
        model.load_state_dict({name: value.to(dtype) for name, value in state.items()})
        assert torch.equal(frozen.codes.view(torch.uint8), codes)
        assert torch.equal(frozen.inv_scale, inv_scale)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).keys() == state.keys()


def test_moves_and_copies(model):
    frozen = model.blocks[0][1].weight
    values = frozen.values()
    model.to(torch.bfloat16)
    assert model.blocks[0][1].weight is frozen
    assert (frozen.dtype, type(frozen)) == (torch.bfloat16, FrozenWeight)
    assert torch.equal(frozen.values(), values)
    frozen.hung_by_the_user = 3
    assert model.float().blocks[0][1].weight.hung_by_the_user == 3
    for made in (copy.deepcopy(model), _pickled(model)):
        other = made.blocks[0][1].weight
        assert type(other) is FrozenWeight
        assert torch.equal(other.values(), values)
        assert other.codes.data_ptr() != frozen.codes.data_ptr()
    assert isinstance(frozen, nn.Parameter)


def _pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_other_operations_see_the_values(model):
    frozen = model.blocks[0][1].weight
    x = torch.randn(3, 32)
    assert torch.equal(F.linear(x, frozen), F.linear(x, frozen.values()))
    assert torch.equal(frozen.pow(2).sum(), frozen.values().pow(2).sum())
    assert torch.equal(torch.empty(64, 32).copy_(frozen), frozen.values())


@pytest.mark.parametrize("foreach", [False, True])
def test_an_update_raises(model, foreach):
    frozen = model.blocks[0][1].weight
    with pytest.raises(RuntimeError, match="frozen and kept in FP8 alone"), torch.no_grad():
        torch._foreach_add_([frozen], 1.0) if foreach else frozen.add_(1.0)
    with pytest.raises(RuntimeError, match="frozen and kept in FP8 alone"):
        frozen.data += 1.0


def test_other_values_are_taken(model):
    frozen = model.blocks[0][1].weight
    values = frozen.values()
    frozen.data = 4 * values
    assert torch.equal(frozen.values(), 4 * values)
    with torch.no_grad():
        frozen.copy_(values)
    assert torch.equal(frozen.values(), values)


@pytest.mark.parametrize(
    "again",
    [FP8TE("current"), FP8TorchAO(emulate=True), FP8TE("block", fp8_params=True)],
    ids=["te", "torchao", "block"],
)
def test_another_precision_gets_the_values(model, again):
    parameters = dict(model.named_parameters())
    values = parameters[FROZEN[0]].values()
    parameters[FROZEN[0]].hung_by_the_user = 3
    fabric_for(again).setup(model)
    assert not any(isinstance(p, FrozenWeight) for p in model.parameters())
    assert model.blocks[0][1].weight is parameters[FROZEN[0]]
    assert torch.equal(model.blocks[0][1].weight, values)
    assert vars(model.blocks[0][1].weight) == {"hung_by_the_user": 3}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_weight_that_is_computed_stays(pretend_gpu):
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(32, 64)), nn.Linear(64, 32)).requires_grad_(False)
    fabric_for(FP8TE("current", fp8_params=True)).setup(model)
    assert {name for name, p in model.named_parameters() if isinstance(p, FrozenWeight)} == {"1.weight"}


def test_half_precision_beside_them(pretend_gpu):
    model = net()
    fabric_for(FP8TE("current", fp8_params=True, master_weights=True)).setup(model)
    dtypes = {name: (type(p), p.dtype) for name, p in model.named_parameters()}
    assert {dtypes[name] for name in FROZEN} == {(FrozenWeight, torch.bfloat16)}
    assert dtypes["blocks.2.1.weight"] == (nn.Parameter, torch.float32)
    assert dtypes["blocks.0.0.weight"] == (nn.Parameter, torch.bfloat16)


class Adapted(nn.Module):
    """A frozen Linear and a trained low-rank one beside it, as LoRA has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x):
        x = x + self.up(self.down(x))
        return x + self.base(x)


def adapt(model):
    batches = torch.randn(5, 24, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    trained = [p for p in model.parameters() if p.requires_grad]
    return losses_of(lambda x: F.mse_loss(model(x).float(), x.float().flip(-1)), trained, batches)


def test_adapters_train_over_them(reference_te):
    """Through Transformer Engine's forward and backward: as over weights that have these values."""
    options = {"fp8_eval": True, "token_alignment": 16, "weight_cache": False, "custom": True}
    frozen, plain = Adapted(), Adapted()
    for model in (frozen, plain):
        convert_linears(model, ["base.0", "base.2"], **options)
    store_frozen_in_fp8(frozen, torch.device("cpu"))
    plain.load_state_dict(frozen.state_dict())
    losses = adapt(frozen)
    assert all(isinstance(layer.weight, FrozenWeight) for layer in te_linears(frozen))
    assert losses == adapt(plain)
    assert losses[-1] < losses[0]


def broadcast(rank, folder):
    from tests.te.hopper import pretend

    pretend(pytest.MonkeyPatch())
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    model[0].weight.requires_grad_(False)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=FP8TE("current", fp8_params=True))
    fabric.launch()
    mine = model[0].weight.detach().clone()
    fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return mine, type(model[0].weight).__name__, model[0].weight.codes.float(), model[0].weight.inv_scale


@pytest.mark.distributed
def test_ddp_sends_those_of_rank_0(tmp_path):
    (first, kind, *frozen), (second, other_kind, *other) = run(broadcast, 2, tmp_path, tmp_path)
    assert kind == other_kind == "FrozenWeight"
    assert not torch.equal(first, second)
    for mine, its in zip(frozen, other, strict=True):
        assert torch.equal(mine, its)
    assert sqnr(first, frozen[0] * frozen[1]) > DECIBELS - 1
