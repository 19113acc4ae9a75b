import pytest
from torch import distributed as dist


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.device_mesh.init_device_mesh("cpu", (1,))
