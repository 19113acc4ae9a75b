"""Stock Lightning accepts our names after the import, and treats its own as before."""

import copy
from importlib.util import find_spec

import lightning as L
import lightning.fabric.connector as fabric_connector
import lightning.fabric.utilities.throughput as fabric_throughput
import lightning.pytorch.callbacks.throughput_monitor as trainer_throughput
import lightning.pytorch.trainer.connectors.accelerator_connector as trainer_connector
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch.nn.parameter import Parameter
from torch.optim.swa_utils import AveragedModel

import lightning_lowprec
import lightning_lowprec_autoload as autoload
from lightning_lowprec import FP8TE, FP8TorchAO, HalfMixed, MasterConfig
from tests.registration.test_cli import python
from tests.representatives import TABLE
from tests.toys import ON_CPU, Task

TE_NAMES = [name for name, entry in TABLE.items() if entry.plugin is FP8TE]
WITHOUT_TE = find_spec("transformer_engine") is None


@pytest.mark.parametrize("name", TE_NAMES)
@pytest.mark.skipif(not WITHOUT_TE, reason="Transformer Engine is installed: `make test-te` is the place")
def test_transformer_engine_is_missing(name):
    with pytest.raises(ModuleNotFoundError, match=r"needs transformer_engine, which is not installed: `pip install"):
        L.Trainer(precision=name, **ON_CPU)
    with pytest.raises(ModuleNotFoundError, match="needs transformer_engine"):
        L.Fabric(precision=name, accelerator="cpu")


@pytest.mark.parametrize("start", [L.Trainer, L.Fabric])
@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_deepspeed_is_missing(start):
    said = r"`strategy='deepspeed_stage_2'` needs deepspeed, which is not installed: `pip install 'deepspeed>=0\.19\.8"
    with pytest.raises(ModuleNotFoundError, match=said):
        start(precision="fp8-hybrid", strategy="deepspeed_stage_2", accelerator="cpu")
    with pytest.raises((ImportError, MisconfigurationException), match="must have DeepSpeed installed"):
        start(precision="bf16-mixed", strategy="deepspeed_stage_2", accelerator="cpu")


OURS = ("fp8-hybrid", "fp8-e4m3", "fp8-rowwise", "fp8-rowwise-gw-hp", "fp8-block", "mxfp8", "int8-mixed")
TES = ("fp8-hybrid-te", "fp8-e4m3-te", "fp8-current-te", "fp8-block-te")


def test_the_designed_names_and_no_others_are_registered():
    expected = [
        *("half-auto", "bf16-master", "fp16-master", "bf16-remainder", "bf16-8bit", "bf16-sr"),
        *(f"{name}{ending}" for name in (*OURS, *TES) for ending in ("", "-remainder", "-8bit", "-sr")),
        *("fp8-hybrid-fp16", "fp8-hybrid-te-fp16", "mxfp8-te", "nvfp4-te", "msamp-o1", "msamp-o2", "msamp-o3"),
    ]
    assert len(expected) == 57
    assert set(TABLE) == set(expected)


FORMS = {"-remainder": ("remainder", "fp32"), "-8bit": ("remainder", "8bit"), "-sr": ("stochastic", "fp32")}


