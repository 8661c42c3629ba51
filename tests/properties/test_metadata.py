"""Places and numbers beside images: what is none is refused by name, and what is unknown is so and no more."""

import csv
import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from timm_moe_dg.data.readers.csv_tables import number, read_csv
from timm_moe_dg.errors import DataError, MetadataError
from timm_moe_dg.layers.encoders.location import LocationEncoder, LocationIdEmbedding, SinCosEncoder
from timm_moe_dg.layers.encoders.metadata import ColumnsEncoder, MetadataEncoder

ANY = st.floats(width=32)
LONGITUDES = st.floats(-180, 180, width=32)
LATITUDES = st.floats(-90, 90, width=32)
UNKNOWN = st.just(math.nan)
ENCODERS = {
    "harmonics": MetadataEncoder(LocationEncoder(4, 5, degrees=4)).eval(),
    "sincos": MetadataEncoder(SinCosEncoder(4, 5)).eval(),
}
COLUMNS = MetadataEncoder(ColumnsEncoder(SinCosEncoder(4, 5), {"hour": (12.0, 6.0)})).eval()
TABLE = MetadataEncoder(LocationIdEmbedding(7, 4)).eval()


def encoded(encoder, metadata):
    return encoder(torch.zeros(len(metadata), 1), metadata)


@pytest.mark.filterwarnings("ignore:all coordinates lie within pi")
@given(st.sampled_from(sorted(ENCODERS)), st.lists(st.tuples(ANY, ANY), max_size=5))
@example("sincos", [(180.0, -90.0), (math.nan, 91.0)])
@example("sincos", [(180.5, 0.0)])
@example("harmonics", [(0.0, -90.5)])
@example("harmonics", [(-180.0, 90.0), (0.0, math.nan)])
def test_a_place_is_within_the_degrees_or_unknown_or_refused(name, rows):
    metadata = torch.tensor(rows, dtype=torch.float32).view(-1, 2)
    if any(abs(longitude) > 180 or abs(latitude) > 90 for longitude, latitude in rows):
        with pytest.raises(MetadataError, match=r"longitude|latitude"):
            encoded(ENCODERS[name], metadata)
        return
    embedding, present = encoded(ENCODERS[name], metadata)
    assert present.tolist() == [not any(map(math.isnan, row)) for row in rows]
    assert embedding.isfinite().all()


@pytest.mark.filterwarnings("ignore:all coordinates lie within pi")
@given(st.lists(st.tuples(LONGITUDES | UNKNOWN, LATITUDES, st.floats(-1e6, 1e6) | UNKNOWN), max_size=5))
def test_a_number_may_be_known_where_a_place_is_not(rows):
    embedding, present = encoded(COLUMNS, torch.tensor(rows, dtype=torch.float32).view(-1, 3))
    assert present.tolist() == [not (math.isnan(longitude) and math.isnan(hour)) for longitude, _, hour in rows]
    assert embedding.isfinite().all()
    for features, (longitude, _, hour) in zip(embedding[present], itertools.compress(rows, present), strict=True):
        assert not features[:4].any() or not math.isnan(longitude)
        assert not features[4:].any() or not math.isnan(hour)


@given(st.lists(st.integers(-3, 9), max_size=5))
def test_a_location_is_in_the_table_or_unknown_or_refused(ids):
    metadata = torch.tensor(ids, dtype=torch.int64)
    if any(index >= 7 for index in ids):
        with pytest.raises(MetadataError, match="location id"):
            encoded(TABLE, metadata)
        return
    embedding, present = encoded(TABLE, metadata)
    assert present.tolist() == [index >= 0 for index in ids]
    for features, index in zip(embedding, ids, strict=True):
        assert index < 0 or torch.equal(features, TABLE.encoder.table.weight[index])


FIELDS = st.one_of(
    st.floats(width=32).map(repr),
    st.floats(-200, 200).map(repr),
    st.sampled_from(
        ["", " ", "nan", "NaN", "1e3", "12.5 ", "0x10", "1,5", "=1+1", "--", "\u0661", "90.0000001", "5" * 400]
    ),
    st.text(st.characters(exclude_characters="\0\r\n", exclude_categories=["Cs"]), max_size=8),
)


def read(folder, rows):
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("lon", "lat"), *rows])
    return read_csv(folder / "metadata.csv", ("lon", "lat"))


def degrees(text, limit):
    """What a field is worth; None for none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isnan(value) or abs(value) <= limit else None


@given(st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=4))
@example([("180.5", "0")])
@example([("0", "-90.5")])
@example([("-180", "90")])
def test_coordinates_of_a_file_are_within_the_degrees_or_its_lines_are_named(tmp_path, rows):
    table = read(tmp_path, rows)
    wanted = [(degrees(longitude, 180), degrees(latitude, 90)) for longitude, latitude in rows]
    wrong = [line for line, pair in enumerate(wanted, start=2) if None in pair]
    if wrong:
        with pytest.raises(DataError, match=r"metadata\.csv.*column '(lon|lat)'.*lines (\d+, )*\d+") as caught:
            table.coordinates()
        assert "\n" not in str(caught.value)
        assert any(str(line) in str(caught.value) for line in wrong)
    else:
        np.testing.assert_array_equal(table.coordinates(), np.array(wanted, dtype=np.float32))


@given(st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=4))
def test_numbers_of_a_file_are_finite_or_unknown_or_its_lines_are_named(tmp_path, rows):
    table = read(tmp_path, rows)
    largest = float(np.finfo(np.float32).max)
    wanted = [[degrees(field, largest) for field in row] for row in rows]
    if any(None in row for row in wanted):
        with pytest.raises(DataError, match=r"metadata\.csv.*every row needs a number, or nan"):
            table.metadata(["lon", "lat"])
    elif all(degrees(field, limit) is not None for row in rows for field, limit in zip(row, (180, 90), strict=True)):
        values = table.metadata(["lon", "lat"])[:, 2:]
        assert not np.isinf(values).any()
        np.testing.assert_array_equal(values, np.array(wanted, dtype=np.float32))


@given(st.text(max_size=6))
@example("²")
@example("\u0661")  # a digit, elsewhere
def test_a_number_of_a_place_is_of_decimal_digits(text):
    if text and all(character in "0123456789" for character in text):
        assert number(text) == text
    else:
        with pytest.raises(ValueError, match=rf"^{re.escape(text)}$"):
            number(text)
