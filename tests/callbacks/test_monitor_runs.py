"""A monitor changes no weight, costs nothing between samplings, and sees every layer in every kind of run."""

import json
import math
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed
from lightning_lowprec.callbacks import NumericsMonitor
from lightning_lowprec.callbacks.monitor import PausedCompiler
from lightning_lowprec.callbacks.readings import FILE, read

WIDTH = 64
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(many workers|isinstance.treespec|useless when run on CPU|ended before the epoch ended).*"
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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.relu_(self.up(x)))


class Net(L.LightningModule):
    def __init__(self, checkpointing="none", compile=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
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


class Seen(Logger):
    """Keeps what a Trainer logs."""

    name, version = "seen", 0

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs): ...


def data(batches, rows):
    generator = torch.Generator().manual_seed(2)
    return DataLoader([torch.randn(WIDTH, generator=generator) for _ in range(rows * batches)], batch_size=rows)


def fit(tmp_path, monitor, net=None, plugin=None, steps=4, micro=1, rows=32, ckpt=None, **options):
    """The module after training, and its Trainer."""
    net = Net() if net is None else net
    options = {"logger": False, "enable_checkpointing": False, **options}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, accumulate_grad_batches=micro, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, plugins=FP8TorchAO() if plugin is None else plugin,
        callbacks=[] if monitor is None else [monitor], **options,
    )  # fmt: skip
    trainer.fit(net, data(4 * micro, rows), ckpt_path=ckpt, weights_only=None if ckpt is None else True)
    return net, trainer


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
    "compiled and recomputed": {"net": partial(Net, "not reentrant", compile="aot_eager")},
}


@pytest.mark.slow("compiled", "compiled and recomputed")
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
    assert list(read(tmp_path / FILE)) == [0, 2]
    assert not any(module._forward_hooks for module in made[1].modules())


def test_numbers_reach_loggers_the_file_and_the_attribute(tmp_path):
    given = []

    class Keeps(Seen):
        def log_metrics(self, metrics, step=None):
            super().log_metrics(metrics, step)
            given.append(monitor.readings)

    logger, monitor = Keeps(), NumericsMonitor(every=3, folder=tmp_path / "run", log="layers")
    fit(tmp_path, monitor, logger=logger, log_every_n_steps=1)
    assert [step for step, _ in logger.lines] == [0, 3]
    names = {f"{tensor}/{n}" for tensor in ("input", "weight", "gradient") for n in NUMBERS} | {"output_db"}
    kinds = {f"{tensor}/{n}" for tensor in ("input", "weight", "gradient") for n in NUMBERS[:3]} | {"output_db"}
    summary = {f"lowprec/{kind}/{name}" for kind in ("worst", "mean") for name in kinds}
    assert logger.lines[0][1].keys() == {f"lowprec/{fqn}/{name}" for fqn in LAYERS for name in names} | summary
    kept = read(tmp_path / "run" / FILE)
    assert list(kept) == [0, 3]
    for step, readings in enumerate(given):
        for reading, stored in zip(readings, kept[3 * step], strict=True):
            assert (stored.step, stored.fqn, stored.tensor) == (reading.step, reading.fqn, reading.tensor)
            for name in (*NUMBERS, "output_db"):
                assert getattr(stored, name) == pytest.approx(getattr(reading, name), rel=1e-4)
            assert logger.lines[step][1][f"lowprec/{reading.fqn}/{reading.tensor}/scale"] == reading.scale
        metrics = logger.lines[step][1]
        underflows = [reading.underflow for reading in readings if reading.tensor == "gradient"]
        assert len(underflows) == len(LAYERS)
        assert metrics["lowprec/worst/gradient/underflow"] == pytest.approx(max(underflows))
        assert metrics["lowprec/mean/gradient/underflow"] == pytest.approx(sum(underflows) / len(underflows))
        decibels = [reading.output_db for reading in readings if reading.tensor == "input"]
        assert metrics["lowprec/worst/output_db"] == pytest.approx(min(decibels))
        assert metrics["lowprec/mean/output_db"] == pytest.approx(sum(decibels) / len(decibels))


def test_a_monitor_without_layers_says_so_once(tmp_path, caplog):
    caplog.set_level("INFO")
    fit(tmp_path, NumericsMonitor(every=1), plugin=HalfMixed("bf16"))
    assert [record.message for record in caplog.records if "looked at" in record.message] == [
        "NumericsMonitor: 0 layers are looked at."
    ]


def test_loggers_get_the_worst_and_the_mean_unless_asked_for_layers(tmp_path):
    logger, monitor = Seen(), NumericsMonitor(every=3)
    fit(tmp_path, monitor, logger=logger, log_every_n_steps=1)
    assert {name.split("/")[1] for name in logger.lines[0][1]} == {"worst", "mean"}


def test_loggers_get_nothing_with_log_false(tmp_path):
    logger = Seen()
    fit(tmp_path, NumericsMonitor(every=3, log=False), logger=logger, log_every_n_steps=1)
    assert not any(name.startswith("fp8/") for _, metrics in logger.lines for name in metrics)


NUMBERS = ("amax", "underflow", "saturated", "scale")


def test_a_resumed_run_samples_the_same_steps_and_continues_its_file(tmp_path):
    kept = {}
    for steps, ckpt in ((2, None), (4, "last.ckpt")):
        monitor = NumericsMonitor(every=2, folder=tmp_path)
        monitor.every = 2 if ckpt else 1  # the first run has sampled step 1, too
        path = tmp_path / "last.ckpt"
        _, trainer = fit(tmp_path, monitor, steps=steps, ckpt=ckpt and path)
        trainer.save_checkpoint(path)
        kept[steps] = list(read(tmp_path / FILE))
    assert kept == {2: [0, 1], 4: [0, 1, 2]}
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 3, "la')  # killed while it wrote
    assert list(read(tmp_path / FILE)) == [0, 1, 2]
    fit(tmp_path, NumericsMonitor(every=2), steps=2)
    assert list(read(tmp_path / FILE)) == [0]  # a new run in the same folder
    assert all(json.loads(line) for line in (tmp_path / FILE).read_text().splitlines() if '"la' not in line[-5:])


