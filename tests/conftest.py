"""Marks the tests of large networks as slow, whichever file they are in; their families have small members too."""

import pytest

LARGE = ("hybrid_sfmoe", "gmoe_base", "moge_small")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in item.name for name in LARGE):
            item.add_marker(pytest.mark.slow)
