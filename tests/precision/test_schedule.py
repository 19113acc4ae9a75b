"""`schedule=[...]`: which phase a step is in, and what the layers compute in it."""

import copy
import csv
import logging
from bisect import bisect_right
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from lightning_lowprec import FP8TorchAO, HalfMixed
from lightning_lowprec.callbacks import PrecisionSchedule
from lightning_lowprec.precision.schedule import Schedule
from tests.toys import ON_CPU, Block, Stack

SCHEDULE = [{"until": 0.2, "gemms": "bf16"}, {"until": 7}, {"gemms": {"forward": "bf16"}}]
BF16, FORWARD = ("forward", "grad_input", "grad_weight"), ("forward",)


class Net(Stack):
    def __init__(self):
        super().__init__(lambda: Block(16, norm=False, activation=torch.relu), head=("lm_head", 16, 16), seed=0)


class Lit(L.LightningModule):
    def __init__(self, batches=10):
        super().__init__()
        self.net, self.seen, self.validated, self.batches = Net(), [], [], batches

    def training_step(self, batch, number):
        self.seen.append((self.trainer.global_step, self.net.blocks[0].up.in_bf16))
        return (self.net(batch) - batch.flip(1)).square().mean()

    def validation_step(self, batch, number):
        self.validated.append((self.trainer.global_step, self.net.blocks[0].up.in_bf16))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(torch.randn(self.batches, 8, 16, generator=torch.Generator().manual_seed(1)), batch_size=None)

    def val_dataloader(self):
        return DataLoader(torch.randn(1, 8, 16), batch_size=None)


def fit(plugin, model=None, ckpt_path=None, **options):
    model = Lit() if model is None else model
    options = {"max_epochs": 1, "limit_val_batches": 0, **ON_CPU, **options}
    trainer = L.Trainer(plugins=plugin, **options)
    trainer.fit(model, ckpt_path=ckpt_path)
    return model, trainer


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- what a schedule says


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([], r"`schedule=\[\]` has no phase"),
        ("bf16", r"`schedule='bf16'` is not valid; expected None or a list of phases"),
        ([{"until": 1.0}, {}], r"`schedule\[0\]\['until'\]=1\.0` is not valid; expected an optimizer step"),
        ([{"until": 0.0}, {}], r"`schedule\[0\]\['until'\]=0\.0` is not valid"),
        ([{"until": -0.5}, {}], r"`schedule\[0\]\['until'\]=-0\.5` is not valid"),
        ([{"until": -3}, {}], r"`schedule\[0\]\['until'\]=-3` is not valid"),
        ([{"until": 0}, {}], r"`schedule\[0\]\['until'\]=0` is not valid"),
        ([{"until": 2.5}, {}], r"`schedule\[0\]\['until'\]=2\.5` is not valid"),
        ([{"until": float("nan")}, {}], r"`schedule\[0\]\['until'\]=nan` is not valid"),
        ([{"until": True}, {}], r"`schedule\[0\]\['until'\]=True` is not valid"),
        ([{"until": "10"}, {}], r"`schedule\[0\]\['until'\]='10'` is not valid"),
        ([{"gemms": "bf16"}, {}], r"`schedule\[0\]\['until'\]=None` is not valid.*Only the last phase has no `until`"),
        ([{"until": 3}, {"until": 9}], r"`schedule\[1\]` is the last phase.*and has `until=9`"),
        ([{"until": 3, "gemms": "fp4"}, {}], r"`schedule\[0\]\['gemms'\]='fp4'` is not valid; expected 'bf16'"),
        ([{"gemms": {"backward": "bf16"}}], r"mapping of forward, grad_input, grad_weight"),
        (
            [{"gemm": "bf16"}],
            r"`schedule\[0\]=\{'gemm': 'bf16'\}` is not valid; expected a mapping with some of: until",
        ),
        ([{"keep": "blocks.0"}], r"`schedule\[0\]\['keep'\]='blocks\.0'` is not valid; expected a list of fqns"),
        ([{"until": 5}, {"until": 5}, {}], r"phase without a step: it ends at 5, and the phase before at 5"),
        ([{"until": 0.5}, {"until": 0.4}, {}], r"it ends at 0\.4, and the phase before at 0\.5"),
        (["bf16"], r"is not valid"),
    ],
)
def test_bad_schedules(schedule, message):
    with pytest.raises(ValueError, match=message):
        FP8TorchAO(schedule=schedule)
    if isinstance(schedule, list):
        with pytest.raises(ValueError, match=message if schedule != ["bf16"] else "not valid"):
            PrecisionSchedule(schedule)