@pytest.mark.parametrize("name", [name for name in TABLE if not (WITHOUT_TE and name in TE_NAMES)])
def test_name_in_fabric_and_trainer(name):
    made = TABLE[name]
    for plugin in (
        L.Fabric(precision=name, accelerator="cpu").strategy.precision,
        L.Trainer(precision=name, **ON_CPU).precision_plugin,
    ):
        assert type(plugin) is made.plugin
        assert plugin.precision == name
        assert made.plan.format == plugin.format
    for form, moments in (of for suffix, of in FORMS.items() if name.endswith(suffix)):
        assert plugin.masters.config == MasterConfig(form=form, moments=moments)
        assert (plugin.autocast_dtype, plugin.scaler) == (torch.bfloat16, None)
        same = made.plugin(**made.options).precision
        assert TABLE[same].options == made.options, "a plugin made by hand is called by a name that means the same"
    assert L.Trainer(precision=name, **ON_CPU).precision == name


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", 32, "bf16", 16, None])
@pytest.mark.filterwarnings("ignore:.*(historical reasons|fp16 is not supported on CPU).*")
def test_lightnings_own_names_mean_the_same(name):
    def plugins():
        yield L.Fabric(precision=name, accelerator="cpu").strategy.precision
        yield L.Trainer(precision=name, **ON_CPU).precision_plugin

    ours = list(plugins())
    lightning_lowprec.unregister()
    try:
        stock = list(plugins())
    finally:
        lightning_lowprec.register()
    for a, b in zip(ours, stock, strict=True):
        assert type(a) is type(b)
        assert {**vars(a), "scaler": None} == {**vars(b), "scaler": None}


def test_the_precision_of_lowprec_run_wins_over_the_scripts(monkeypatch, caplog):
    monkeypatch.setenv("LT_CLI_USED", "1")  # as `lowprec run --precision=fp8-rowwise` sets them
    monkeypatch.setenv("PL_TRAINER_PRECISION", "fp8-rowwise")
    monkeypatch.setenv("LOWPREC_RUN_PRECISION", "fp8-rowwise")
    monkeypatch.setattr("lightning_lowprec.registration._said", set())
    half, both = HalfMixed("bf16"), {"precision": 16, "plugins": [FP8TorchAO(), "fp8"]}
    for words, given in {
        "precision='fp8'": {"precision": "fp8"},
        "precision='bf16-true'": {"precision": "bf16-true"},
        f"plugins={half}": {"plugins": half},
        "plugins=bf16-mixed": {"plugins": "bf16-mixed"},
        f"precision=16` and `plugins={both['plugins'][0]}` and `plugins=fp8": both,
        "": {"precision": "fp8-rowwise"},
    }.items():
        caplog.clear()
        for _ in range(2):
            assert L.Fabric(accelerator="cpu", **given).strategy.precision.precision == "fp8-rowwise"
        assert L.Trainer(**given, **ON_CPU).precision == "fp8-rowwise"
        said = [record.getMessage() for record in caplog.records if "lowprec run" in record.getMessage()]
        once = [f"lowprec run: `--precision=fp8-rowwise` wins over `{words}` of the script."]
        assert said == (once if words else []), "once, where the script asks for another precision"
    assert lightning_lowprec.registration.launched_precision_is_used()
    environment = LightningEnvironment()
    strategy = L.Fabric(plugins=[FP8TorchAO(), environment], strategy="ddp", devices=1, accelerator="cpu").strategy
    assert (strategy.precision.precision, strategy.cluster_environment) == ("fp8-rowwise", environment)


@pytest.mark.parametrize("make", [L.Fabric, L.Trainer])
def test_a_plugin_is_sent_to_plugins(make):
    for plugin in (FP8TorchAO, FP8TorchAO()):
        with pytest.raises(ValueError, match=r"a plugin, expected a name\. Write `plugins=FP8TorchAO\(\.\.\.\)`"):
            make(precision=plugin, accelerator="cpu")


