"""Warnings that Lightning itself causes and that no user of ours can avoid."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_lowprec.conversion import backends
from lightning_lowprec.masters import moments
from tests.toy_backend import BACKEND

pytest.register_assert_rewrite("contract_models")

HERE = Path(__file__).parent
LIGHTNING_CHATTER = (
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated",  # torch >= 2.11 under lightning <= 2.6
)


@pytest.fixture(autouse=True)
def toy_backend() -> Iterator[None]:
    """A backend from outside of the package is registered; see ``plugins_under_test``."""
    backends.register(BACKEND)
    yield
    backends.unregister(BACKEND.name)


@pytest.fixture(autouse=True)
def reference_te(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8TE computes on CPU, with the reference quantizers of the real Transformer Engine."""
    if str(getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")).startswith("FP8TE"):
        from tests.te.reference import run_on_cpu

        run_on_cpu(monkeypatch)


@pytest.fixture(autouse=True)
def small_moments_are_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments of 8 bits are for large weights; the models here are small."""
    monkeypatch.setattr(moments, "LEAST", 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for warning in LIGHTNING_CHATTER:
                item.add_marker(pytest.mark.filterwarnings(warning))