def test_fractions_and_steps_are_compared_in_a_run():
    schedule = Schedule.of([{"until": 0.29}, {"until": 50}, {"until": 0.95}, {}])
    ends = schedule.ends(100)
    assert ends == (29, 50, 95)
    assert [bisect_right(ends, step) for step in (0, 28, 29, 49, 50, 94, 95, 99, 1000)] == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    for total, end in ((1000, 50), (50, 47), (3, 0)):
        with pytest.raises(ValueError, match=f"phase without a step in a run of {total} steps: it ends at {end}"):
            schedule.ends(total)


def test_a_schedule_makes_no_gemm_fp8_that_the_recipe_computes_in_bf16():
    for gemms in ("fp8", {"grad_weight": "fp8"}):
        asked = "asks for 'grad_weight' in 'fp8', and `recipe='rowwise_with_gw_hp'` computes it in"
        with pytest.raises(ValueError, match=asked):
            FP8TorchAO("rowwise_with_gw_hp", schedule=[{"gemms": gemms}])
    FP8TorchAO("rowwise_with_gw_hp", schedule=[{"gemms": {"forward": "fp8", "grad_weight": "bf16"}}])


def test_a_head_in_fp8_does_not_go_with_phases_in_bf16():
    with pytest.raises(
        ValueError, match=r"not valid with `head='fp8'`: the head would stay in FP8\. Use `head='chunked'`"
    ):
        FP8TorchAO(head="fp8", schedule=SCHEDULE)
    FP8TorchAO(head="fp8", schedule=[{"until": 3}, {"keep": ["blocks.0"]}])


# ---- the Trainer


def test_each_step_runs_in_its_phase_and_the_log_says_so_before_the_first(caplog):
    caplog.set_level(logging.INFO)
    model, _ = fit(FP8TorchAO(schedule=SCHEDULE), limit_val_batches=1, val_check_interval=5, num_sanity_val_steps=1)
    phases = [BF16] * 2 + [()] * 5 + [FORWARD] * 3
    assert model.seen == list(enumerate(phases))
    assert model.validated == [(0, BF16), (5, ()), (10, FORWARD)]
    lines = [r.message for r in caplog.records if "phase" in r.message or "schedule" in r.message]
    assert lines == [
        "fp8-hybrid: schedule over 10 steps: steps 0 to 1: all GEMMs in bf16; steps 2 to 6: FP8; from step 7:"
        " forward in bf16.",
        "fp8-hybrid: step 2: phase 2 of 3: FP8.",
        "fp8-hybrid: step 7: phase 3 of 3: forward in bf16.",
    ]


def test_all_micro_batches_of_a_step_run_in_one_phase_and_the_metric_is_logged_at_the_boundaries(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    model, _ = fit(
        FP8TorchAO(schedule=[{"until": 2, "gemms": "bf16"}, {}]),
        logger=logger,
        log_every_n_steps=1,
        accumulate_grad_batches=3,
        max_epochs=2,
    )
    assert [phase for _, phase in model.seen[:10]] == [BF16] * 6 + [()] * 4
    logger.save()
    rows = list(csv.DictReader(Path(logger.experiment.metrics_file_path).read_text().splitlines()))
    assert [(row["step"], row["precision/phase"]) for row in rows if row["precision/phase"]] == [
        ("0", "0.0"),
        ("2", "1.0"),
    ]


KEEPS_CODES = {"weight_codes": "per_forward"}


def test_bf16_phases_are_bf16_mixed_and_one_phase_is_the_plain_plugin():
    plain = weights(fit(FP8TorchAO(**KEEPS_CODES))[0])
    assert same(plain, weights(fit(FP8TorchAO(schedule=[{}], **KEEPS_CODES))[0]))
    mixed = weights(fit(None, precision="bf16-mixed", model=Plain())[0])
    assert same(mixed, weights(fit(FP8TorchAO(schedule=[{"gemms": "bf16"}], **KEEPS_CODES))[0]))
    assert not same(plain, mixed)


def test_each_phase_is_compiled_once_in_its_first_step():
    graphs = []
    for schedule in (None, [{"until": 2, "gemms": "bf16"}, {"until": 4}, {"gemms": {"forward": "bf16"}}]):
        counters.clear()
        torch._dynamo.reset()
        plugin = FP8TorchAO(schedule=schedule, compile={"backend": "aot_eager"}, **KEEPS_CODES)
        fit(plugin, limit_train_batches=6 if schedule else 2)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1] == 3 * graphs[0]


class Plain(Lit):
    def training_step(self, batch, number):
        return (self.net(batch) - batch.flip(1)).square().mean()