WORDS = {
    "fp8-hybird": "Did you mean 'fp8-hybrid'? `lowprec doctor` lists the names of this package.",
    "fp8": "Write 'fp8-hybrid': FP8 linear layers by torchao, bf16 elsewhere.",
    "fp4": "Write 'nvfp4-te'",
    "bf16: full": "Write `plugins=HalfEval('bf16')`",
    "fp16-mixed": "Write '16-mixed' (float32 weights, as in torch and Accelerate) or 'fp16-master'",
    torch.bfloat16: "Write 'bf16-mixed' (float32 weights, as in torch and Accelerate) or 'bf16-master'",
    " O2": "Write 'msamp-o2' for MS-AMP's level, or 'fp16-master' for apex's.",
    "bf16_with_fp8_mixed": "NeMo's recipe is a plugin: write `plugins=lightning_lowprec.recipes.bf16_with_fp8_mixed()`",
    "bf16_mixed": "Did you mean 'bf16-mixed'? NeMo's recipe is a plugin: write",
    8: "Write 'fp8-hybrid'",
    "fp8_hybrid": "Did you mean 'fp8-hybrid'?",
    "fp8-hybrid-fp16-remainder": (
        "`-fp16` and `-remainder` do not go together: names with `-fp16` keep float32 weights. Write 'fp8-hybrid-"
        "remainder' for bf16, or `plugins=FP8TorchAO(..., base='fp16', master_weights=True)` for fp16 weights with"
        " float32 masters."
    ),
    "mxfp8-te-remainder": "'mxfp8-te' has no `-remainder`: it needs Blackwell",
    "mxfp8-fp16": "'mxfp8' has no `-fp16`: its kernels take and return bf16.",
    "fp8-e4m3-fp16-sr": "'fp8-e4m3' has no `-fp16`: write `plugins=FP8TorchAO(fp8_format='e4m3', base='fp16')`.",
    "int8-mixed-fp16-sr": "'int8-mixed' has no `-fp16`: write `plugins=Int8TorchAO(base='fp16')`.",
    "fp8-block-te-fp16": "'fp8-block-te' has no `-fp16`: write `plugins=FP8TE('block', base='fp16')`.",
    "fp8-rowwise-fp16": "'fp8-rowwise' has no `-fp16`: its kernels round their output through bf16.",
    "msamp-o3-master": "'msamp-o3' has no `-master`: it keeps its weights as codes",
    "fp8-hybrid-remainder-sr": "A name has one suffix: write 'fp8-hybrid-remainder'.",
    "fp8-hybrid-remaindr": "Did you mean 'fp8-hybrid-remainder'?",
    "fp8-remainder": "Write 'fp8-hybrid-remainder'",
    "fp8-hybrid-bf16": "Write 'fp8-hybrid': what is not FP8 or int8 is bf16",
    True: "Try 'bf16-mixed', 'fp8-hybrid' or 'bf16-8bit'.",
}


@pytest.mark.parametrize("word", WORDS, ids=str)
def test_words_of_other_stacks_and_forms_that_do_not_exist_are_answered_at_the_start(word):
    for make in (L.Fabric, L.Trainer):
        with pytest.raises(ValueError, match=r"`lowprec doctor` lists the names of this package\.$") as caught:
            make(precision=word, accelerator="cpu")
        assert str(caught.value).startswith(f"Precision {word!r} is invalid. {WORDS[word]}")


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("fp8-hybrid", "Write `precision='fp8-hybrid'`."),
        ("bf16-mixed", "Write `precision='bf16-mixed'`; NeMo's precision of this name is `plugins=lightning_lowprec."),
        ("16-mixed", "NeMo's precision of this name is `plugins=lightning_lowprec.recipes.fp16_mixed()`."),
        ("fp8", "Precision 'fp8' is invalid. Write 'fp8-hybrid'"),
    ],
)
@pytest.mark.parametrize("make", [L.Fabric, L.Trainer])
def test_a_string_in_plugins_is_sent_to_precision(make, word, remedy):
    for plugins in (word, [word], [LightningEnvironment(), word]):
        with pytest.raises(ValueError, match=f"^`plugins='{word}'` is a string, expected a plugin") as caught:
            make(plugins=plugins, accelerator="cpu")
        assert remedy in str(caught.value)


@pytest.mark.parametrize("make", [L.Fabric, L.Trainer])
@pytest.mark.parametrize("other", [lambda: HalfMixed("bf16"), lambda: MixedPrecision("bf16-mixed", "cpu")])
def test_a_name_and_a_plugin_together_raise_lightnings_error(make, other):
    with pytest.raises(ValueError, match=r"Received both `precision=fp8-hybrid` and `plugins=.*Choose one\."):
        make(precision="fp8-hybrid", plugins=other(), accelerator="cpu")
    with pytest.raises(ValueError, match="Received both `precision=bf16-mixed`"):
        make(precision="bf16-mixed", plugins=FP8TorchAO(), accelerator="cpu")


