"""Pictures of tables: bars are the table's means and errors, and what is missing stays missing."""

from math import isnan

import pytest

from timm_moe_dg.analysis.plots import bars_of
from timm_moe_dg.results.columns import Cell
from timm_moe_dg.results.runs import RowKey
from timm_moe_dg.results.tables import Table


def test_bars_are_percent_with_standard_errors_and_gaps():
    row = RowKey("ERM", "vit")
    cells = [Cell({0: 0.5, 1: 0.7}, 2), Cell({0: 0.25}, 2), Cell({}, 2)]
    (bars,) = bars_of(Table("toy", "oracle", "a table", ["a", "b", "c"], {row: cells})).values()
    assert bars.heights[:2] == pytest.approx([60.0, 25.0])
    assert isnan(bars.heights[2])
    assert bars.errors == pytest.approx([100 * 0.1 / 2**0.5, 0.0, 0.0])
