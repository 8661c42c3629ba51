"""Texts that a spreadsheet would compute are shown, everything else comes back as it was, and numbers stay numbers."""

import csv

import pytest

from timm_moe_dg.storage.csv_text import write_csv


def written(path, rows):
    write_csv(path, rows)
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("text", ["=1+1", "+x", "-x", "@sum", "\tcat"])
def test_formulas_become_texts(text, tmp_path):
    assert written(tmp_path / "a.csv", [[text]]) == [[f"'{text}"]]


def test_a_carriage_return_ends_no_row(tmp_path):
    assert written(tmp_path / "a.csv", [["\rcat", "a\r\nb"]]) == [["'\ncat", "a\n\nb"]]


@pytest.mark.parametrize("value", ["cat", "a=1", "'", -1, 2.5, 0])
def test_all_else_is_left_alone(value, tmp_path):
    assert written(tmp_path / "a.csv", [[value]]) == [[str(value)]]


def test_quotes_commas_and_line_breaks_come_back(tmp_path):
    rows = [["a,b", 'say "x"', "two\nlines"], ["é", " ", "-x"]]
    assert written(tmp_path / "a.csv", rows) == [rows[0], ["é", " ", "'-x"]]
