"""The names of algorithms: what is registered, from where, and what is refused."""

import sys

import pytest

from timm_moe_dg import algorithms
from timm_moe_dg.algorithms import ALGORITHMS, ERM, Algorithm, get_algorithm, register_algorithm
from timm_moe_dg.errors import ArgumentError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A file that is imported by name, and the registry as it was afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(algorithms._algorithms)

    def write(text):
        (tmp_path / "own_methods.py").write_text(text)

    yield write
    sys.modules.pop("own_methods", None)
    algorithms._algorithms.clear()
    algorithms._algorithms.update(before)


REGISTERS = """
from timm_moe_dg.algorithms import ERM, register_algorithm

@register_algorithm
class OwnMethod(ERM): pass
"""


def test_names_are_those_of_the_classes():
    assert all(name == method.__name__ and issubclass(method, Algorithm) for name, method in ALGORITHMS.items())


def test_a_module_is_imported_once_and_what_it_registers_is_found(module):
    module(REGISTERS)
    with pytest.raises(ArgumentError, match=r"algorithm='OwnMethod': choose from ERM, .*MODULE:CLASS"):
        get_algorithm("OwnMethod")
    method = get_algorithm("own_methods:OwnMethod")
    assert method.__module__ == "own_methods"
    assert get_algorithm("own_methods:OwnMethod") is get_algorithm("OwnMethod") is method
    assert "OwnMethod" in ALGORITHMS


def test_a_module_that_is_missing_or_registers_another_name_is_refused(module):
    with pytest.raises(ArgumentError, match=r"algorithm='no_such\.methods:A': no module"):
        get_algorithm("no_such.methods:A")
    module(REGISTERS)
    with pytest.raises(ArgumentError, match=r"algorithm='own_methods:Other': choose from ERM, .*OwnMethod"):
        get_algorithm("own_methods:Other")


def test_a_module_s_own_failing_imports_are_not_hidden(module):
    module("import no_such_dependency")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        get_algorithm("own_methods:A")


def test_a_name_is_given_once_and_to_algorithms_only():
    with pytest.raises(ArgumentError, match="algorithm='ERM': is registered already"):
        register_algorithm(type("ERM", (ERM,), {}))
    with pytest.raises(ArgumentError, match="algorithm='Scheduler': must be a subclass of"):
        register_algorithm(type("Scheduler", (), {}))
    assert ALGORITHMS["ERM"] is ERM
    assert "Scheduler" not in ALGORITHMS
