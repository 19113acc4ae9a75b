"""The option `head` of every plugin, in Trainer and Fabric."""

from functools import cache, partial

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed
from tests.conversion.test_head import build
from tests.precision.weights_left import as_trained
from tests.toys import ON_CPU, Task, adamw, causal_loss, on_gpu

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
PLUGINS = {
    "bf16": partial(HalfMixed, "bf16"),
    "fp16-master": partial(HalfMixed, "fp16", master_weights=True),
    "torchao": FP8TorchAO,
    "msamp": partial(MSAMP, "O2"),
}


class Module(Task):
    def __init__(self):
        super().__init__(build(), causal_loss, lambda task: adamw(task, lr=1e-2))

    def train_dataloader(self):
        tokens = torch.randint(1, 300, (8, 12), generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(tokens, batch_size=2)


def fit(plugin, folder=None, epochs=2, ckpt_path=None):
    module = Module()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, **ON_CPU}
    trainer = L.Trainer(plugins=as_trained(plugin), max_epochs=epochs, default_root_dir=folder, **options)
    trainer.fit(module, ckpt_path=ckpt_path)
    return module, trainer


@cache
def losses_with_all_logits(name):
    return fit(PLUGINS[name](head="bf16"))[0].losses


@pytest.mark.slow("chunked-msamp", "chunked-fp16-master", "fp8-torchao")
@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize("head", ["chunked", "fp8"])
def test_a_run_with_accumulation_clipping_and_resume_follows_that_of_all_logits(name, head, tmp_path):
    plain = losses_with_all_logits(name)
    ours, _ = fit(PLUGINS[name](head=head))
    assert type(ours.net.lm_head).__name__ == "LossHead"
    assert ours.losses == pytest.approx(plain, rel=3e-3 if head == "chunked" else 1e-2)
    _, trainer = fit(PLUGINS[name](head=head), tmp_path, epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(PLUGINS[name](head=head), tmp_path, ckpt_path=tmp_path / "half.ckpt")
    for a, b in zip(resumed.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.detach().float(), b.detach().float())


def test_a_gpu_without_fp8_refuses_an_fp8_head(monkeypatch):
    plugin = HalfMixed("bf16", head="fp8")
    plugin.bind_device(on_gpu(monkeypatch, (8, 0)))
    with pytest.raises(RuntimeError, match=r"`head='fp8'` cannot run: GPU X.*Use `head='chunked'`"):
        plugin.convert_module(build())


def test_the_next_precision_and_the_end_of_a_run_take_the_head_back():
    module, _ = fit(HalfMixed("bf16", head="fp8"), epochs=1)
    with pytest.warns(UserWarning, match=r"1 layers of Module are those of `head='fp8'`.*plain"):
        L.Trainer(max_steps=1, **ON_CPU).fit(module)
    L.Trainer(plugins=HalfMixed("bf16"), max_steps=1, **ON_CPU).fit(module)
    assert type(module.net.lm_head) is nn.Linear
    assert type(module.net(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits) is torch.Tensor
    plain = Module()
    L.Trainer(plugins=HalfMixed("bf16", head="chunked"), max_steps=1, **ON_CPU).fit(plain)
    assert type(plain.net.lm_head) is nn.Linear
