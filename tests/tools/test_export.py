"""`lowprec export`: plain weights from what Trainer, Fabric and torch write under any precision."""

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_lowprec.tools.cli import main


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Net()

    def training_step(self, batch, batch_idx):
        return self.model(batch).float().logsumexp(-1).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def trainer_checkpoint(tmp_path, precision):
    loader = torch.utils.data.DataLoader(torch.zeros(8, 4, dtype=torch.long), batch_size=4)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module, trainer = Module(), L.Trainer(precision=precision, accelerator="cpu", max_epochs=1, **quiet)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "trainer.ckpt")
    return module.model, tmp_path / "trainer.ckpt", ["--strip-prefix=model."]


def fabric_checkpoint(tmp_path, precision):
    fabric = L.Fabric(precision=precision, accelerator="cpu")
    net = Net()
    wrapped, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    state = {"model": wrapped, "optimizer": optimizer, "precision": fabric.strategy.precision}
    fabric.save(tmp_path / "fabric.ckpt", state)
    return net, tmp_path / "fabric.ckpt", []


@pytest.mark.parametrize("write", [trainer_checkpoint, fabric_checkpoint])
@pytest.mark.parametrize("precision", ["fp8-hybrid", "half-auto"])
@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
@pytest.mark.parametrize(("dtype", "expected"), [("keep", torch.float32), ("bf16", torch.bfloat16)])
def test_the_weights_and_nothing_else(tmp_path, capsys, write, precision, name, dtype, expected):
    net, checkpoint, more = write(tmp_path, precision)
    out = tmp_path / name
    assert main(["export", str(checkpoint), str(out), f"--dtype={dtype}", *more]) == 0
    assert "wrote 5 tensors" in capsys.readouterr().out
    weights = load_file(out) if name.endswith("safetensors") else torch.load(out, weights_only=True)
    assert list(weights) == list(net.state_dict()) or set(weights) == set(net.state_dict())
    for key, value in net.state_dict().items():
        want = value.to(expected) if value.is_floating_point() else value
        assert weights[key].dtype is want.dtype
        assert torch.equal(weights[key], want)
    Net().to(expected).load_state_dict(weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([checkpoint.name, name]), "nothing half written is left"


def test_safetensors_in(tmp_path):
    _, checkpoint, more = fabric_checkpoint(tmp_path, "fp8-hybrid")
    main(["export", str(checkpoint), str(tmp_path / "a.safetensors"), *more])
    assert main(["export", str(tmp_path / "a.safetensors"), str(tmp_path / "b.pt"), "--dtype=fp16"]) == 0
    assert torch.load(tmp_path / "b.pt", weights_only=True)["body.weight"].dtype is torch.float16


def test_bad_input(tmp_path, capsys):
    _, checkpoint, _ = fabric_checkpoint(tmp_path, "half-auto")
    out = str(tmp_path / "out.pt")
    assert main(["export", str(tmp_path / "gone.ckpt"), out]) == 2
    assert "gone.ckpt'` is not a file" in capsys.readouterr().err
    assert main(["export", str(checkpoint), out, "--key=ema"]) == 2
    assert "holds no weights under 'ema'; it has: 'model', 'optimizer', 'precision'" in capsys.readouterr().err
    assert main(["export", str(checkpoint), out, "--strip-prefix=net."]) == 2
    assert "`strip_prefix='net.'` is not at the start of" in capsys.readouterr().err
    torch.save([1, 2], tmp_path / "list.pt")
    assert main(["export", str(tmp_path / "list.pt"), out]) == 2
    assert "it has: list" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()
