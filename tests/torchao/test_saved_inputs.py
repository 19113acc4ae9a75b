"""Float8 codes of inputs that are kept for the backward: the same results, fewer bytes, shared by siblings."""

import copy
import gc
import threading
import weakref
from functools import partial

import lightning as L
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.gpu_lane import models
from lightning_lowprec import FP8TorchAO
from lightning_lowprec.products.scaled import Scaled

SHAPE = models.TOY  # 64 hidden, 128 feed-forward, 4 heads, 2 for keys and values, 2 blocks
TOKENS = 2 * SHAPE.sequence
KV = SHAPE.kv_heads * SHAPE.head_dim


class Siblings(nn.Module):
    """Three layers that read one input."""

    def __init__(self, between=lambda x: None):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(64, n) for n in (64, 32, 32))
        self.between = between

    def forward(self, x):
        found = []
        for part in self.parts:
            found.append(part(x))
            self.between(x)
        return torch.cat(found, dim=-1)


def set_up(net, saved="codes", **options):
    """Fabric and the wrapped model."""
    plugin = FP8TorchAO(saved_inputs=saved, **options)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    return fabric, fabric.setup_module(net)


def converted(net, saved="codes", **options):
    """The bare model, to be called with the tensor itself: the wrapper casts inputs. And the context of a forward."""
    fabric, _ = set_up(net, saved, **options)
    return net, fabric.autocast


def inputs(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def encoded(monkeypatch):
    """The shapes of the inputs that were encoded."""
    shapes, encode = [], Scaled.encoded

    def noting(self, matrix, role):
        if role == "input":
            shapes.append(tuple(matrix.shape))
        return encode(self, matrix, role)

    monkeypatch.setattr(Scaled, "encoded", noting)
    return shapes


class Saved:
    """The storages that autograd keeps between forward and backward, without those of ``model``."""

    def __init__(self, model):
        self._held = {}
        self._own = {p.untyped_storage()._cdata for p in model.parameters()}

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor):
        self._held[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def held(self):
        return [tensor for key, tensor in self._held.items() if key not in self._own]

    def bytes(self):
        return sum(tensor.untyped_storage().nbytes() for tensor in self.held())


def train(saved, run, steps=2, **options):
    """Losses and parameters of a model of two blocks; ``run(block, *args)`` calls a block."""
    torch.manual_seed(0)
    net = models.Llama(SHAPE)
    fabric, model = set_up(net, saved, **options)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    for block in net.layers:
        block.forward = partial(run, block.forward)
    tokens = torch.randint(0, SHAPE.vocab, (2, 27), generator=torch.Generator().manual_seed(2))  # rows are padded
    losses = []
    for _ in range(steps):
        for part in (tokens, tokens.flip(0)[:1]):
            loss = model(part, part)
            fabric.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in net.parameters()]


def policy(saved, ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(*operations):
    return partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, partial(policy, operations)),
    )


ATEN = torch.ops.aten
RUNS = {
    "plain": lambda f, *args: f(*args),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective, products": selective(ATEN.mm.default),
    "selective, what codes are made of": selective(ATEN.max.default, ATEN.mul.Tensor, ATEN._to_copy.default),
}
OPTIONS = [
    {},
    {"weight_codes": "per_gemm"},
    {"base": "fp16"},
    {"fp8_format": "e4m3"},
    {"round_scales_to_power_of_2": True},
    {"master_weights": True},
    {"master_weights": "remainder", "weight_codes": "per_gemm"},
    {"compile": {"backend": "aot_eager"}},
]


