"""Seeds every test, marks the tests of large networks as slow, and says how hard hypothesis looks."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported. There is a process for each core, and a fork of one that has more threads may hang
os.environ.setdefault("OMP_NUM_THREADS", "1")

from accelerate.utils import set_seed

from tests.quick_python import quick_python

gc.set_threshold(100_000)  # torch and timm have so many objects that looking through them took 7% of the time
os.fsync = lambda _: None  # type: ignore[assignment]  # no test cuts the power, and waiting for the disk took 4%

LARGE = ("hybrid_sfmoe", "gmoe_base", "moge_small")
# A function's fixtures are made once for all of its examples, which none of ours changes
UNTIMED = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, suppress_health_check=UNTIMED)
settings.register_profile(
    "long", max_examples=500, deadline=None, suppress_health_check=UNTIMED, database=None, print_blob=True
)
settings.load_profile("ci")  # --hypothesis-profile chooses after this


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in item.name for name in LARGE):
            item.add_marker(pytest.mark.slow)
    # Files that take long come first, so that both processes end together. --no-loadscope-reorder keeps this order
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the figures that are opened, in order."""
    figure = pytest.importorskip("matplotlib.figure")
    opened: list[Any] = []

    class Figure(figure.Figure):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            opened.append(self)

    monkeypatch.setattr(figure, "Figure", Figure)
    return opened


# The same random numbers for a fixture or a test, whatever ran before


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    set_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    set_seed(0)


@pytest.fixture(scope="session", autouse=True)
def short_waits() -> Iterator[None]:
    """Seconds for the lock of a folder that is in use, and between two looks at running jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("timm_moe_dg.storage.files._PATIENCE", 0.1)
        patch.setattr("timm_moe_dg.comparisons.jobs._POLL", 0.02)
        yield


@pytest.fixture(scope="session")
def fresh_python() -> Iterator[str]:
    """An executable that acts as Python and has imported torch and timm alone."""
    with quick_python("torch", "timm") as executable:
        yield executable
