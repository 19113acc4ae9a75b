"""FP8 averaging of gradients: the arithmetic for 2 to 256 ranks, and the hook itself on three gloo processes."""

import math

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec.numerics import fp8_average as fp8_gradients
from lightning_lowprec.numerics.fp8_average import fp8_gradient_hook
from tests.fsdp2.ranks import run
from tests.quality import sqnr

INF = float("inf")


def averaged(gradients, sizes, dtype=torch.float32):
    """What every rank ends with, for the gradients of all ranks: (ranks, N) -> (N,)."""
    amaxes = torch.stack([fp8_gradients.run_amaxes(g, sizes) for g in gradients]).amax(0)
    codes = torch.stack([fp8_gradients.encode_runs(g, sizes, amaxes) for g in gradients])
    return fp8_gradients.decode_runs(fp8_gradients.mean(codes), sizes, amaxes, dtype)


def student_t(shape, freedom, seed):
    torch.manual_seed(seed)
    return torch.distributions.StudentT(freedom).sample(shape)


@pytest.mark.parametrize("freedom", [2.5, 4.0])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 256])
def test_the_error_is_that_of_two_roundings_however_many_ranks(ranks, freedom):
    gradients = student_t((ranks, 1 << 14), freedom, seed=ranks)
    assert sqnr(gradients.double().mean(0), averaged(gradients, [1 << 14])) >= 28.0


def test_the_average_by_hand():
    gradients = torch.tensor(
        [[1.0, -0.3, 0.01, 7e-5, 3e-5], [0.7, 0.2, -0.02, -2e-5, 6.1e-5], [0.11, 0.5, 0.3, 0.0, 0.0]]
    )
    scales = torch.tensor([256.0] * 3 + [2.0**22] * 2)  # 448 / 1.0 and 448 / 7e-5
    codes = (gradients * scales).to(torch.float8_e4m3fn).double()
    expected = codes.mean(0).to(torch.float8_e4m3fn).float() / scales
    assert torch.equal(averaged(gradients, [3, 2]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_and_the_smallest_and_the_largest_numbers(dtype):
    for number, rtol in ((0.0, 0.0), (2.0**-130, 0.0), (-torch.finfo(dtype).max, 2.0**-4)):
        found = averaged(torch.full((2, 4), number, dtype=torch.float32).to(dtype), [4], dtype).to(dtype)
        torch.testing.assert_close(found, torch.full((4,), number).to(dtype), rtol=rtol, atol=0)


@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_what_is_not_finite_on_one_rank_is_nan_for_that_parameter(bad):
    gradients = torch.ones(3, 6)
    gradients[1, 4] = bad
    result = averaged(gradients, [3, 3])
    assert result[:3].tolist() == [1.0] * 3
    assert bool(result[3:].isnan().all())


class Net(nn.Module):
    """The gradient of every weight is a part of the batch; sizes that no number of ranks divides."""

    SHAPES = ((7, 5), (11,), (1,), (0,), (64, 33), (3, 3))

    def __init__(self, dtype=torch.float32, scale=100.0):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in self.SHAPES)
        self.factors = [scale**-i for i in range(len(self.SHAPES))]

    def gradients(self, x):
        parts = x.split([p.numel() for p in self.weights])
        return [(f * part).to(p.dtype) for f, part, p in zip(self.factors, parts, self.weights, strict=True)]

    def forward(self, x):
        return sum((p.flatten() * g).sum() for p, g in zip(self.weights, self.gradients(x), strict=True))


SIZE = sum(math.prod(shape) for shape in Net.SHAPES)


def batch(rank):
    return student_t((SIZE,), 3.0, seed=rank)


class Sent(TorchDispatchMode):
    """Bytes that one of two ranks sends, as ring and direct algorithms do."""

    bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("c10d::"):
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            factor = {"c10d::allreduce_": 2, "c10d::alltoall_base_": 1, "c10d::_allgather_base_": 1}[name]
            self.bytes += factor / 2 * tensor.numel() * tensor.element_size()
        return func(*args, **(kwargs or {}))


def with_hook(model, group=None, **options):
    ddp = DistributedDataParallel(model, process_group=group, **options)
    ddp.register_comm_hook(group, fp8_gradient_hook)
    return ddp


def grads_of(model, x, group=None, **options):
    ddp = with_hook(model, group, **options)  # whose hooks end with it
    ddp(x).backward()
    return [p.grad.clone() for p in model.parameters()]


def worker(rank):
    result = {}
    result["float32"] = grads_of(Net(), batch(rank))
    result["float16"] = grads_of(Net(torch.float16, scale=10.0), batch(rank))
    result["small-buckets"] = grads_of(Net(), batch(rank), bucket_cap_mb=0.0001)
    result["views"] = grads_of(Net(), batch(rank), gradient_as_bucket_view=True)
    poisoned = batch(rank)
    poisoned[(0, 35, 46)[rank]] = (INF, -INF, float("nan"))[rank]  # each rank in another parameter
    result["nan"] = grads_of(Net(), poisoned)
    try:
        ddp = with_hook(nn.Embedding(4, 2, sparse=True))
        ddp(torch.tensor([1])).sum().backward()
    except TypeError as error:
        result["sparse"] = str(error)
    pair = dist.new_group([0, 1])
    if rank < 2:
        result["pair"] = grads_of(Net(), batch(rank), pair)
        ddp = with_hook(nn.Linear(256, 256), pair)
        loss = ddp(torch.randn(4, 256)).square().mean()
        with Sent() as sent:
            loss.backward()
        result["bytes"] = sent.bytes / (256 * 257)
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 3, tmp_path_factory.mktemp("fp8-gradients"))


pytestmark = pytest.mark.distributed


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float32", "float16", "small-buckets", "views", "pair"])
def test_the_hook_does_the_arithmetic_on_every_rank(results, case):
    dtype = getattr(torch, case, torch.float32)
    model = Net(dtype, scale=10.0 if case == "float16" else 100.0)
    here = [result[case] for result in results if case in result]  # "pair" is a group of two ranks of three
    gradients = torch.stack([torch.cat(model.gradients(batch(rank))) for rank in range(len(here))])
    expected = averaged(gradients, [p.numel() for p in model.weights if p.numel()], dtype).to(dtype)
    assert all(torch.equal(torch.cat([g.flatten() for g in grads]), expected) for grads in here)


def test_what_is_not_finite_reaches_all_a_parameter_is_a_byte_and_sparse_gradients_are_refused(results):
    for result in results:
        assert [bool(g.isnan().all()) for g in result["nan"] if g.numel()] == [True, True, True, False, False]
    assert all(1.0 <= result["bytes"] <= 1.05 for result in results[:2]), "float32 has 4"
    assert "fp8_gradient_hook got sparse gradients of torch.float32" in results[0]["sparse"]
