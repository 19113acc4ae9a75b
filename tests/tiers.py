"""Which tests ``make test`` leaves to ``make test-all``.

``make test`` (``pytest --tier 1``) runs after every change: at most 4 minutes on two quiet cores, 7 CPU-minutes. The
tests below take seconds, and show for every name, world or compiler what a faster test shows once; ``--tier 2`` runs
them. A new test is in the first tier until it stands here. ``tests/test_tiers.py`` looks for entries without a test.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

FILES = (
    # what runs programs, notebooks and pages
    "benchmarks/test_*.py",
    "site/test_python_blocks.py",
    "test_notebook.py",
    "tools/test_compare_seeds.py",
    "tools/test_plan_fits.py",
    # models of other people, tools of other people
    "families/test_*.py",
    "peers/test_over_both.py",
    "precision/test_plain_tools.py",
    # several processes; of them golden/, checkpoints/ and four files of fsdp2/ are in the first tier
    "checkpoints/test_killed_saves.py",
    "fsdp2/test_ended_runs.py",
    "fsdp2/test_expert_parallel.py",
    "fsdp2/test_float32_kept.py",
    "fsdp2/test_fsdp2_experts.py",
    "fsdp2/test_fsdp2_life.py",
    "fsdp2/test_fsdp2_meshes.py",
    "fsdp2/test_fsdp2_numerics.py",
    "fsdp2/test_fsdp2_review.py",
    "fsdp2/test_fsdp2_trainer.py",
    "fsdp2/test_fsdp_objects.py",
    "fsdp2/test_eight_bits.py",
    "fsdp2/test_parallelisms.py",
    "fsdp2/test_pipelines.py",
    "fsdp2/test_precisions_crossed.py",
    "fsdp2/test_resume_*.py",
    "fsdp2/test_volume.py",
    "msamp/test_levels.py",
    "msamp/test_msamp_ddp.py",
    "msamp/test_msamp_fsdp2.py",
    "msamp/test_scaled_fsdp.py",
    "precision/test_heads_sharded.py",
    "registration/test_both_packages.py",
    "serving/test_ranks.py",
    "serving/test_sharded.py",
)
"""Patterns of files below ``tests/`` that are in the second tier with all of their tests."""

TESTS = {
    "callbacks/test_monitor_runs.py": tuple(
        f"test_a_monitor_changes_no_weight_and_sees_every_layer[{case}]"
        for case in ("compiled", "compiled and recomputed")
    ),
    "checkpoints/test_atomic.py": ("test_killed_at_every_step",),
    "checkpoints/test_foreign_checkpoints.py": ("test_under_fsdp2",),
    "contract/test_contract_orders.py": ("test_every_order_of_three",),
    "contract/test_contract_references.py": ("test_no_precision_is_another_one_in_disguise",),
    "conversion/test_head.py": ("test_a_compiler_traces_the_whole_model",),
    "fsdp2/test_gathered_tiles.py": (
        "test_a_gather_sends_the_codes_and_a_step_reduces_the_tiles",
        "test_two_ranks_compute_the_bits_of_one",
    ),
    "masters/test_stores.py": ("test_regression_with_small_updates_learns_as_float32",),
    "msamp/test_msamp_checkpoints.py": ("test_checkpoints_load_into_every_other_precision",),
    "msamp/test_scaled_compiled.py": ("test_compiled_blocks_have_the_bits_of_eager_ones",),
    "numerics/test_fp8_average.py": ("test_a_group_of_its_own", "test_the_hook_does_the_arithmetic_on_every_rank"),
    "numerics/test_tensor_cores.py": (
        "test_hopper_loses_what_was_reported",
        "test_products_are_those_of_mmaemus_h100_where_it_splits_k_too",
    ),
    "precision/test_emulation.py": ("test_mi300_multiplies_the_codes_that_torchao_makes_there",),
    "precision/test_heads.py": tuple(
        f"test_a_run_with_accumulation_clipping_and_resume_follows_that_of_all_logits[{case}]"
        for case in ("chunked-msamp", "chunked-fp16-master", "fp8-torchao", "fp8-bf16-remainder", "fp8-fp16")
    ),
    "precision/test_main_job.py": (
        "test_ddp_on_two_processes",
        "test_fabric_loop",
        "test_fp8_stays_within_one_percent_of_fp32_after_200_steps",
    ),
    "registration/test_cli.py": (
        "test_importing_the_package_loads_nothing_heavy",
        "test_lowprec_fit_imports_from_the_working_folder_and_from_files_and_adds_no_noise",
        "test_lowprec_run_launches_a_console_command_with_fabric_and_trainer_and_its_precision_wins",
        "test_stock_fabric_launcher_with_lt_precision",
        "test_stock_lightning_cli_configures_fsdp2_by_flags_and_by_yaml",
        "test_stock_lightning_cli_takes_fsdp2_and_fsdp_by_name",
        "test_stock_lightning_cli_takes_the_plugin_by_class_path",
        "test_stock_lightning_cli_yaml_written_by_print_config",
        "test_the_gpu_to_emulate_is_named_by_a_flag_or_by_the_environment",
    ),
    "site/test_how_it_works.py": ("test_the_pictures_are_drawn_anew", "test_the_table_of_sums_says_what_is_computed"),
    "test_examples.py": ("test_example_runs",),
    "test_installs.py": ("test_import_torch_itself_in_a_process_of_its_own",),
    "test_messages.py": (
        "test_a_run_without_any_logging_says_its_lines",
        "test_import_of_torchao_says_nothing_of_what_nobody_asked_for[0]",
    ),
    "tools/test_command_line.py": ("test_json_is_all_of_stdout[plan --fits]",),
    "tools/test_compare.py": ("test_the_command_trains_the_demo", "test_what_fails_is_shown_and_leaves_the_others"),
    "tools/test_doctor.py": ("test_it_is_short_and_ends_with_a_recommendation_and_nothing_else_is_printed",),
    "tools/test_export_serving.py": ("test_memory_is_that_of_some_rows_and_not_of_a_tensor",),
    "tools/test_startup.py": ("test_the_model_of_a_command_finds_the_names_registered",),
    "torchao/test_block_experts.py": (
        "test_a_layer_is_near_to_the_model_and_compiles_to_the_same_values[gpt_oss]",
        "test_each_expert_is_a_linear_with_its_weight[dtype2-True-hopper-down_proj-gpt_oss]",
        "test_each_expert_is_a_linear_with_its_weight[dtype2-True-hopper-down_proj-mixtral]",
        "test_each_expert_is_a_linear_with_its_weight[dtype2-True-hopper-gate_up_proj-gpt_oss]",
    ),
    "torchao/test_experts.py": ("test_losses_stay_within_one_percent_of_bf16",),
    "torchao/test_fp8_torchao.py": ("test_with_a_broken_torchao", "test_without_torchao"),
    "torchao/test_new_format.py": ("test_it_is_sharded", "test_it_trains_with_recipes[True]"),
    "torchao/test_prototypes.py": ("test_names_train_a_gpt_within_one_percent_of_bf16",),
    "torchao/test_weight_codes.py": (
        "test_changed_weights_are_encoded_again[compiled-loaded]",
        "test_results_are_those_of_encoding_at_every_product[{'compile': {'backend': 'aot_eager'}}]",
    ),
}
"""Tests of the second tier in files of the first; a name without brackets stands for all of its cases."""

CASES = {
    "golden/test_golden.py": {
        "test_one_process": [
            "half-auto",
            "fp16-master",
            "bf16-remainder",
            "bf16-8bit",
            "bf16-sr",
            "fp8-hybrid",
            "fp8-hybrid-fp16",
            "fp8-hybrid-remainder",
            "fp8-block",
            "mxfp8",
            "fp8-rowwise",
            "fp8-rowwise-gw-hp-8bit",
            "int8-mixed",
            "msamp-o2",
        ],
        "test_two_ranks": ["fp8-hybrid-ddp", "fp8-hybrid-remainder-fsdp2"],
    },
    "callbacks/test_monitor_runs.py": {"test_every_way_to_compile_is_seen": ["model"]},
    "msamp/test_scaled_compiled.py": {"test_a_compiled_step_has_the_bits_of_an_eager_one": ["O1-adamw-False"]},
    "msamp/test_scaled_linear.py": {"test_training_comes_near_float32": ["O2"]},
    "precision/test_emulation.py": {"test_one_scale_per_tensor": ["hopper"]},
    "torchao/test_fp8_linear.py": {
        "test_inference_mode_is_as_good_as_no_grad": [
            f"{tokens}-{autocast}-{compiled}-{recipe}"
            for recipe in ("tensorwise", "e4m3", "rowwise", "rowwise_with_gw_hp")
            for tokens, autocast, compiled in (
                *((tokens, autocast, False) for tokens in (32, 37) for autocast in (False, True)),
                (37, True, True),  # compiled, the others are in the second tier
            )
        ],
    },
}
"""Tests of which the first tier runs these cases only."""

CONTRACT = (
    "half-auto",
    "fp16-master",
    "bf16-remainder",
    "fp8-hybrid",
    "fp8-hybrid-fp16",
    "fp8-rowwise-gw-hp-sr",
    "msamp-o2",
    "fp8-toy",
)
"""The plugins of which the first tier runs the contract. They have each value of what a contract can see."""


@cache
def of_file(path: Path) -> int:
    """Return the tier of a file; a file of the first tier may have tests of the second."""
    if ROOT not in path.parents:
        return 1
    file = path.relative_to(ROOT).as_posix()
    return 2 if any(fnmatchcase(file, pattern) for pattern in FILES) else 1


def all_tests_of(path: Path) -> int | None:
    """Return the tier of all tests of a file, or None for a file with tests of both tiers, and for what is no test."""
    if ROOT not in path.parents or not path.match("test_*.py"):
        return None
    file = path.relative_to(ROOT).as_posix()
    return None if file in TESTS or file in CASES or file.startswith("contract/") else of_file(path)


def of_test(item: pytest.Item, also: Collection[str] = ()) -> int:
    """Return the tier of a collected test; the contract of the plugins in ``also`` is in the first, too."""
    if ROOT not in item.path.parents or of_file(item.path) == 2:
        return of_file(item.path)
    file = item.path.relative_to(ROOT).as_posix()
    function, _, case = item.name.partition("[")
    named = TESTS.get(file, ())
    kept = CASES.get(file, {}).get(function, [case[:-1]])
    plugin = item.callspec.params.get("name") if hasattr(item, "callspec") and file.startswith("contract/") else None
    plugins = (None, *CONTRACT, *also)
    first = function not in named and item.name not in named and case[:-1] in kept and plugin in plugins
    return 1 if first else 2


def without_a_case(items: list[pytest.Item], chosen: list[pytest.Item]) -> set[str]:
    """Return the collected tests of ``CASES`` of which no case was chosen."""

    def functions(some: list[pytest.Item]) -> set[str]:
        return {item.nodeid.partition("[")[0] for item in some}

    listed = {f"tests/{file}::{function}" for file, cases in CASES.items() for function in cases}
    return (functions(items) - functions(chosen)) & listed
