"""Cells: means and errors over trial seeds."""

from math import isnan

import numpy as np
import pytest

from timm_moe_dg.results.rendering import cell_text
from timm_moe_dg.results.table_columns import Cell, average


def test_mean_and_standard_error_over_trial_seeds():
    cell = Cell({0: 0.5, 1: 0.6, 2: 0.85}, expected=3)
    assert cell.mean == pytest.approx(0.65)
    assert cell.error == pytest.approx(np.std([0.5, 0.6, 0.85]) / np.sqrt(3))
    assert cell_text(cell) == "65.0 ± 8.5"


def test_one_seed_has_no_error_and_none_has_no_mean():
    assert cell_text(Cell({2: 0.5}, expected=1)) == "50.0"
    assert cell_text(Cell({2: 0.5, 0: 0.5}, expected=3)) == "50.0 ± 0.0 (2 of 3 seeds)"
    assert cell_text(Cell({}, expected=3)) == "missing"
    assert isnan(Cell({}, 3).mean)


def test_the_average_is_taken_within_a_seed():
    """Domains that vary against each other have an average that does not vary."""
    cells = [Cell({0: 0.2, 1: 0.8, 2: 0.1}, 3), Cell({0: 0.8, 1: 0.2}, 3)]
    assert average(cells).values == {0: 0.5, 1: 0.5}
    assert average(cells).error == 0.0
    assert cell_text(average(cells)) == "50.0 ± 0.0 (2 of 3 seeds)"
