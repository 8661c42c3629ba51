"""Tables of docs/reference/ are those that the registries give."""

import dataclasses
from pathlib import Path
from types import MappingProxyType

import pytest

from tests import write_reference
from tests.write_reference import PAGES, TABLES, TITLES, registered_models, tables_in, write
from timm_moe_dg.algorithms import ALGORITHMS, Algorithm
from timm_moe_dg.data import BENCHMARKS

WRITTEN = {name: table for page in PAGES.glob("*.md") for name, table in tables_in(page.read_text()).items()}
SLOW = {"models"}  # builds all models and counts their operations


def test_every_table_stands_in_a_page():
    assert WRITTEN.keys() == TABLES.keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TABLES])
def test_a_table_is_that_of_the_code(name):
    assert WRITTEN[name] == TABLES[name](), "run python -m tests.write_reference"


def test_the_tables_have_every_registered_name():
    def first_cells(name: str) -> str:
        return " ".join(line.split("|")[1] for line in WRITTEN[name].splitlines())

    for name, registered in {"models": registered_models(), "data sets": BENCHMARKS, "sources": BENCHMARKS}.items():
        assert [word for word in registered if f"`{word}`" not in first_cells(name)] == []


def test_a_change_of_the_code_changes_the_tables(monkeypatch, tmp_path: Path):
    changed = dataclasses.replace(BENCHMARKS["PACS"], steps=8, license="CC0")
    monkeypatch.setattr(write_reference, "BENCHMARKS", {**BENCHMARKS, "PACS": changed})
    assert WRITTEN["data sets"] != TABLES["data sets"]()
    assert "|CC0|" in TABLES["sources"]().partition("`PACS`")[2].splitlines()[0]

    class Later(Algorithm):
        """A method (Nobody et al., 2031, arXiv:3101.00001)."""

        MIN_DOMAINS = 2
        HPARAMS = MappingProxyType({"later_lambda": 0.25})

        def objective(self, context, minibatches): ...

    Later.__module__ = "timm_moe_dg.algorithms.later"
    monkeypatch.setattr(write_reference, "ALGORITHMS", {**ALGORITHMS, "Later": Later})
    row = "|`Later`|2 domains|`later_lambda` (0.25)|[Nobody et al., 2031](https://arxiv.org/abs/3101.00001)|"
    assert row in TABLES["methods"]().splitlines()

    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{TITLES['methods']}\n\nold\n\n<!-- end -->\n\nText.\n")
    write(tmp_path)
    assert page.read_text().splitlines()[4:6] == TABLES["methods"]().splitlines()[:2]
    assert page.read_text().endswith("|\n\n<!-- end -->\n\nText.\n")
