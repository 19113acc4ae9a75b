"""What runs where: every name has an answer for every architecture, and plugins refuse by the table."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed, Int8TorchAO, LossScale, MasterConfig, hardware, names
from lightning_lowprec.precision import refusals
from lightning_lowprec.runs_where import ARCHITECTURES, OTHER, RECIPES, TABLE, cell, classify, instead, named
from lightning_lowprec.tools.doctor import word
from tests.toys import on_gpu

CUDA = torch.device("cuda", 0)


def test_every_answer_has_a_source_and_plugins_and_names_have_the_same_rows():
    assert {*TABLE} == {*RECIPES} >= {row.hardware_recipe for row in names.TABLE.values()}
    for recipe, row in TABLE.items():
        assert {*row} == {*ARCHITECTURES}, recipe
        for key, found in row.items():
            assert found.source, (recipe, key)
            assert found.reason or (found.runs is True and not found.emulated), (recipe, key)
            assert not (found.emulated and not found.runs), (recipe, key)
    for name, row in names.TABLE.items():
        if row.plugin in (HalfMixed, FP8TorchAO, MSAMP):  # tests/te has Transformer Engine's
            assert names.create(name).hardware_recipe == row.hardware_recipe, name


@pytest.mark.parametrize(
    ("described", "key"),
    [
        (("cuda", (5, 2)), "sm_60"), (("cuda", (7, 0)), "sm_70"), (("cuda", (7, 5)), "sm_75"),
        (("cuda", (8, 6)), "sm_80"), (("cuda", (8, 9)), "sm_89"), (("cuda", (9, 0)), "sm_90"),
        (("cuda", (10, 3)), "sm_100"), (("cuda", (11, 0)), "sm_110"), (("cuda", (12, 1)), "sm_120"),
        (("cuda", (14, 0)), "sm_130"), (("cuda", (9, 0), "gfx90a:sramecc+:xnack-"), "gfx90a"),
        (("cuda", (9, 0), "gfx908"), "gfx90a"), (("cuda", (9, 4), "gfx942"), "gfx942"),
        (("cuda", (9, 5), "gfx950"), "gfx950"), (("cuda", (10, 3), "gfx1030"), "gfx1100"),
        (("cuda", (11, 0), "gfx1101"), "gfx1100"), (("cuda", (12, 0), "gfx1200"), "gfx1200"),
        (("cuda", (12, 5), "gfx1250"), "other"), (("xpu",), "xpu"), (("mps",), "mps"), (("cpu",), "cpu"),
        (("hpu",), "other"), (("cuda",), "other"),
    ],
)  # fmt: skip
def test_devices_have_architectures(described, key):
    assert classify(*described).key == key
    keys = {"sm_86": "sm_80", "sm_103a": "sm_100", "sm90": "sm_90", "gfx1201": "gfx1200", "xpu": "xpu"}
    assert {name: named(name).key for name in keys} == keys


def test_the_names_to_use_instead_run_there():
    for recipe, row in TABLE.items():
        for key, found in row.items():
            if found.runs is False and key != OTHER.key:
                words = instead(recipe, ARCHITECTURES[key])
                by_name = {name: row.hardware_recipe for name, row in names.TABLE.items()}
                rows = [by_name[name] for name in by_name if f"'{name}'" in words and "FP8TE(" not in words]
                if "'disable_rht': True, 'disable_stochastic_rounding': True" in words:
                    rows.append("te-nvfp4-plain")
                if "weight_codes='per_gemm'" in words:
                    rows.append("tensorwise-per-gemm")
                if "'bf16-mixed'" in words or "'16-mixed'" in words:
                    rows.append("fp16" if "'16-mixed'" in words else "bf16")
                assert rows, (recipe, key)
                assert all(cell(row, ARCHITECTURES[key]).runs for row in rows), (recipe, key, words)


@pytest.mark.parametrize(
    ("capability", "gcn", "plugin", "message"),
    [
        ((12, 0), None, FP8TorchAO("rowwise"), "GPU X (compute capability 12.0) fails with CUBLAS_STATUS_NOT_SUPPORTED"
         " where there is a scale per row (reported with torch 2.10) [pytorch#192707]. Use 'fp8-hybrid', or `plugins="
         "FP8TorchAO(..., emulate=True)` to emulate FP8, slowly"),
        ((9, 0), "gfx90a", FP8TorchAO(), "GPU X (gfx90a) has no FP8 matrix kernels (they start with MI300; its"
         " compute capability 9.0 is not Hopper's) [pytorch ScaledBlasDeviceUtils.cpp scaled_mm_arch_allowed]. Use"
         " 'bf16-mixed', or `plugins=FP8TorchAO(..., emulate=True)` to emulate FP8, slowly"),
        ((9, 4), "gfx942", MSAMP(), "GPU X (gfx942) multiplies float8_e4m3fnuz only, and the codes of this package are"
         " float8_e4m3fn [hipBLASLt data-type-support, products/scaled.py]. Use 'fp8-rowwise', or `plugins="),
        ((9, 0), None, FP8TorchAO("mxfp8"), "GPU X (compute capability 9.0) has no products with a scale per 32"),
        ((9, 0), None, FP8TorchAO("mxfp8", emulate=True), None),
        ((10, 0), None, FP8TorchAO("mxfp8"), None),
        ((9, 0), None, Int8TorchAO(), None),
        ((9, 4), "gfx942", FP8TorchAO("rowwise"), None),
        ((9, 4), "gfx942", FP8TorchAO(weight_codes="per_gemm"), None),
        ((9, 0), "gfx90a", FP8TorchAO(emulate=True), None),
        ((7, 5), None, HalfMixed("bf16"), None),
    ],
)  # fmt: skip
def test_plugins_refuse_by_the_table(monkeypatch, capability, gcn, plugin, message):
    on_gpu(monkeypatch, capability, gcn)
    refusal = plugin.refusal(CUDA)
    assert refusal is None if message is None else refusal.startswith(message)
    for on_apple in (FP8TorchAO(), FP8TorchAO(emulate=True), MSAMP(emulate=True)):  # which cannot emulate FP8 either
        assert on_apple.refusal(torch.device("mps")) == "mps has no float8 tensors [pytorch#148420]. Use 'bf16-mixed'"


@pytest.mark.parametrize(
    ("plugin", "capability", "message"),
    [
        (FP8TorchAO(compile=False), (13, 0), r"not known whether this runs: GPU X .* is newer than this table"),
        (HalfMixed("bf16"), (7, 5), r"GPU X .* has no bf16 tensor cores .* emulated .*, slowly"),
        *((plugin, (9, 0), None) for plugin in (FP8TorchAO(), MSAMP(), HalfMixed("bf16"), HalfMixed())),
        (FP8TorchAO(emulate=True), (13, 0), None),
    ],
)
def test_what_is_not_known_or_not_emulated_by_choice_is_said(monkeypatch, plugin, capability, message):
    on_gpu(monkeypatch, capability)
    plugin.bind_device(CUDA)
    said = rf"`precision='{plugin.precision}'`: .*{message}"
    with pytest.warns(UserWarning, match=said) if message else nullcontext():  # warnings are errors
        refusals.check_runs(plugin, CUDA)


def test_half_auto_takes_fp16_where_bf16_is_emulated_and_the_device_of_an_apple_is_lightnings(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert hardware.default_device() == torch.device("mps", 0)
    on_gpu(monkeypatch, (7, 5))
    assert hardware.bf16_refusal(CUDA).startswith("GPU X (compute capability 7.5) has no bf16 tensor cores")
    assert HalfMixed("bf16").how(CUDA).startswith("bfloat16 autocast, emulated, since GPU X")
    assert not HalfMixed("fp16").emulates(CUDA)
    for masters in (False, True, MasterConfig(moments="8bit")):
        scale = LossScale(initial=8.0, growth_interval=1)
        plugin = HalfMixed(master_weights=masters, loss_scale=scale, skip_nonfinite=masters is True)
        first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        plugin.bind_device(CUDA)
        assert plugin.autocast_dtype is torch.float16, "before the choice is said, too"
        plugin.see_optimizer(waits := torch.optim.SGD([second], lr=1.0))
        plugin.decide(CUDA)
        plugin.scaler.scale_loss((first + second).sum()).backward()
        for optimizer in (torch.optim.SGD([first], lr=1.0), waits):  # whose gradient follows the scale, which grows
            plugin.scaler.step(optimizer)
        assert (second.tolist(), plugin.scaler.scale) == ([-1.0, -1.0], 32.0), "after growing twice"
    with pytest.raises(RuntimeError, match=r"`master_weights='8bit'` needs bf16, but .*`master_weights=True`"):
        HalfMixed(master_weights="8bit").decide(CUDA)
    on_gpu(monkeypatch, (9, 0), "gfx90a")
    assert hardware.bf16_refusal(CUDA) is None


def test_the_page_has_every_answer_and_every_name():
    page = (Path(__file__).parents[1] / "docs" / "what-runs-where.md").read_text()
    said, header = {}, []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "recipe" and len(cells) > 2:
            header = cells[1:]
        elif (alike := cells[0].split(", "))[0] in RECIPES:
            said |= {(each, key): answer for each in alike for key, answer in zip(header, cells[1:], strict=True)}
    short = {"yes": "yes", "no": "no", "not known": "?", "emulated": "emu"}
    answers = {(recipe, key): short[word(found)] for recipe, row in TABLE.items() for key, found in row.items()}
    assert said == {place: answer for place, answer in answers.items() if place[1] != OTHER.key}
    for line in re.findall(r"^\| (`\w.*)", page.split("## Which names")[1].split("## ")[0], flags=re.MULTILINE):
        recipes, members = line.split(" | ")[:2]
        for name in re.findall(r"`([a-z0-9-]+)`", members):
            assert f"`{names.TABLE[name].hardware_recipe}`" in recipes, name
