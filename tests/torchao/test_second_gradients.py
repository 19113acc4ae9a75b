"""Gradients of gradients through FP8 layers, and what torch.func and torch.export say of them."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from lightning_lowprec import FP8TorchAO, Int8TorchAO
from tests.quality import expect_db, sqnr

NAMES = ("fp8-hybrid", "fp8-rowwise", "fp8-rowwise-gw-hp")


def layer(rows=16):
    torch.manual_seed(0)
    return nn.Linear(32, 48), torch.randn(rows, 32), torch.randn(rows, 48)


def penalty_gradients(model, x, v):
    """The gradient of |d (model(x) v) / dx|^2."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad((model(x) * v).sum(), x, create_graph=True)
    g.pow(2).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def in_fp8(model, precision, **options):
    plugin = {"plugins": FP8TorchAO("tensorwise", **options)} if options else {"precision": precision}
    return L.Fabric(accelerator="cpu", devices=1, **plugin).setup_module(model)


@pytest.mark.parametrize("rows", [16, 5])
@pytest.mark.parametrize("precision", NAMES)
def test_the_gradient_of_a_penalty_on_one_layer_is_exact(precision, rows):
    # g = v @ W does not depend on the FP8 output, so d |g|^2 / dW = 2 v^T g. Small integers are exact in bf16 up to 256
    linear, x, v = layer(rows)
    with torch.no_grad():
        linear.weight.mul_(16).round_()
    v = v.round().clamp(-1, 1)
    expected = 2 * v.t() @ (v @ linear.weight.detach())
    gradients = penalty_gradients(in_fp8(linear, precision), x, v)
    torch.testing.assert_close(gradients["_forward_module.weight"], expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("precision", NAMES)
def test_a_penalty_through_several_layers_is_near_float32(precision):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    _, x, _ = layer(64)
    v = torch.randn(64, 32)
    expected = penalty_gradients(make(), x, v)
    for name, gradient in penalty_gradients(in_fp8(make(), precision), x, v).items():
        if gradient is not None:  # the last bias has none
            expect_db(sqnr(expected[name.removeprefix("_forward_module.")], gradient), 20)


class Critic(L.LightningModule):
    """A WGAN's critic with a gradient penalty: the mean norm of its gradient goes to 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 16))
        self.penalties = []

    def training_step(self, batch):
        x = batch[0].requires_grad_()
        (g,) = torch.autograd.grad(self.net(x).float().sum(), x, create_graph=True)
        penalty = (g.float().norm(dim=1) - 1).pow(2).mean()
        self.penalties.append(penalty.item())
        return penalty

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("precision", NAMES)
def test_a_gradient_penalty_trains(precision):
    model = Critic()
    data = torch.utils.data.TensorDataset(torch.randn(640, 32, generator=torch.Generator().manual_seed(0)))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, precision=precision, max_epochs=1, **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    assert sum(model.penalties[-5:]) < 0.2 * sum(model.penalties[:5])


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.parametrize(
    ("name", "class_name", "plugin"),
    [("fp8-hybrid", "FP8Linear", FP8TorchAO), ("int8-mixed", "CodedLinear", Int8TorchAO)],
)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_says_the_way_out_which_works(transform, name, class_name, plugin):
    linear, x, _ = layer()
    with pytest.raises(RuntimeError, match=f"`torch.func` .* does not run through {class_name}.*`fp8_eval=False`"):
        TRANSFORMS[transform](in_fp8(linear, name).module, x)
    plain, _, _ = layer()
    model = L.Fabric(accelerator="cpu", devices=1, plugins=plugin(fp8_eval=False)).setup_module(linear).module.eval()
    torch.testing.assert_close(TRANSFORMS[transform](model, x), TRANSFORMS[transform](plain, x))


@pytest.mark.parametrize("precision", ["fp8-hybrid", "int8-mixed", "fp8-block", "msamp-o2"])
def test_forward_mode_says_the_way_out(precision):
    linear, x, _ = layer()
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)
    with pytest.raises(RuntimeError, match=r"forward mode .*keep="), forward_ad.dual_level():
        fabric.setup_module(linear)(forward_ad.make_dual(x, x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the layer's check of shapes
def test_export_says_the_way_out_which_works():
    linear, x, _ = layer()
    with pytest.raises(RuntimeError, match=r"`torch.export` .* cannot export FP8Linear.*fp8_eval=False"):
        torch.export.export(in_fp8(linear, "fp8-hybrid").module, (x,))
    plain, _, _ = layer()
    model = in_fp8(linear, "fp8-hybrid", fp8_eval=False).module.eval()
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), plain(x))
    torch.testing.assert_close(torch.jit.trace(model, x)(x), plain(x))
