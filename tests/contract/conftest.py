"""Warnings that Lightning itself causes and that no user of ours can avoid."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("contract_models")

HERE = Path(__file__).parent
LIGHTNING_CHATTER = (
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated",  # torch >= 2.11 under lightning <= 2.6
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for warning in LIGHTNING_CHATTER:
                item.add_marker(pytest.mark.filterwarnings(warning))
