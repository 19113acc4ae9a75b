"""Some of Lightning's own tests, under ``fp8-hybrid``, over both packages; `make test-peers` runs more of them."""

import fnmatch

import pytest

from tests.peers import __main__ as peers

pytestmark = pytest.mark.slow

FOLDER = peers.HERE.parents[2] / "shared" / "peers"
TESTS = {
    "trainer/optimization/test_optimizers.py": (
        "test_optimizer_with_scheduling",
        "test_lr_scheduler_state_updated_before_saving[2-True]",
    ),
    "trainer/optimization/test_multiple_optimizers.py": ("test_multiple_optimizers_manual",),
    "trainer/optimization/test_manual_optimization.py": ("test_step_with_optimizer_closure", "test_lr_schedulers"),
    "trainer/optimization/test_backward_calls.py": ("test_backward_count_with_grad_accumulation",),
    "models/test_hooks.py": ("test_trainer_datamodule_hook_system", "test_train_eval_mode_restored"),
    "callbacks/test_stochastic_weight_avg.py": ("test_swa_callback[True-False]", "test_swa_deepcopy"),
    "callbacks/test_weight_averaging.py": ("test_weight_averaging_deepcopy",),
    "checkpointing/test_trainer_checkpoint.py": ("test_finetuning_with_ckpt_path",),
    "tuner/test_lr_finder.py": ("test_model_reset_correctly",),
}
SEES_THE_NAME = "models/test_hooks.py", "test_load_from_checkpoint_hook_calls[False]"
"""A test that fails under ``fp8-*``, as ``reasons.txt`` says; it shows that the name was there."""


@pytest.mark.skipif(not FOLDER.is_dir(), reason="Lightning's own tests are in the folder of `make test-peers`")
@pytest.mark.parametrize("package", peers.PACKAGES)
def test_lightnings_own_tests_pass_over(package, tmp_path):
    chosen = [(file, name) for file, names in TESTS.items() for name in names]
    files = tuple(f"tests_pytorch/{file}::{name}" for file, name in (*chosen, SEES_THE_NAME))
    tests = peers.unpacked(FOLDER, tmp_path)
    outcomes = peers.outcomes_of(files, tests, FOLDER, peers.SWAPS["fp8-hybrid"], package, processes=0)
    assert len(outcomes) == len(chosen) + 1
    assert [test for test, message in outcomes.items() if message] == ["test_hooks::" + SEES_THE_NAME[1]]


def test_every_reason_names_a_swap_and_says_why():
    for name, test, reason in peers.read_reasons(peers.HERE / "reasons.txt"):
        assert any(fnmatch.fnmatchcase(swap, name) for swap in peers.SWAPS)
        assert test.partition(":")[0] in peers.SUITES
        assert len(reason.split()) > 4
