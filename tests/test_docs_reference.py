"""Tables of docs/reference/ are those that the registries give."""

import pytest

from tests.write_reference import PAGES, ROWS, TABLES, registered_models, tables_in

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

    data_sets = [row.name for row in ROWS]
    for name, registered in {"models": registered_models(), "data sets": data_sets, "sources": data_sets}.items():
        assert [word for word in registered if f"`{word}`" not in first_cells(name)] == []
