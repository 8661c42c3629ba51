"""Errors of the package have one base class, and survive pickling."""

import inspect
import pickle

import pytest

from timm_moe_dg import errors

ERRORS = [item for item in vars(errors).values() if inspect.isclass(item) and issubclass(item, Exception)]


@pytest.mark.parametrize("error", ERRORS)
def test_a_message_survives_the_way_out_of_a_worker(error):
    copy = pickle.loads(pickle.dumps(error("steps=0: give at least 1")))
    assert type(copy) is error
    assert str(copy) == "steps=0: give at least 1"
    assert isinstance(copy, errors.MoeDgError)
    assert error is errors.MoeDgError or len(error.__mro__) > len(errors.MoeDgError.__mro__) + 1  # and one of Python's


def test_messages_name_argument_value_and_remedy():
    assert str(errors.RouterError.of("top_k", "a", "give a number")) == "top_k='a': give a number"
    message = str(errors.MissingDependencyError.of("drawing", "matplotlib", "plots"))
    assert message == "drawing needs matplotlib, which is not installed: pip install 'timm_moe_dg[plots]'"
