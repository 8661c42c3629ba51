"""Texts that a spreadsheet would compute are shown, everything comes back as it was, and numbers stay numbers."""

import csv

import pytest

from timm_moe_dg.storage.csv_text import plain_cell, write_csv


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@sum", "\tcat", "\rcat"])
def test_formulas_become_texts(text):
    assert plain_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["cat", "a=1", "", "'", -1, 2.5, 0])
def test_all_else_is_left_alone(value):
    assert plain_cell(value) is value


def test_quotes_commas_and_line_breaks_come_back(tmp_path):
    rows = [["a,b", 'say "x"', "two\nlines"], ["é", " ", "-x"]]
    write_csv(tmp_path / "a.csv", rows)
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [rows[0], ["é", " ", "'-x"]]
