"""A forward computes with the weights of this moment, and a write is never lost, in every order of operations."""

import pytest

from tests.contract.orders import OPERATIONS, check_orders, every_order
from tests.representatives import names_on_cpu


def test_every_order_is_there():
    sequence = every_order(OPERATIONS, 3)
    orders = {tuple(sequence[i : i + 3]) for i in range(len(sequence) - 2)}
    assert len(orders) == len(OPERATIONS) ** 3 == len(sequence) - 2


@pytest.mark.parametrize("name", names_on_cpu())
def test_every_order_of_two(name):
    assert check_orders(name, 2) == len(OPERATIONS) ** 2 + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8-hybrid", "fp8-hybrid-remainder", "msamp-o2", "bf16-master"])
def test_every_order_of_three(name):
    assert check_orders(name, 3) == len(OPERATIONS) ** 3 + 2