CASES = [("plain", options) for options in OPTIONS] + [
    ("checkpoint", {}),
    ("reentrant", {}),
    ("selective, products", {}),
    ("selective, what codes are made of", {}),
    ("selective, what codes are made of", {"weight_codes": "per_gemm"}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_losses_and_weights_are_those_of_kept_values(kind, options):
    losses, weights = train("codes", RUNS[kind], **options)
    expected = train("values", RUNS["plain"], **options)
    assert losses == expected[0]
    assert all(map(torch.equal, weights, expected[1]))


@pytest.mark.parametrize("weight_codes", ["per_forward", "per_gemm"])
@pytest.mark.parametrize("rows", [64, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_siblings_keep_one_byte_per_element_of_their_input(weight_codes, rows, dtype, encoded):
    """Values: torch's cast of a float32 input makes a copy for each layer; a bf16 input is shared."""
    kept, padded = {}, -(-rows // 16) * 16
    for saved in ("values", "codes"):
        model, autocast = converted(Siblings(), saved, weight_codes=weight_codes)
        x = inputs(rows, 64, dtype=dtype).requires_grad_()
        with autocast():
            model(x)
            found = Saved(model)
            with found.hooks():
                model(x)
        kept[saved] = found.bytes()
    copies = 1 if dtype == torch.bfloat16 else 3
    scale = 4
    of_weights = 64 * (64 + 32 + 32) + 3 * scale if weight_codes == "per_forward" else 0
    assert kept == {"values": copies * 2 * rows * 64 + of_weights, "codes": padded * 64 + scale + of_weights}
    assert len(encoded) == 1, "twice the same input, unchanged"


@pytest.mark.parametrize("saved", ["values", "codes"])
def test_compiled_siblings_keep_one_tensor_of_codes(saved):
    """The compiler finds that the three layers compute the same codes, and keeps codes in place of values."""
    model, autocast = converted(Siblings(), saved, weight_codes="per_gemm")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = Saved(model)
    with autocast(), found.hooks():
        compiled(inputs(64, 64).requires_grad_())
    kept = [(t.dtype, t.numel()) for t in found.held() if t.ndim]
    assert kept == [(torch.float8_e4m3fn, 64 * 64)]


@pytest.mark.parametrize("saved", ["values", "codes"])
def test_a_frozen_weight_keeps_nothing_of_its_input(saved):
    """As under LoRA, whose base layers do not train."""
    net = Siblings().requires_grad_(False)
    _, model = set_up(net, saved, weight_codes="per_gemm")
    x = inputs(16, 64).requires_grad_()
    model(x)
    found = Saved(net)
    with found.hooks():
        out = model(x)
    assert found.bytes() == 0
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("bf16_weights", [False, True])
def test_the_layers_of_a_block_that_gain(bf16_weights):
    """Input of query, key, value; of the output projection; of gate and up; of down: what each keeps.

    A norm of float32 weights returns float32, of which every layer keeps its own bf16 copy. Attention on CPU returns
    its heads one after the other; the output projection keeps a copy with all heads of a token together.
    """
    kept = {}
    for saved in ("values", "codes"):
        torch.manual_seed(0)
        net = models.Llama(SHAPE)
        options = {"master_weights": True} if bf16_weights else {}
        _, model = set_up(net, saved, weight_codes="per_gemm", **options)
        tokens = torch.zeros(2, SHAPE.sequence, dtype=torch.long)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            model(tokens, tokens)
            found = Saved(net)
            with found.hooks():
                model(tokens, tokens)
        kept[saved] = found
    hidden, ffn = SHAPE.hidden, SHAPE.ffn
    in_codes = hidden + hidden + hidden + ffn
    scales = 4 * 4
    copies = 1 + 1 + 1 if bf16_weights else 3 + 1 + 2
    in_values = 2 * (ffn + copies * hidden)
    in_float8 = [t for t in kept["codes"].held() if t.dtype == torch.float8_e4m3fn]
    assert sum(t.untyped_storage().nbytes() for t in in_float8) == SHAPE.layers * TOKENS * in_codes
    saving = SHAPE.layers * (TOKENS * (in_values - in_codes) - scales)
    assert kept["values"].bytes() - kept["codes"].bytes() == saving


def test_a_write_between_siblings_is_seen(encoded):
    def grow(x):
        with torch.no_grad():
            x.mul_(2)

    found = {}
    for saved in ("values", "codes"):
        model, autocast = converted(Siblings(grow), saved)
        with autocast():
            found[saved] = model(inputs(16, 64))
    assert torch.equal(found["codes"], found["values"])
    assert len(encoded) == 3


def test_other_memory_below_the_same_tensor_is_seen(encoded):
    def replace(x):
        x.data = x.data * 2

    model, _ = converted(Siblings(replace))
    model(inputs(16, 64))
    assert len(encoded) == 3


@pytest.fixture
def made(monkeypatch):
    """Weak references to the codes that were made."""
    found, encode = [], Scaled.encoded

    def noting(self, matrix, role):
        codes, scale = encode(self, matrix, role)
        if role == "input":
            found.append(weakref.ref(codes))
        return codes, scale

    monkeypatch.setattr(Scaled, "encoded", noting)
    return found


def alive(references):
    return [reference for reference in references if reference() is not None]


def test_codes_die_with_their_input_or_after_the_backward(made):
    model, autocast = converted(Siblings())
    x = inputs(16, 64).requires_grad_()
    with autocast():
        out = model(x)
        assert len(made) == len(alive(made)) == 1
        out.sum().backward()
        assert not alive(made), "the backward has read them, and the input lives"
        model(x)
        assert len(alive(made)) == 1, "until the input dies"
        del x, out
        gc.collect()
        assert not alive(made)


def test_without_gradients_nothing_is_kept_or_shared(made):
    _, model = set_up(Siblings())
    x = inputs(16, 64)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    assert len(made) == 6
    assert not alive(made)


def test_threads_share_nothing(encoded):
    model, _ = converted(Siblings())
    x = inputs(16, 64)
    model(x)
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    thread.join()
    model(x)
    assert len(encoded) == 2


@pytest.mark.parametrize("inside", [slice(0, 3), slice(1, 3)], ids=["all siblings", "all but the first"])
def test_a_checkpoint_that_keeps_casts_meets_the_same_operations_again(inside, encoded):
    """Codes from outside of the checkpoint, or from its forward, would let the recomputation skip operations."""
    found = {}
    for saved in ("values", "codes"):
        net, autocast = converted(Siblings(), saved, weight_codes="per_gemm")
        x = inputs(16, 64).bfloat16().requires_grad_()
        parts = list(net.parts)
        keep = selective(ATEN._to_copy.default, ATEN.max.default, ATEN.clamp.default)
        with autocast():
            before = [part(x) for part in parts[: inside.start]]
            out = keep(lambda x, parts: torch.cat([part(x) for part in parts], dim=-1), x, parts[inside])
        (torch.cat([*before, out], dim=-1).float() ** 2).sum().backward()
        found[saved] = [x.grad, *(p.grad for p in net.parameters())]
    assert all(map(torch.equal, *found.values()))
    assert len(encoded) == (2 if inside.start == 0 else 3), "once in the forward of the checkpoint, once again"


def test_differentiated_gradients_say_the_way_out():
    _, model = set_up(Siblings())
    x = inputs(16, 64).requires_grad_()
    with pytest.raises(RuntimeError, match=r"`create_graph=True` needs the values.*saved_inputs='values'"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    _, model = set_up(Siblings(), FP8TorchAO().saved_inputs)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_torch_func_is_refused_as_with_values():
    _, model = set_up(Siblings())
    with pytest.raises(RuntimeError, match=r"`torch.func` .* does not run through FP8Linear"):
        torch.func.grad(lambda x: model.module(x).sum())(inputs(16, 64))


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_scales_per_row_have_no_common_codes(recipe):
    with pytest.raises(ValueError, match="only one scale per input is the same in forward and backward"):
        FP8TorchAO(recipe, saved_inputs="codes")


def test_a_weight_that_is_cut_is_refused():
    net, _ = converted(Siblings())
    layer = net.parts[0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallelize_module(layer, dist.init_device_mesh("cpu", (1,)), ColwiseParallel())
        with pytest.raises(RuntimeError, match=r"tensor parallelism, .*\(64, 64\).*saved_inputs='values'"):
            layer(inputs(16, 64))
    finally:
        dist.destroy_process_group()


def test_copies_keep_codes_too(encoded):
    net, autocast = converted(Siblings())
    clone = copy.deepcopy(net)
    with autocast():
        assert torch.equal(clone(inputs(16, 64)), net(inputs(16, 64)))
    assert len(encoded) == 2
