"""A monitor changes no weight, costs nothing between samplings, and sees every layer in every kind of run."""

import json
import math
import pickle
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed
from lightning_lowprec.callbacks import NumericsMonitor
from lightning_lowprec.tools.cli import main
from tests.serving.models import mixtral
from tests.toys import ON_CPU, Block, Task, causal_loss

WIDTH = 64
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(many workers|isinstance.treespec|useless when run on CPU|ended before the epoch ended|in eval mode).*"
)


def keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "none": None,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep_products)
    ),
}


def relu_block():
    return Block(WIDTH, norm=False, activation=nn.functional.relu_)


class Net(L.LightningModule):
    def __init__(self, checkpointing="none", compile=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(relu_block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)
        self.checkpoint = CHECKPOINTS[checkpointing]
        for block in self.blocks if compile else ():
            block.compile(backend=compile)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.checkpoint is None else self.checkpoint(block, x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        return self(batch.requires_grad_()).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(batches, rows):
    generator = torch.Generator().manual_seed(2)
    return DataLoader([torch.randn(WIDTH, generator=generator) for _ in range(rows * batches)], batch_size=rows)


def fit(tmp_path, monitor, net=None, plugin=None, steps=4, micro=1, rows=32, ckpt=None, **options):
    net = Net() if net is None else net
    trainer = L.Trainer(
        max_steps=steps, accumulate_grad_batches=micro, default_root_dir=tmp_path, devices=1,
        plugins=FP8TorchAO() if plugin is None else plugin, callbacks=[] if monitor is None else [monitor],
        **{**ON_CPU, **options},
    )  # fmt: skip
    trainer.fit(net, data(4 * micro, rows), ckpt_path=ckpt, weights_only=None if ckpt is None else True)
    return net, trainer


def lines_of(folder):
    return [json.loads(line) for line in (folder / "numerics.jsonl").read_text().splitlines()]


NUMBERS = ("amax", "underflow", "scale")
LAYERS = {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}
RUNS = {
    **{f"checkpointing: {kind}": {"net": partial(Net, kind)} for kind in CHECKPOINTS},
    "accumulation": {"micro": 3},
    "padded": {"rows": 9},
    "msamp": {"plugin": lambda: MSAMP("O2")},
    "masters": {"plugin": lambda: FP8TorchAO(master_weights=True)},
    "loss scaling": {"plugin": lambda: FP8TorchAO(base="fp16")},
    "ddp": {"strategy": "ddp"},
    "compiled": {"net": partial(Net, compile="aot_eager")},
    "a compiled module": {"net": lambda: torch.compile(Net(), backend="aot_eager")},
    "compiled and recomputed": {"net": partial(Net, "not reentrant", compile="aot_eager")},
}


@pytest.mark.slow("compiled", "a compiled module", "compiled and recomputed")
@pytest.mark.parametrize("run", RUNS)
def test_a_monitor_changes_no_weight_and_sees_every_layer(run, tmp_path):
    torch._dynamo.reset()
    options = RUNS[run]
    monitor = NumericsMonitor(every=2)
    made = [
        fit(tmp_path, each, **{k: v() if callable(v) else v for k, v in options.items()})[0] for each in (None, monitor)
    ]
    assert all(torch.equal(*pair) for pair in zip(*(net.state_dict().values() for net in made), strict=True))
    assert {r.fqn for r in monitor.readings} == LAYERS
    assert [r.tensor for r in monitor.readings] == ["input", "weight", "gradient"] * 4
    assert all(r.step == 2 and 0 < r.amax < math.inf and 0 <= r.underflow < 1 for r in monitor.readings)
    assert all(15 < r.output_db < 60 for r in monitor.readings)
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 2]
    assert not any(module._forward_hooks for module in made[1].modules())


def test_numbers_reach_loggers_the_file_and_the_attribute(tmp_path, monkeypatch):
    lines = []
    noting = staticmethod(lambda metrics, step: lines.append((step, metrics, monitor.readings)))
    monkeypatch.setattr(DummyLogger, "log_metrics", noting)
    monitor = NumericsMonitor(every=3, folder=tmp_path / "run", log="layers")
    fit(tmp_path, monitor, logger=DummyLogger(), log_every_n_steps=1)
    assert [step for step, *_ in lines] == [0, 3]
    names = {f"{tensor}/{n}" for tensor in ("input", "weight", "gradient") for n in NUMBERS} | {"output_db"}
    kinds = {f"{tensor}/{n}" for tensor in ("input", "weight", "gradient") for n in NUMBERS[:2]} | {"output_db"}
    summary = {f"lowprec/{kind}/{name}" for kind in ("worst", "mean") for name in kinds}
    assert lines[0][1].keys() == {f"lowprec/{fqn}/{name}" for fqn in LAYERS for name in names} | summary
    kept = lines_of(tmp_path / "run")
    assert [line["step"] for line in kept] == [0, 3]
    for (step, metrics, readings), line in zip(lines, kept, strict=True):
        for reading in readings:
            assert reading.step == step
            stored = line["layers"][reading.fqn]
            assert stored[reading.tensor] == pytest.approx([getattr(reading, name) for name in NUMBERS], rel=1e-4)
            assert stored["output_db"] == pytest.approx(reading.output_db, rel=1e-4)
            assert metrics[f"lowprec/{reading.fqn}/{reading.tensor}/scale"] == reading.scale
        underflows = [reading.underflow for reading in readings if reading.tensor == "gradient"]
        assert len(underflows) == len(LAYERS)
        assert metrics["lowprec/worst/gradient/underflow"] == pytest.approx(max(underflows))
        assert metrics["lowprec/mean/gradient/underflow"] == pytest.approx(sum(underflows) / len(underflows))
        decibels = [reading.output_db for reading in readings if reading.tensor == "input"]
        assert metrics["lowprec/worst/output_db"] == pytest.approx(min(decibels))
        assert metrics["lowprec/mean/output_db"] == pytest.approx(sum(decibels) / len(decibels))
    for log, expected in ((True, summary), (False, set())):
        lines.clear()
        fit(tmp_path, monitor := NumericsMonitor(every=3, log=log), logger=DummyLogger(), log_every_n_steps=1)
        assert {n for _, metrics, _ in lines for n in metrics if n.startswith("lowprec/")} == expected


def test_arguments_that_are_not_valid_raise_and_a_monitor_without_layers_says_so_once(tmp_path, caplog):
    for argument, value, allowed in (
        ("every", 0, "an integer of at least 1"),
        ("every", True, "an integer of at least 1"),
        ("rows", 16, "a number above 0 and at most 1"),
        ("log", "yes", "True, False or 'layers'"),
    ):
        with pytest.raises(ValueError, match=f"`{argument}={value!r}` is not valid; expected {allowed}"):
            NumericsMonitor(**{argument: value})
    caplog.set_level("INFO")
    fit(tmp_path, NumericsMonitor(every=1), plugin=HalfMixed("bf16"))
    assert [record.message for record in caplog.records if "looked at" in record.message] == [
        "NumericsMonitor: 0 layers are looked at."
    ]


class TwoSteps(Net):
    """Two optimizers, and so two steps of the Trainer's count, in each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 1e-3) for part in (self.blocks, self.head)]


@pytest.mark.parametrize(
    ("net", "micro", "every", "steps", "sampled"),
    [(Net, 3, 2, 4, [0, 2]), (TwoSteps, 1, 3, 8, [0, 4, 6])],
    ids=["accumulation", "two steps a batch"],
)
def test_each_sampling_is_one_line_and_a_step_within_a_batch_is_sampled_at_the_next(
    net, micro, every, steps, sampled, tmp_path
):
    fit(tmp_path, NumericsMonitor(every), net=net(), micro=micro, steps=steps)
    assert [json.loads(line)["step"] for line in (tmp_path / "numerics.jsonl").read_text().splitlines()] == sampled


def test_a_resumed_run_samples_the_same_steps_and_continues_its_file(tmp_path, capsys):
    def steps():
        assert main(["monitor", str(tmp_path), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["steps"]

    for every, total, ckpt, expected in ((1, 3, None, [0, 1, 2]), (2, 5, tmp_path / "last.ckpt", [0, 1, 2, 4])):
        monitor = NumericsMonitor(every, folder=tmp_path)
        _, trainer = fit(tmp_path, monitor, steps=total, ckpt=ckpt)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        assert steps() == expected
    with (tmp_path / "numerics.jsonl").open("a") as file:
        file.write('{"step": 5, "la')  # killed while it wrote
    assert steps() == [0, 1, 2, 4]
    fit(tmp_path, NumericsMonitor(every=2), steps=2)
    assert steps() == [0]  # a new run in the same folder


@pytest.mark.slow_but("set-up model")
@pytest.mark.parametrize("how", ["model", "set-up model", "function"])
def test_every_way_to_compile_is_seen(how):
    """Of a compiled function that calls the model, the monitor learns by its first, empty sampling."""
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager")
    model, monitor = looked_at(compiled(Net()) if how == "model" else Net(), every=2)
    model = compiled(model) if how == "set-up model" else model
    call = compiled(lambda x: model(x).sum()) if how == "function" else lambda x: model(x).sum()
    for step in range(4):
        monitor.step(model, step)
        call(torch.randn(16, WIDTH)).backward()
    monitor.finish()
    assert {r.fqn for r in monitor.readings} == LAYERS
    assert {r.tensor for r in monitor.readings} == {"input", "weight", "gradient"}


def looked_at(net, every=1):
    model, monitor = L.Fabric(accelerator="cpu", plugins=FP8TorchAO()).setup(net), NumericsMonitor(every=every)
    monitor.step(model, 0)
    return model, monitor


def test_a_layer_that_does_not_run_has_no_reading(caplog):
    net = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("used", "dead", "frozen")} | {"not": relu_block()})
    net["frozen"].requires_grad_(False)
    net["conv"] = Conv1D(WIDTH, WIDTH)
    net.forward = lambda x: net["used"](input=net["frozen"](x)) + net["conv"](x) + 0 * net["dead"](x)
    model, monitor = looked_at(net)
    x = torch.randn(16, WIDTH).bfloat16().float()
    with torch.no_grad():
        model.eval()(1000 * x)
    for factor, batch in enumerate((x[:0], x, 1000 * x)):  # nor does evaluation, an empty or a second micro-batch count
        model.train()
        net["frozen"].eval()
        (factor * model(batch)).sum().backward()
    readings = {(r.fqn, r.tensor): r for r in monitor.finish()}
    assert [*readings] == [
        *((name, tensor) for name in ("used", "dead") for tensor in ("input", "weight", "gradient")),
        *(("frozen", tensor) for tensor in ("input", "weight")),
    ]
    assert readings["frozen", "input"].amax == x.abs().max()
    assert [readings[name, "gradient"].amax for name in ("used", "dead")] == [1, 0]
    assert monitor.finish() == [*readings.values()], "nothing is read twice"
    why = "it was not called, or in compiled code alone"
    assert monitor.missing == dict.fromkeys(("not.up", "not.down"), why) | {"conv": "a Conv1D"}
    assert caplog.messages[-1].endswith(
        f": 3 layers are looked at; 2 not (not.up, ...: {why}); 1 not (conv: a Conv1D)."
    )
    monitor.step(model, 0)
    assert (monitor.finish(), len(monitor.missing)) == ([], 6), "one that has finished begins anew"


def test_the_share_of_an_infinite_tensor_is_not_known_and_another_model_is_looked_at_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, monitor = looked_at(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    assert len(pickle.dumps(monitor)) < 2000, "without the model"
    model(torch.full((16, WIDTH), math.inf)).sum().backward()
    other, idle = looked_at(nn.ModuleDict({"other": nn.Linear(WIDTH, WIDTH), "not": nn.Linear(WIDTH, WIDTH)}))
    idle.finish()
    monitor.step(other, 1)
    reading = next(r for r in monitor.readings if r.tensor == "input")
    assert math.isnan(reading.amax)
    assert (reading.underflow, reading.scale) == (None, None)
    for step, seen in ((5, ["other"]), (2, ["not", "other"]), (3, ["other"])):  # goes back to a checkpoint of step 2
        for name in seen:
            other.module[name](torch.randn(16, WIDTH)).sum().backward()
        monitor.step(other.module, step)
        assert sorted({r.fqn for r in monitor.readings}) == seen
        assert sorted([*seen, *monitor.missing]) == ["not", "other"]
    monitor.finish()
    assert list(tmp_path.iterdir()) == [], "Fabric has no folder"
    assert not any(module._forward_hooks for module in (*model.modules(), *other.modules()))


def test_the_step_of_an_optimizer_is_compiled_while_a_monitor_looks(tmp_path):
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append("compiled") or graph.forward(*args)

    class Doubling(torch.optim.SGD):
        step_of = staticmethod(torch.compile(lambda p: p * 2, backend=backend))

        def step(self, closure=None):
            if closure is not None:
                closure()
            return self.step_of(self.param_groups[0]["params"][0].detach())

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    optimizer = Doubling(net.parameters(), lr=1.0)
    optimizer.step()
    _, monitor = looked_at(torch.compile(net, backend="eager"))
    optimizer.step()
    optimizer.step(lambda: None)  # which might call the model
    optimizer.step_of(net[0].weight.detach())  # as a forward would
    monitor.finish()
    assert calls == ["compiled"] * 2
    task = Task(torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager"))
    task.optimizer = lambda task: Doubling(task.parameters(), lr=1.0)
    fit(tmp_path, NumericsMonitor(every=1), net=task, steps=3)
    assert calls == ["compiled"] * 5


def test_a_layer_that_cannot_be_looked_at_is_named_with_the_reason(tmp_path):
    task = Task(mixtral(), lambda net, batch: causal_loss(net, batch[:, :16].abs().long() % 32))
    monitor, high = NumericsMonitor(), {"recipe": "rowwise_with_gw_hp", "forward": "bf16", "grad_input": "bf16"}
    task.net.model.layers[0].self_attn.k_proj.eval()
    recipe = {"*.q_proj": high, "*.v_proj": {"forward": "bf16", "grad_weight": "bf16"}, "*": {"grad_input": "bf16"}}
    fit(tmp_path, monitor, net=task, steps=1, plugin=FP8TorchAO(recipe, fp8_eval=False))
    reasons = {"experts": "its products are inside of the module", "q_proj": "runs in high precision"}
    reasons["k_proj"] = "evaluation runs in high precision"
    assert {fqn.rpartition(".")[2]: why for fqn, why in monitor.missing.items()} == reasons
    readings = {(r.fqn.rpartition(".")[2], r.tensor): r.underflow for r in monitor.readings}
    assert {name for name, _ in readings} == {"v_proj", "o_proj"}
    assert [place for place, underflow in readings.items() if underflow is None] == [("v_proj", "input")]


def test_a_checkpoint_says_which_layers_ran_in_bf16(tmp_path):
    """A version that moved bad layers to bf16 in mid-run has saved their names."""
    path = tmp_path / "old.ckpt"
    _, trainer = fit(tmp_path, monitor := NumericsMonitor(every=1, log=False))
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    saved["callbacks"][monitor.state_key] = {"bad": {"up": 0, "down": 1}, "demoted": {"up": "bf16"}}
    torch.save(saved, path)
    with pytest.warns(UserWarning, match=r"runs? in bf16. To go on so, resume with `FP8TorchAO\(keep=\['up'\]\)`"):
        fit(tmp_path, NumericsMonitor(every=1, log=False), ckpt=path)


def test_the_mean_of_the_output_counts_a_layer_with_two_readings_as_one_with_three(tmp_path):
    class Finetuned(Net):
        def training_step(self, batch, batch_idx):  # no gradient reaches the frozen layers below
            return self(batch).float().square().mean()

    net, monitor = Finetuned(), NumericsMonitor(every=1, log="layers")
    net.blocks[0].requires_grad_(False)
    _, trainer = fit(tmp_path, monitor, net, steps=1)
    decibels = {reading.fqn: reading.output_db for reading in monitor.readings}
    assert [r.tensor for r in monitor.readings] == ["input", "weight"] * 2 + ["input", "weight", "gradient"] * 2
    assert decibels.keys() == LAYERS
    assert trainer.callback_metrics["lowprec/mean/output_db"].item() == pytest.approx(sum(decibels.values()) / 4)
    net.blocks[1].register_forward_pre_hook(lambda block, args: args[0] * math.inf)  # behind a finite one
    _, trainer = fit(tmp_path, monitor, net, steps=1)
    assert trainer.callback_metrics["lowprec/worst/input/amax"].isnan(), "nothing is worse"
    net.training_step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, monitor, net)
    assert not any(module._forward_hooks for module in net.modules())
