"""Csv files of images: what is taken, and messages that name file, line and column."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from timm_moe_dg.data.readers.csv_tables import (
    below,
    check_unique,
    choice,
    coordinates,
    number,
    parsed,
    read_csv,
    text_table,
    whole_number,
)
from timm_moe_dg.errors import DataError


@pytest.fixture
def table(tmp_path):
    def write(text, encoding="utf-8"):
        (tmp_path / "t.csv").write_bytes(text.encode(encoding))
        return tmp_path / "t.csv"

    return write


def test_columns_of_a_table_with_a_byte_order_mark_quotes_and_lines_of_other_lengths(table):
    text = 'a,b\r\n"1,5",x\r\n\r\n2\r\n'
    assert read_csv(table(text, "utf-8-sig"), ["a"]) == {"a": ["1,5", "2"], "b": ["x", ""]}


@pytest.mark.parametrize(
    ("text", "encoding", "message"),
    [
        ("a,b\n", "utf-8", "a header and no rows"),
        ("", "utf-8", "line 1 is empty; write the names"),
        ("\n\na\n1\n", "utf-8", "line 1 is empty; write the names"),
        ("b,c\n1,2\n", "utf-8", "lacks the columns a; it has b, c"),
        ("a\n\u00e9\n", "latin-1", "cannot be read as csv"),
        (
            "path,lon,lat\nx.png,1.5,2\ny.png,1,5,2\n",
            "utf-8",
            "line 3 has 4 fields for 3 columns; write n",
        ),
        ("a,b,a\n1,2,3\n", "utf-8", "names the column 'a' twice"),
    ],
)
def test_bad_tables_are_named(table, text, encoding, message):
    with pytest.raises(DataError, match=rf"t\.csv'.*{message}"):
        read_csv(table(text, encoding), ["a"])
    assert read_csv(table("a,,\n1,,\n"), ["a"])["a"] == ["1"]  # spreadsheets end lines so


def test_wrong_fields_are_counted_and_the_first_are_shown():
    columns = {"a": ["1", "x", "2", " ", "", "p", "q", "3", "r"]}
    message = r"column 'a' is \['x', ' ', '', 'p', 'q'\] in 6 lines \(3, 5, 6, 7, 8, \.\.\.\); every row needs a number"
    with pytest.raises(DataError, match=message):
        parsed(Path("t.csv"), columns, "a", int, "a number")
    assert parsed(Path("t.csv"), {"a": [" 3 "]}, "a", int, "a number") == [3]


def test_lines_are_those_of_the_file(table):
    """Blank lines count, and so do the further lines of a field in quotes."""
    path = table('a,b\n\n1,"x\ny"\n\n\nz,x\n1,x\n')
    columns = read_csv(path, ["a"])
    with pytest.raises(DataError, match=r"column 'a' is \['z'\] in lines 7; every"):
        parsed(path, columns, "a", int, "a number")
    with pytest.raises(DataError, match="lines 3 and 8 have the same a '1'"):
        check_unique(path, columns, "a", columns["a"])


@pytest.mark.parametrize("text", ["1_0", "9" * 19, "1_0.5"])
def test_underscores_are_no_digits_and_numbers_fit(tmp_path, text):
    for read in (lambda: coordinates(tmp_path, {"lon": [text], "lat": ["0"]}), lambda: whole_number(text)):
        with pytest.raises(ValueError, match=text):
            read()


def test_values_of_tables_are_written_as_in_csv():
    values = [3.0, 4, float("nan"), None, pd.NA, np.float32(1.5), "nan"]
    table = text_table({"path": values, "location": values, "lon": values})
    assert table["location"] == ["3", "4", "-1", "-1", "-1", "1.5", "nan"]
    assert table["path"] == ["3", "4", "", "", "", "1.5", "nan"]
    assert table["lon"] == ["3", "4", "nan", "nan", "nan", "1.5", "nan"]
    with pytest.raises(DataError, match=r"rows: the columns have \[1, 2\] entries; give one for each image"):
        text_table({"path": ["a", "b"], "location": [1]})


def test_swapped_coordinates_are_suspected(tmp_path):
    with pytest.raises(DataError, match=r"column 'lat' is \['120.4'\].*are longitude and latitude swapped\?"):
        coordinates(tmp_path, {"lon": ["52.5"], "lat": ["120.4"]})
    with pytest.raises(DataError, match=r"or nan where unknown$"):
        coordinates(tmp_path, {"lon": ["52.5"], "lat": ["abc"]})


def test_backslashes_separate_folders_unless_they_are_in_the_name(tmp_path):
    assert below(tmp_path)("a\\b.png") == str(tmp_path / "a" / "b.png")
    (tmp_path / "a\\b.png").touch()
    assert below(tmp_path)("a\\b.png") == str(tmp_path / "a\\b.png")
    with pytest.raises(ValueError, match=r"\.\./x"):
        below(tmp_path)("..\\x")


def test_coordinates_in_degrees(tmp_path):
    lonlat = coordinates(tmp_path, {"lon": ["-180", "nan"], "lat": ["90", "nan"]})
    np.testing.assert_array_equal(lonlat, np.float32([[-180, 90], [np.nan, np.nan]]))
    for lon, lat in (("180.1", "0"), ("0", "-90.5"), ("inf", "0")):
        with pytest.raises(DataError, match="in lines 3"):
            coordinates(tmp_path, {"lon": ["-180", lon], "lat": ["90", lat]})


@pytest.mark.parametrize("text", ["../x.png", "a/../../x.png", "/etc/x.png", ".."])
def test_paths_stay_below_their_folder(text):
    assert below(Path("data"))("a/..b.png") == str(Path("data/a/..b.png"))
    with pytest.raises(ValueError, match=text.replace(".", r"\.")):
        below(Path("data"))(text)


def test_numbers_keep_their_zeros_and_names_are_of_the_list():
    assert number("004") == "004"
    for text in ("-1", "1/2", "1.0", "\u0664"):
        with pytest.raises(ValueError, match=text):
            number(text)
    assert choice("a", "b")("b") == "b"
    with pytest.raises(KeyError):
        choice("a", "b")("c")