def test_a_name_beside_other_plugins_and_under_ddp_and_its_variants():
    environment = LightningEnvironment()
    several = environment, [environment], (environment,), iter([environment])
    for plugins, kind in zip(several, ("", "_spawn", "_notebook", "_find_unused_parameters_true"), strict=True):
        trainer = L.Trainer(precision="fp8-hybrid", plugins=plugins, strategy=f"ddp{kind}", devices=1, **ON_CPU)
        assert isinstance(trainer.precision_plugin, FP8TorchAO)
        assert trainer.strategy.cluster_environment is environment
    strategy = L.Fabric(precision="bf16-mixed", plugins=environment, strategy="fsdp2", accelerator="cpu").strategy
    assert (type(strategy.precision), strategy.cluster_environment) == (HalfMixed, environment)
    inside = L.Trainer(strategy=DDPStrategy(precision_plugin=FP8TorchAO()), **ON_CPU)
    assert isinstance(inside.precision_plugin, FP8TorchAO)


@pytest.mark.parametrize("strategy", ["XLA", "single_xla"])
@pytest.mark.parametrize("make", [L.Fabric, L.Trainer])
@pytest.mark.parametrize("how", [{"precision": "fp8-hybrid"}, {"plugins": "FP8TorchAO"}])
def test_unsupported_strategies_are_refused_by_name(make, strategy, how):
    how = {"plugins": FP8TorchAO()} if "plugins" in how else how
    works = "It runs under one device, 'ddp' and its variants .*, 'fsdp2', or 'fsdp', which becomes 'fsdp2'"
    works += ", or 'deepspeed_stage_1', '_2' and '_3'"
    with pytest.raises(ValueError, match=rf"does not run under `strategy='{strategy.lower()}'` yet\. {works}"):
        make(strategy=strategy, accelerator="cpu", **how)
    with pytest.raises(ValueError, match="does not run under `strategy='DataParallelStrategy'` yet"):
        L.Fabric(strategy=L.fabric.strategies.DataParallelStrategy(), accelerator="cpu", **how)


def seam_objects():
    return [
        fabric_connector._Connector._check_config_and_set_final_flags,
        fabric_connector._Connector._lazy_init_strategy,
        trainer_connector._AcceleratorConnector._check_config_and_set_final_flags,
        trainer_connector._AcceleratorConnector._lazy_init_strategy,
        ModelSummary.__init__,
        fabric_throughput._plugin_to_compute_dtype,
        trainer_throughput._plugin_to_compute_dtype,
        L.Trainer.__init__.__annotations__["precision"],
        L.Fabric.__init__.__annotations__["precision"],
        "fsdp2" in STRATEGY_REGISTRY,
        "fsdp2" in trainer_connector.StrategyRegistry,
    ]


def test_register_is_idempotent_and_unregister_restores_everything(monkeypatch):
    registered = seam_objects()
    lightning_lowprec.register()
    assert all(a is b for a, b in zip(registered, seam_objects(), strict=True))
    lightning_lowprec.unregister()
    stock = seam_objects()
    try:
        assert not any(a is b for a, b in zip(registered, stock, strict=True))
        with pytest.raises(ValueError, match="is invalid"):
            L.Fabric(precision="fp8-hybrid", accelerator="cpu")
        assert not hasattr(stock[0], "__wrapped__")
        lightning_lowprec.unregister()
        assert all(a is b for a, b in zip(stock, seam_objects(), strict=True))
        lightning_lowprec.register()
        ours = fabric_connector._Connector._lazy_init_strategy
        monkeypatch.setattr(fabric_connector._Connector, "_lazy_init_strategy", wrapped := lambda self: ours(self))
        lightning_lowprec.unregister()
        assert fabric_connector._Connector._lazy_init_strategy is wrapped, "of another package"
        L.Fabric(plugins=FP8TorchAO(), accelerator="cpu")  # ours does nothing within
    finally:
        monkeypatch.undo()
        lightning_lowprec.register()
    assert L.Fabric(precision="fp8-hybrid", accelerator="cpu").strategy.precision.precision == "fp8-hybrid"


