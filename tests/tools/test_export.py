"""`lowprec export`: plain weights from what Trainer, Fabric and torch write under any precision."""

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_lowprec.tools.cli import main
from tests.toys import ON_CPU, Task


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


def trainer_checkpoint(tmp_path, precision):
    loader = torch.utils.data.DataLoader(torch.zeros(8, 4, dtype=torch.long), batch_size=4)
    module = Task(Net(), loss=lambda net, batch: net(batch).float().logsumexp(-1).mean())
    trainer = L.Trainer(precision=precision, max_epochs=1, **ON_CPU)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "trainer.ckpt")
    return module.net, tmp_path / "trainer.ckpt", ["--strip-prefix=net."]


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
    assert set(weights) == set(net.state_dict())
    for key, value in net.state_dict().items():
        want = value.to(expected) if value.is_floating_point() else value
        assert weights[key].dtype is want.dtype
        assert torch.equal(weights[key], want)
    Net().to(expected).load_state_dict(weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([checkpoint.name, name]), "nothing half written is left"


def test_bad_input(tmp_path, capsys):
    _, checkpoint, _ = fabric_checkpoint(tmp_path, "half-auto")
    torch.save([1, 2], tmp_path / "list.pt")
    for source, words, message in (
        (tmp_path / "gone.ckpt", ["out.pt"], "gone.ckpt'` is not a file"),
        (checkpoint, ["out.pt", "--key=ema"], "no weights under 'ema'; it has: 'model', 'optimizer', 'precision'"),
        (checkpoint, ["out.pt", "--strip-prefix=net."], "`strip_prefix='net.'` is not at the start of"),
        (tmp_path / "list.pt", ["out.pt"], "it has: list"),
        (checkpoint, ["gone/out.pt"], "expected a file in a folder that exists"),
        (tmp_path, ["out.pt"], "is a folder; expected a file. Load a sharded checkpoint with `strategy='fsdp2'`"),
    ):
        out, *options = words
        assert main(["export", str(source), str(tmp_path / out), *options]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


def test_the_checkpoint_is_never_the_target_and_other_files_need_force(tmp_path, capsys):
    _, checkpoint, _ = fabric_checkpoint(tmp_path, "half-auto")
    before = checkpoint.read_bytes()
    (tmp_path / "link.ckpt").symlink_to(checkpoint)
    for out in (checkpoint, tmp_path / "link.ckpt", tmp_path / "." / checkpoint.name):
        assert main(["export", str(checkpoint), str(out), "--force"]) == 2
        assert "is the checkpoint itself" in capsys.readouterr().err
    assert checkpoint.read_bytes() == before
    target = tmp_path / "other.pt"
    target.write_text("mine")
    assert main(["export", str(checkpoint), str(target)]) == 2
    assert "exists; expected a new file. `--force` replaces the file." in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main(["export", str(checkpoint), str(target), "--force"]) == 0
    assert "body.weight" in torch.load(target, weights_only=True)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, capsys):
    torch.save({"a.weight": torch.zeros(2, 2)}, tmp_path / "a.pt")
    for name in ("out.pt", "out.safetensors"):
        (tmp_path / f".{name}.partial").mkdir()  # stands in the way of the new file
        (tmp_path / f".{name}.partial" / "something").write_text("")
        assert main(["export", str(tmp_path / "a.pt"), str(tmp_path / name)]) == 2
        assert f"{str(tmp_path / name)!r} was not written (" in capsys.readouterr().err
        assert not (tmp_path / name).exists()