class SavesAt(Callback):
    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_train_epoch_end(self, trainer, *args):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


ONE_STEP_PER_EPOCH = {"max_epochs": 10}


def test_a_run_resumes_in_each_phase_and_at_each_boundary(tmp_path):
    steps = (1, 2, 4, 7, 8)
    whole, _ = fit(FP8TorchAO(schedule=SCHEDULE), Lit(1), callbacks=[SavesAt(tmp_path, steps)], **ONE_STEP_PER_EPOCH)
    for step in steps:
        resumed = {"ckpt_path": tmp_path / f"{step}.ckpt", **ONE_STEP_PER_EPOCH}
        model, _ = fit(FP8TorchAO(schedule=SCHEDULE), Lit(1), **resumed)
        assert model.seen == whole.seen[step:]
        assert same(weights(model), weights(whole)), step


def test_a_switch_starts_from_the_weights_and_moments_that_are_there(tmp_path):
    """The steps after the switch are those of a run that bf16-mixed resumes from a checkpoint of the boundary."""
    plugin = FP8TorchAO(schedule=[{"until": 4}, {"gemms": "bf16"}])
    whole, _ = fit(plugin, Lit(1), callbacks=[SavesAt(tmp_path, [4])], **ONE_STEP_PER_EPOCH)
    mixed, _ = fit(HalfMixed("bf16"), Plain(1), ckpt_path=tmp_path / "4.ckpt", **ONE_STEP_PER_EPOCH)
    assert same(weights(whole), weights(mixed))


def test_blocks_that_are_kept_in_a_phase(caplog):
    caplog.set_level(logging.INFO)
    schedule = [
        {"until": 3},
        {"until": 6, "keep": ["blocks.1"]},
        {"keep": ["*.up", "blocks.1"], "gemms": {"forward": "bf16"}},
    ]
    seen = []

    class Sees(Callback):
        def on_train_batch_end(self, trainer, model, *args):
            seen.append(tuple(len(layer.in_bf16) for block in model.net.blocks for layer in (block.up, block.down)))

    fit(FP8TorchAO(schedule=schedule), callbacks=[Sees()])
    assert seen == [(0, 0, 0, 0)] * 3 + [(0, 0, 3, 3)] * 3 + [(3, 1, 3, 3)] * 4
    assert "FP8, blocks.1 in bf16" in caplog.text
    with pytest.raises(ValueError, match=r"`schedule\[0\]\['keep'\]` has 'blocks.7', which matches no converted layer"):
        fit(FP8TorchAO(schedule=[{"keep": ["blocks.7"]}]))


def test_recipes_per_layer_and_a_schedule_go_together():
    plugin = FP8TorchAO(
        recipe={"*.up": {"grad_weight": "bf16"}, "*": "rowwise"},
        schedule=[{"until": 5}, {"gemms": {"forward": "bf16"}}],
    )
    model, _ = fit(plugin)
    assert [phase for _, phase in model.seen] == [("grad_weight",)] * 5 + [("forward", "grad_weight")] * 5


def test_fp16_counts_skipped_steps_and_switches_to_fp16():
    model, trainer = fit(FP8TorchAO(base="fp16", schedule=[{"until": 6, "gemms": "bf16"}, {}]))
    assert trainer.precision_plugin.scaler.skipped_steps >= 0
    assert model.seen == [(step, BF16 if step < 6 else ()) for step in range(10)]
    mixed, _ = fit(HalfMixed("fp16"), model=Plain(), max_steps=5)
    fp16, _ = fit(FP8TorchAO(base="fp16", schedule=[{"until": 6, "gemms": "bf16"}, {}]), max_steps=5)
    assert same(weights(mixed), weights(fp16))


def test_the_callback_gives_a_name_the_schedule():
    with_callback, _ = fit(None, precision="fp8-hybrid", callbacks=[PrecisionSchedule(SCHEDULE)])
    with_option, _ = fit(FP8TorchAO(schedule=SCHEDULE))
    assert with_callback.seen == with_option.seen
    assert same(weights(with_callback), weights(with_option))
    with pytest.raises(ValueError, match="`PrecisionSchedule` does not go with `precision='bf16-mixed'`"):
        fit(None, precision="bf16-mixed", callbacks=[PrecisionSchedule(SCHEDULE)])
    with pytest.raises(ValueError, match="are different schedules of one run"):
        fit(FP8TorchAO(schedule=[{}]), callbacks=[PrecisionSchedule(SCHEDULE)])