def test_unregister_gives_torch_its_copies_and_averages_back():
    def seams():
        return Parameter.__deepcopy__, AveragedModel.update_parameters

    try:
        lightning_lowprec.unregister()
        stock = seams()
        lightning_lowprec.register()
        net = torch.nn.Linear(4, 4)
        for _ in range(2):
            L.Fabric(precision="bf16-master", accelerator="cpu").setup(net, torch.optim.SGD(net.parameters(), 0.1))
            assert not set(stock) & set(seams())
            assert copy.deepcopy(net).weight.dtype is torch.float32
            lightning_lowprec.unregister()
            assert seams() == stock
            assert copy.deepcopy(net).weight.dtype is torch.bfloat16
            lightning_lowprec.register()
    finally:
        lightning_lowprec.register()


def test_throughput_monitors_and_model_summary_know_our_precisions():
    on_cpu = {"fp8-hybrid": torch.bfloat16, "fp8-hybrid-fp16": torch.float16, "half-auto": torch.bfloat16}
    for name, dtype in on_cpu.items():
        plugin = L.Trainer(precision=name, **ON_CPU).precision_plugin
        assert trainer_throughput._plugin_to_compute_dtype(plugin) is dtype
        assert fabric_throughput._plugin_to_compute_dtype(plugin) is dtype
    on_gpu = FP8TorchAO()
    on_gpu.bind_device(torch.device("cuda", 0))  # Lightning lists the FP8 peaks of its GPUs under int8
    assert trainer_throughput._plugin_to_compute_dtype(on_gpu) is torch.int8
    assert trainer_throughput._plugin_to_compute_dtype(MixedPrecision("bf16-mixed", "cpu")) is torch.bfloat16
    model = Task(torch.nn.Linear(16, 16, bias=False))  # 256 parameters of 4 bytes
    model.lower = torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16).requires_grad_(False)  # 256 of 2
    assert ModelSummary(model).model_size == pytest.approx(512 * 4e-6), "as Lightning counts, also without a Trainer"
    model.trainer = L.Trainer(precision="32-true", **ON_CPU)
    assert ModelSummary(model).model_size == pytest.approx(512 * 4e-6)
    model.trainer, model.lazy = L.Trainer(precision="fp8-hybrid", **ON_CPU), torch.nn.LazyLinear(4)
    with pytest.warns(UserWarning, match="UninitializedParameter"):
        assert ModelSummary(model).model_size == pytest.approx((256 * 4 + 256 * 2) * 1e-6)
    model.net = model.lower = model.lazy = torch.nn.ReLU()
    assert ModelSummary(model).model_size == 0


IN_A_CLIENT = """
import sys
import lightning_lowprec_autoload as autoload
autoload.install()  # as torch does, by the entry point
from pydantic import BaseModel
from FABRIC.connector import _PRECISION_INPUT

class Config(BaseModel):
    precision: _PRECISION_INPUT = "bf16-mixed"

print(Config(precision="bf16-true").precision, Config(precision=16).precision)
assert "lightning_lowprec" not in sys.modules, "nobody asked for it"
print(Config(precision="fp8-hybrid").precision)
"""


@pytest.mark.parametrize("fabric", ["lightning.fabric", "lightning_fabric"])
def test_the_package_is_imported_when_a_word_is_not_lightnings(tmp_path, fabric):
    pytest.importorskip("pydantic")
    ran = python("-c", IN_A_CLIENT.replace("FABRIC", fabric), cwd=tmp_path)
    assert ran.stdout == "bf16-true 16\nfp8-hybrid\n"


def test_parsers_that_list_all_choices_list_ours():
    annotation = fabric_connector._PRECISION_INPUT
    assert autoload.without_word(annotation | None) == autoload.without_word(annotation) | None
    assert autoload.without_word(annotation) != annotation
    assert autoload.without_word("a string") == "a string"
