"""What a float8 shard knows of writes that torch does not see; one process."""

import pytest
from torch import distributed as dist

from tests.fsdp2.models import batch, loss_of
from tests.fsdp2.test_fsdp2_numerics import sharded

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_kernel_says_that_it_has_written(mesh):
    model, made = sharded(mesh, True)
    loss_of(model, batch(0, 0))
    assert not made.scales.stale
    made.scales.weights[0].to_local().note_written()
    assert made.scales.stale
