"""Errors: every one of the package's is one kind, and comes through pickling as it went in."""

import inspect
import pickle

import pytest

from timm_moe_dg import errors

ERRORS = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, Exception)]


@pytest.mark.parametrize("error", ERRORS)
def test_a_message_survives_the_way_out_of_a_worker(error):
    found = pickle.loads(pickle.dumps(error("steps=0: give at least 1")))
    assert type(found) is error
    assert str(found) == "steps=0: give at least 1"
    assert isinstance(found, errors.MoeDgError)
    assert error is errors.MoeDgError or len(error.__mro__) > len(errors.MoeDgError.__mro__) + 1  # and one of Python's


def test_messages_name_argument_value_and_remedy():
    assert str(errors.RouterError.of("top_k", "a", "give a number")) == "top_k='a': give a number"
    found = str(errors.MissingDependencyError.of("drawing", "matplotlib", "plots"))
    assert found == "drawing needs matplotlib, which is not installed: pip install 'timm_moe_dg[plots]'"
