"""Large products that autocast leaves in float32 are warned about once, by the name of their layer; nothing else is."""

import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lightning_lowprec  # noqa: F401  # registers the names
from lightning_lowprec import HalfMixed
from lightning_lowprec.precision.float32_products import Float32Products
from lightning_lowprec.precision.half_eval import HalfEval

TOKENS, WIDTH, INNER, EXPERTS = 32, 64, 128, 4
SHARE = 2 * WIDTH * INNER / (2 * WIDTH * INNER + 2 * WIDTH * WIDTH)
"""Of the FLOPs per token, two products of the experts and two linear layers."""


class Experts(nn.Module):
    """Stacked experts by somebody who does not use transformers."""

    def __init__(self, dtype=None, off=False):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 8)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 8)
        self.dtype, self.off = dtype, off

    def forward(self, x, ends):
        if self.off:
            with torch.autocast("cpu", enabled=False):
                return self.products(x, ends, torch.float32)
        return self.products(x, ends, self.dtype or self.w1.dtype)

    def products(self, x, ends, dtype):
        inner = F.grouped_mm(x.to(dtype), self.w1.to(dtype), offs=ends)
        return F.grouped_mm(F.silu(inner), self.w2.to(dtype), offs=ends)


class Mixture(nn.Module):
    def __init__(self, experts=None):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = experts or Experts()

    def forward(self, x):
        return self.last(self.experts(self.first(x), torch.arange(8, 33, 8, dtype=torch.int32)))


class Checkpointed(Mixture):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Mixture()

    def training_step(self, batch):
        return self.model(batch).square().mean()

    def validation_step(self, batch):
        self.model(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(model, precision, steps=4):
    """The warnings of float32 products in some steps, and the plugin."""
    fabric = L.Fabric(accelerator="cpu", **({"precision": precision} if isinstance(precision, str) else precision))
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            fabric.backward(wrapped(torch.randn(TOKENS, WIDTH)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return of_products(caught), fabric.strategy.precision


def of_products(caught):
    return [str(warning.message) for warning in caught if "multiplies in float32" in str(warning.message)]


@pytest.mark.parametrize("name", ["half-auto", "fp16-mixed", "fp8-rowwise", "fp8-tensorwise", "msamp-o2"])
def test_warns_once_of_the_layer_by_name(name):
    precision = {"plugins": HalfMixed("fp16")} if name == "fp16-mixed" else name
    (message,), plugin = train(Mixture(), precision)
    assert f"'{plugin.precision}'" in message
    assert "'experts' multiplies in float32, by `aten._grouped_mm` ([32, 64] x [4, 64, 128]) and 1 more" in message
    assert f"{SHARE:.0%} of the matrix FLOPs" in message
    assert "autocast(device_type, enabled=False)" in message
    assert plugin.modules.watched_forwards == 0


@pytest.mark.parametrize(
    "experts", [Experts(dtype=torch.bfloat16), Experts(off=True)], ids=["cast by the model", "float32 by the model"]
)
@pytest.mark.parametrize("name", ["half-auto", "fp8-rowwise"])
def test_the_dtype_that_the_model_chose(name, experts):
    assert train(Mixture(experts), name)[0] == []


@pytest.mark.parametrize("precision", ["bf16-master", {"plugins": HalfEval("bf16")}], ids=["bf16-master", "bf16-eval"])
def test_without_float32_weights_or_without_autocast(precision):
    assert train(Mixture(), precision)[0] == []


def test_a_small_share_is_not_worth_a_warning():
    """A gate: 2 products of [64, 4] beside 2 of [64, 1024] are 0.4 % of the FLOPs."""
    experts = Experts()
    experts.w1, experts.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4)), nn.Parameter(torch.randn(EXPERTS, 4, WIDTH))
    model = Mixture(experts)
    model.last = nn.Sequential(nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH))
    assert train(model, "half-auto")[0] == []
    model.last = nn.Linear(WIDTH, WIDTH)
    assert len(train(model, "half-auto")[0]) == 1


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.conv, self.up = nn.Linear(64, 96), nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(6, 2, 3, stride=2)

    def forward(self, x, image, query, key, value):
        attention = F.scaled_dot_product_attention(query, key, value)
        batched = torch.baddbmm(query[0], query[0], key[0].mT @ value[0])
        return [self.linear(x), self.linear(x[None].mT.mT), self.up(self.conv(image)), attention, batched]