def test_a_run_of_unknown_length_takes_steps_but_no_fractions():
    class Endless(Lit):
        def train_dataloader(self):
            return DataLoader(Numbers(), batch_size=None)

    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.randn(8, 8, 16))

    with pytest.raises(ValueError, match=r"fractions of the run, and the number of optimizer steps is.*max_steps"):
        fit(FP8TorchAO(schedule=SCHEDULE), model=Endless(), max_epochs=-1)
    model, _ = fit(FP8TorchAO(schedule=SCHEDULE), model=Endless(), max_epochs=-1, max_steps=10)
    assert [phase for _, phase in model.seen] == [BF16] * 2 + [()] * 5 + [FORWARD] * 3
    model, _ = fit(FP8TorchAO(schedule=[{"until": 3}, {"gemms": "bf16"}]), model=Endless(), max_epochs=1)
    assert [phase for _, phase in model.seen] == [()] * 3 + [BF16] * 5
    fit(FP8TorchAO(schedule=SCHEDULE), fast_dev_run=True)  # a phase may have no step there


class Gan(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, number):
        super().training_step(batch, number)
        for optimizer in self.optimizers():
            loss = self.net(batch).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        halves = [self.net.blocks.parameters(), self.net.lm_head.parameters()]
        return [torch.optim.SGD(half, lr=1e-2) for half in halves]


def test_manual_optimization_counts_the_steps_of_all_optimizers():
    model, _ = fit(FP8TorchAO(schedule=[{"until": 6, "gemms": "bf16"}, {}]), model=Gan())
    assert model.seen == [(step, BF16 if step < 6 else ()) for step in range(0, 20, 2)]
    with pytest.raises(ValueError, match=r"not known \(manual optimization: any number per batch\)"):
        fit(FP8TorchAO(schedule=SCHEDULE), model=Gan())


def test_evaluation_before_any_fit_is_in_the_last_phase():
    model = Lit()
    L.Trainer(plugins=FP8TorchAO(schedule=SCHEDULE), **ON_CPU).validate(model, verbose=False)
    assert model.validated == [(0, FORWARD)]


def test_evaluation_after_a_fit_stays_in_its_phase():
    plugin = FP8TorchAO(schedule=SCHEDULE, plain_after_fit=False)
    model, trainer = fit(plugin, limit_val_batches=1, num_sanity_val_steps=0, max_steps=10)
    trainer.validate(model, verbose=False)
    assert model.validated == [(10, FORWARD)] * 2
    assert model.net.blocks[0].up.in_bf16 == FORWARD


# ---- Fabric


def test_fabric_is_told_the_step():
    found = {}
    for schedule in (SCHEDULE, [{}]):
        plugin = FP8TorchAO(schedule=schedule)
        fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
        net = Net()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            model(x)
        assert net.blocks[0].up.in_bf16 == (FORWARD if schedule is SCHEDULE else ())
        with pytest.raises(RuntimeError, match=r"does not know the step. In Fabric call `fabric.strategy.precision"):
            model(x)
        for step in range(10):
            plugin.set_step(step, total=10)
            assert (
                net.blocks[1].down.in_bf16
                == ((BF16,) * 2 + ((),) * 5 + (FORWARD,) * 3)[step if len(schedule) > 1 else 4]
            )
            fabric.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found[len(schedule)] = weights(net)
    assert not same(found[1], found[3])


def test_what_set_step_refuses():
    with pytest.raises(RuntimeError, match=r"`set_step` needs a schedule: `FP8TorchAO\(schedule=\[...\]\)`"):
        FP8TorchAO().set_step(0)
    plugin = FP8TorchAO(schedule=SCHEDULE)
    for wrong in (
        {"step": -1, "total": 5},
        {"step": 0, "total": 0},
        {"step": True, "total": 5},
        {"step": 0.5, "total": 5},
    ):
        with pytest.raises(ValueError, match="is not valid; expected an integer of at least"):
            plugin.set_step(**wrong)
    with pytest.raises(ValueError, match="`total=None` is not possible for a `schedule` with fractions"):
        plugin.set_step(0)
    FP8TorchAO(schedule=[{"until": 5}, {}]).set_step(0)

    class Tells(Callback):
        def on_train_batch_start(self, trainer, *args):
            trainer.precision_plugin.set_step(0, total=10)

    with pytest.raises(RuntimeError, match="`set_step` is for Fabric"):
        fit(plugin, callbacks=[Tells()])


def test_a_plugin_with_a_schedule_can_be_copied():
    plugin = copy.deepcopy(FP8TorchAO(schedule=SCHEDULE))
    assert plugin.phases.schedule == Schedule.of(SCHEDULE)
