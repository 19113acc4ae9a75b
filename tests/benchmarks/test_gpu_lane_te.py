"""The GPU lane beside the real Transformer Engine, where that is installed; without a GPU."""

import pytest
import torch

from benchmarks.gpu_lane import contenders, measure
from lightning_lowprec.tools.doctor import availability


def test_a_name_of_ours_is_missing_where_it_cannot_run():
    cpu = torch.device("cpu")
    ours = [contender for contender in contenders.contenders() if contender.name is not None]
    assert {contender.name for contender in ours} >= {"fp8-hybrid", "fp8-hybrid-te", "nvfp4-te", "msamp-o3"}
    for contender in ours:
        assert (contender.missing(cpu) is None) == availability(contender.name, cpu).runs, contender.key
    assert all(contender.missing(cpu) for contender in ours if contender.key.startswith(contenders.MAIN_TE))


def test_a_contender_finds_no_layers_of_the_last_one():
    """Transformer Engine renews the delayed scales of every layer it ever saw, in everyone's steps."""
    pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.quantization_state.global_amax_buffer["forward"] = [torch.ones(3)]
    measure.start_afresh(torch.device("cpu"))
    assert FP8GlobalStateManager.quantization_state.global_amax_buffer == {}
