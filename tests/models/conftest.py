"""Fixtures of the model tests."""

import pytest

from tests.models.cases import BY_NAME, CASES, FAMILIES, MOGE, Case


def _name(case: Case) -> str:
    return case.name


@pytest.fixture(params=CASES, ids=_name)
def registered(request) -> Case:
    """Each registered model."""
    return request.param


# The three sizes of GMoE have one small variant
@pytest.fixture(params=[*FAMILIES, BY_NAME["moge_small_patch32_384"]], ids=_name)
def case(request) -> Case:
    """Each model with a small variant of its own."""
    return request.param


@pytest.fixture(params=FAMILIES, ids=_name)
def family(request) -> Case:
    """One model of each family: GMoE, SF-MoE, hybrid SF-MoE, MoGE."""
    return request.param


@pytest.fixture(params=MOGE, ids=_name)
def moge(request) -> Case:
    """Each model that takes metadata."""
    return request.param
