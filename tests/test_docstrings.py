"""Examples in docstrings run, and every name on the API page has one."""

import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch
from torch.nn import functional as F

import timm_moe_dg
from timm_moe_dg import algorithms
from timm_moe_dg.data import benchmarks
from timm_moe_dg.layers import routers

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()
ON_THE_PAGE = re.findall(r"^\.\. auto\w+:: (timm_moe_dg[\w.]*)$", PAGE, re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
GLOBALS = {"timm": timm, "timm_moe_dg": timm_moe_dg, "torch": torch, "F": F}
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(Path(timm_moe_dg.__file__).parent.rglob("*.py"))
    if ">>>" in path.read_text()
]


def resolve(name: str) -> object:
    value: object = timm_moe_dg
    for part in name.split(".")[1:]:
        value = getattr(value, part)  # as a reader does after `import timm_moe_dg`
    return value


def failures(module: ModuleType) -> list[str]:
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    output: list[str] = []
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=GLOBALS):
        runner.run(test, out=output.append)
    return output


@pytest.fixture
def registries(monkeypatch):
    """Undoes what examples register."""
    for module, name in ((algorithms, "_algorithms"), (benchmarks, "_ROWS"), (routers, "ROUTERS")):
        known = getattr(module, name)
        for key, value in known.items():
            monkeypatch.setitem(known, key, value)
    before = {id(known): set(known) for known in (algorithms._algorithms, benchmarks._ROWS, routers.ROUTERS)}
    yield
    for known in (algorithms._algorithms, benchmarks._ROWS, routers.ROUTERS):
        for key in set(known) - before[id(known)]:
            del known[key]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_run(name, registries, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the files that they write
    assert failures(importlib.import_module(name)) == []


def test_every_name_on_the_api_page_has_an_example():
    assert len(ON_THE_PAGE) > 25
    assert [name for name in ON_THE_PAGE if ">>>" not in (inspect.getdoc(resolve(name)) or "")] == []


def test_dir_lists_what_users_need_and_nothing_else():
    public = [name for name in dir(timm_moe_dg) if not name.startswith("_")]
    assert public == sorted(timm_moe_dg.__all__)
    assert {"algorithms", "layers", "losses", "metrics", "upcycle", "auxiliary_loss"} <= set(public)
    assert {name.split(".")[1] for name in ON_THE_PAGE} <= set(public)
