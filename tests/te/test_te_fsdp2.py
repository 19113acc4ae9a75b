"""Layers of Transformer Engine, sharded: two gloo processes, real and meta weights, up to the first kernel."""

import lightning as L
import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.fsdp2.ranks import run
from tests.toys import Stack, gelu_block

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]


class Net(Stack):
    def __init__(self):
        super().__init__(gelu_block, head=("lm_head", 32, 16))


def full(model) -> dict:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def work(rank, folder):
    from lightning_lowprec import FP8TE, FabricFSDP2Strategy
    from lightning_lowprec.te.delayed_scaling import restore_scales
    from lightning_lowprec.te.layer import te_linears
    from tests.te.hopper import pretend

    pretend(pytest.MonkeyPatch())
    found = {}
    for device in ("cpu", "meta"):
        strategy = FabricFSDP2Strategy(activation_checkpointing=True)
        plugin = FP8TE("delayed", amax_history_len=4)
        fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugin)
        fabric.launch()
        with torch.device(device):
            torch.manual_seed(0)
            model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        wrapped, optimizer = fabric.setup(model, optimizer)
        entry = found[device] = {
            "layers": len(te_linears(model)),
            "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
            "groups": sum(isinstance(m, FSDPModule) for m in model.modules()),
            "sees fsdp2": all(layer.is_fsdp2 for layer in te_linears(model)),
            "recomputes by": {m.forward.args[0].__module__ for m in model.blocks},
            "held": {id(p) for group in optimizer.param_groups for p in group["params"]}
            == {id(p) for p in model.parameters()},
            "keys": list(full(model)),
        }
        if device == "cpu":
            for number, layer in enumerate(te_linears(model)):
                state = {
                    f"{mode}.{name}": torch.full(shape, float(number))
                    for mode, n in (("forward", 3), ("backward", 2))
                    for name, shape in (("scale", (n,)), ("amax_history", (4, n)))
                }
                restore_scales([("", layer)], {"": state}, plugin.recipe)
            fabric.save(folder / "some.ckpt", {"model": wrapped, "optimizer": optimizer, "precision": plugin})
            saved = full(model)
        else:
            fabric.load(folder / "some.ckpt", {"model": wrapped, "optimizer": optimizer, "precision": plugin})
            loaded = full(model)  # every rank: rank 0 gets it
            entry["weights"] = loaded.keys() == saved.keys() and all(torch.equal(loaded[k], saved[k]) for k in saved)
            entry["scales"] = [float(s["forward.scale"][0]) for s in plugin.state_dict()["scales"].values()]
        try:
            wrapped(torch.randn(2, 16, 32))
        except RuntimeError as error:
            entry["error"] = str(error)
    return found


def test_sharded(tmp_path):
    found = run(work, 2, tmp_path, tmp_path)
    for rank in found:
        for entry in rank.values():
            assert (entry["layers"], entry["groups"]) == (4, 3)
            assert entry["sharded"]
            assert entry["sees fsdp2"]
            assert entry["held"]
            assert entry["recomputes by"] == {"transformer_engine.pytorch.distributed"}
            # its checkpoint asks CUDA for the state of its generator; the second is what CUDA says in a forked process
            assert any(words in entry["error"] for words in ("no NVIDIA driver", "Cannot re-initialize CUDA"))
        assert rank["meta"]["weights"]
    for entry in found[0].values():  # rank 0 has the whole model
        assert entry["keys"] == list(Net().state_dict())
        assert rank["meta"]["scales"] == [0.0, 1.0, 2.0, 3.0]