def test_compiled_blocks_are_compiled_once(tmp_path):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(len(inputs))
        return graph.forward

    counts = []
    for monitor in (None, NumericsMonitor(every=2)):
        torch._dynamo.reset()
        graphs.clear()
        fit(tmp_path, monitor, net=Net(compile=backend))
        counts.append(len(graphs))
    assert counts[0] == counts[1] > 0


@pytest.mark.slow_but("model")
@pytest.mark.parametrize("how", ["model", "set-up model", "function", "LightningModule"])
def test_every_way_to_compile_is_seen(how, tmp_path):
    """Of a compiled function that calls the model, the monitor learns by its first, empty sampling."""
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager")
    monitor = NumericsMonitor(every=2)
    if how == "LightningModule":
        fit(tmp_path, monitor, net=compiled(Net()))
    else:
        fabric = L.Fabric(accelerator="cpu", plugins=FP8TorchAO())
        model = fabric.setup(compiled(Net()) if how == "model" else Net())
        model = compiled(model) if how == "set-up model" else model
        call = compiled(lambda x: model(x).sum()) if how == "function" else lambda x: model(x).sum()
        for step in range(4):
            monitor.step(model, step)
            call(torch.randn(16, WIDTH)).backward()
        monitor.finish()
    assert {r.fqn for r in monitor.readings} == LAYERS
    assert {r.tensor for r in monitor.readings} == {"input", "weight", "gradient"}


def test_a_layer_that_does_not_run_has_no_reading():
    fabric = L.Fabric(accelerator="cpu", plugins=FP8TorchAO())
    net = nn.ModuleDict({"used": nn.Linear(WIDTH, WIDTH), "frozen": nn.Linear(WIDTH, WIDTH), "not": Block()})
    net["frozen"].requires_grad_(False)
    net.forward = lambda x: net["used"](net["frozen"](x))
    model = fabric.setup(net)
    monitor = NumericsMonitor(every=1)
    monitor.step(model, 0)
    model(torch.randn(0, WIDTH)).sum().backward()
    model(torch.randn(16, WIDTH)).sum().backward()
    seen = [(r.fqn, r.tensor) for r in monitor.finish()]
    assert seen == [("used", t) for t in ("input", "weight", "gradient")] + [("frozen", t) for t in ("input", "weight")]


def test_the_share_of_an_infinite_tensor_is_not_known():
    fabric = L.Fabric(accelerator="cpu", plugins=FP8TorchAO())
    model = fabric.setup(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    monitor = NumericsMonitor(every=1)
    monitor.step(model, 0)
    model(torch.full((16, WIDTH), math.inf)).sum().backward()
    reading = next(r for r in monitor.finish() if r.tensor == "input")
    assert math.isnan(reading.amax)
    assert (reading.underflow, reading.saturated, reading.scale) == (None, None, None)


def test_the_step_of_an_optimizer_is_compiled_while_a_monitor_looks():
    """Its results must not depend on a monitor; forward and backward run eagerly."""
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append("compiled") or graph.forward(*args)

    class Doubling(torch.optim.SGD):
        step_of = staticmethod(torch.compile(lambda p: p * 2, backend=backend))

        def step(self, closure=None):
            return self.step_of(self.param_groups[0]["params"][0].detach())

    net = nn.Linear(WIDTH, WIDTH)
    optimizer, paused = Doubling(net.parameters(), lr=1.0), PausedCompiler()
    optimizer.step()
    paused.pause()
    optimizer.step()
    optimizer.step_of(net.weight.detach())  # as a forward would
    paused.resume()
    assert calls == ["compiled"] * 2


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("every", 0, "an integer of at least 1"),
        ("every", 2.0, "an integer of at least 1"),
        ("rows", 0.0, "a number above 0 and at most 1"),
        ("rows", 16, "a number above 0 and at most 1"),
        ("log", "yes", "True, False or 'layers'"),
    ],
)
def test_an_argument_that_is_not_valid_raises(argument, value, allowed):
    with pytest.raises(ValueError, match=f"`{argument}={value!r}` is not valid; expected {allowed}"):
        NumericsMonitor(**{argument: value})


def test_a_layer_that_cannot_be_looked_at_is_named_with_the_reason(tmp_path):
    """Stacked experts multiply inside of the module."""
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)

    class Mixture(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = MixtralForCausalLM(config)

        def training_step(self, batch):
            tokens = batch[:, :16].abs().long() % 32
            return self.inner(input_ids=tokens, labels=tokens).loss

        configure_optimizers = Net.configure_optimizers

    monitor, experts = NumericsMonitor(), "inner.model.layers.0.mlp.experts"
    fit(tmp_path, monitor, net=Mixture(), steps=1)
    assert monitor.missing == {experts: "its products are inside of the module"}
    assert {r.fqn.rpartition(".")[2] for r in monitor.readings} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.filterwarnings("ignore:.*were not called in the first training forward")
def test_a_layer_that_is_never_called_is_named(tmp_path):
    class Reader(Net):
        def __init__(self):
            super().__init__()
            self.read = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return super().forward(nn.functional.linear(x, self.read.weight))

    monitor = NumericsMonitor()
    fit(tmp_path, monitor, net=Reader(), steps=1)
    assert monitor.missing == {"read": "it was not called, or in compiled code alone"}


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