def test_the_flops_are_those_of_torchs_counter():
    model, shape = Everything(), (2, 4, 16, 16)
    inputs = (torch.randn(32, 64), torch.randn(2, 4, 12, 12), *(torch.randn(shape) for _ in range(3)))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        Float32Products([model]) as ours,
        FlopCounterMode(display=False) as torchs,
    ):
        model(*inputs)
    attention = 4 * 2 * 4 * 16 * 16 * 16  # torch's counter does not know the kernel for CPU
    assert ours.total == torchs.get_total_flops() + attention
    assert ours.message() is None


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_run_under_the_watch(layout):
    layer = nn.Linear(64, 96)
    nested = torch.nested.nested_tensor([torch.randn(3, 64), torch.randn(5, 64)], layout=layout)
    with torch.autocast("cpu", dtype=torch.bfloat16), Float32Products([layer]) as products:
        layer(nested)
    assert products.message() is None


def test_the_first_step_only_and_equal_gradients():
    """The watch changes no value, and ends."""
    gradients = []
    for watched in (2, 0):
        torch.manual_seed(0)
        model = Mixture(Experts(dtype=torch.bfloat16))
        fabric = L.Fabric(precision="half-auto", accelerator="cpu")
        wrapped = fabric.setup(model)
        plugin = fabric.strategy.precision
        assert plugin.modules.watched_forwards == 2
        plugin.modules.watched_forwards = watched
        wrapped.eval()
        with torch.no_grad():
            wrapped(torch.randn(TOKENS, WIDTH))
        assert plugin.modules.watched_forwards == watched, "evaluation is not watched"
        fabric.backward(wrapped(torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH)).square().mean())
        gradients.append([p.grad for p in model.parameters()])
        assert plugin.modules.watched_forwards == max(watched - 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:.*(many workers|isinstance.treespec|val_dataloader).*")
def test_in_the_trainer(tmp_path):
    trainer = L.Trainer(
        precision="half-auto", accelerator="cpu", max_steps=4, default_root_dir=tmp_path, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(RandomDataset(WIDTH, 4 * TOKENS), batch_size=TOKENS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(), data, data)
    (message,) = of_products(caught)
    assert "'model.experts' multiplies in float32" in message


def test_checkpointed():
    (message,), _ = train(Checkpointed(), "half-auto")
    assert "'experts'" in message


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.relu(self.linear(x))


@pytest.mark.parametrize("watched", [True, False])
def test_compiled_parts_compile_once_and_the_rest_is_seen(watched):
    """With the watch and without it, a compiled block compiles once for all steps."""
    model, counter = Mixture(), CompileCounter()
    model.first = Block()
    model.first.compile(backend=counter, fullgraph=True)
    fabric = L.Fabric(precision="half-auto", accelerator="cpu")
    wrapped = fabric.setup(model)
    fabric.strategy.precision.modules.watched_forwards *= watched
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            fabric.backward(wrapped(torch.randn(TOKENS, WIDTH)).square().mean())
    assert len(of_products(caught)) == int(watched)
    assert counter.frame_count == 1


def test_the_chunked_loss_of_torch():
    """Autocast does not know torch's chunked loss; without ``options`` it multiplies in bf16."""
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions()

    class Head(nn.Linear):
        def forward(self, x):
            target = torch.zeros(len(x), dtype=torch.long)
            return F.linear_cross_entropy(x, self.weight, target, options=self.options)

    model = Head(WIDTH, WIDTH)
    model.options = options
    (message,), _ = train(model, "half-auto")
    assert "'Head' multiplies in float32, by `torch_nn._linear_cross_entropy_batch_chunked`" in message
    assert "100% of the matrix FLOPs" in message
    model.options = None
    assert train(model, "half-auto")[0] == []
