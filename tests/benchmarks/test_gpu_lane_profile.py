"""What the GPU did in a step: traces by hand, torch's own choice of attention."""

import json

import pytest
import torch

from benchmarks.gpu_lane import kernel_times, models, part_steps

CUDA = torch.device("cuda", 0)


def kernel(name, start, duration, launch=None, category="kernel"):
    args = {} if launch is None else {"correlation": launch}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": 7, "args": args}


def host(name, start, duration, tid=1, category="cpu_op", **args):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": tid, "args": args}


def launch(number, at, tid=1):
    return host("cudaLaunchKernel", at, 1.0, tid, "cuda_runtime", correlation=number)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "gemm bf16"),
        ("nvjet_sm90_hsh_128x256_TNN", "gemm bf16"),
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", "gemm fp8"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64", "gemm fp8"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64", "gemm bf16"),
        ("void cutlass::device_kernel<cutlass::float_e4m3_t>", "gemm fp8"),
        ("cublasLt::splitKreduce_kernel<32, 16, int>", "gemm bf16"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void pytorch_flash::flash_bwd_kernel<Flash_traits>", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k128_sm80", "attention"),
        ("triton_red_fused__to_copy_abs_amax_mul_silu_3", "elementwise"),
        ("void transformer_engine::normalization::rmsnorm_fwd_general_kernel", "elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMath>", "optimizer"),
    ],
)
def test_a_kernels_category_by_its_name(name, kind):
    assert kernel_times.category(kernel(name, 0, 1)) == kind


def test_times_and_numbers_of_two_steps_by_category():
    """Launched inside of operations on one thread; two kernels overlap; one operation ends before its launch."""
    events = [
        host("aten::_scaled_mm", 0, 10), launch(1, 2), kernel("nvjet_tst_x", 100, 30, 1),
        host("aten::mm", 20, 10), launch(2, 22), kernel("nvjet_tst_x", 120, 30, 2),
        host("Optimizer.step#AdamW.step", 40, 20, category="user_annotation"), host("aten::mul", 41, 2),
        launch(3, 50), kernel("triton_poi_fused_adam", 200, 40, 3),
        launch(4, 70), kernel("triton_poi_fused_silu", 300, 10, 4),
        launch(5, 45, tid=2), kernel("triton_poi_fused_add", 310, 10, 5),
        kernel("Memcpy DtoD", 400, 5, 6, "gpu_memcpy"), kernel("flash_fwd", 500, 8, 9),
        {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    found = kernel_times.summary({"traceEvents": events}, steps=2)
    assert {kind: ms for kind, ms in found["gpu_ms"].items() if ms} == pytest.approx({
        "gemm fp8": 0.015, "gemm bf16": 0.015, "optimizer": 0.02, "elementwise": 0.01, "copies": 0.0025,
        "attention": 0.004,
    })  # fmt: skip
    assert set(found["gpu_ms"]) == set(found["gpu_counts"]) == set(kernel_times.CATEGORIES)
    assert (found["kernels"], found["gpu_counts"]["elementwise"]) == (3.0, 1.0)
    assert found["busy_ms"] == pytest.approx((50 + 40 + 20 + 5 + 8) / 2e3)
    assert next(iter(found["longest"].items())) == ("nvjet_tst_x", {"ms": pytest.approx(0.03), "count": 1.0})


def test_a_real_trace_without_a_gpu_says_that_there_is_no_kernel(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        torch.ones(2) + 1
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    with pytest.raises(ValueError, match="saw no kernel"):
        kernel_times.summary(json.loads((tmp_path / "trace.json").read_text()), 1)


def test_a_profile_costs_no_figures(monkeypatch):
    """The profiler of torch runs; CUDA's own part of it is not there."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    steps = []
    assert kernel_times.profiled(lambda: steps.append(1), torch.device("cpu")) == {}
    assert steps == []
    with pytest.warns(UserWarning, match="CUDA is not available"):
        found = kernel_times.profiled(lambda: torch.ones(2), CUDA)
    assert found == {"failed": "ValueError: the profiler saw no kernel of this device"}


def test_the_backend_of_attention_is_torchs_choice():
    cpu = torch.device("cpu")
    assert part_steps.attention_backend(models.TOY, 2, cpu) == "FLASH_ATTENTION"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert part_steps.attention_backend(models.TOY, 2, cpu) == "MATH"
