"""Statistics of tables against scipy, scikit-learn and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats.contingency import association, expected_freq
from sklearn.metrics import normalized_mutual_info_score

from timm_moe_dg.analysis.routing.association import (
    compared_with_null,
    cramers_v,
    jensen_shannon_distance,
    lift,
    normalized_mutual_information,
    permutation_test,
    row_shares,
)


@pytest.mark.parametrize(("rows", "columns", "largest"), [(2, 4, 3), (6, 2, 30), (16, 6, 900), (3, 3, 2)])
def test_against_scipy_and_scikit_learn(rows, columns, largest):
    table = np.random.default_rng(rows).integers(1, largest + 1, (rows, columns))
    found = torch.tensor(table)
    assert float(cramers_v(found)) == pytest.approx(association(table, method="cramer"), abs=1e-9)
    np.testing.assert_allclose(lift(found), table / expected_freq(table))
    labels = [np.repeat(index.ravel(), table.ravel()) for index in np.indices(table.shape)]
    nmi = float(normalized_mutual_information(found))
    assert nmi == pytest.approx(normalized_mutual_info_score(*labels), abs=1e-9)
    distance = float(jensen_shannon_distance(found[0], found[1]))
    assert distance == pytest.approx(jensenshannon(table[0], table[1], base=2), abs=1e-6)


def test_empty_rows_and_columns_have_no_part():
    table = torch.tensor([[5, 1, 0], [0, 0, 0], [2, 8, 0]])
    small = table[[0, 2]][:, :2]
    assert float(cramers_v(table)) == pytest.approx(float(cramers_v(small)))
    nmi = normalized_mutual_information(torch.stack([table, table]))
    assert nmi.tolist() == pytest.approx([float(normalized_mutual_information(small))] * 2)
    assert lift(table).isnan().tolist() == [[False, False, True], [True, True, True], [False, False, True]]
    assert row_shares(table)[1].isnan().all()
    assert jensen_shannon_distance(table[0], table[1]).isnan()


def test_tables_that_say_nothing():
    assert math.isnan(cramers_v(torch.tensor([[3, 4]])))
    assert math.isnan(normalized_mutual_information(torch.zeros(2, 2)))
    assert float(normalized_mutual_information(torch.tensor([[3, 0], [0, 0]]))) == 1.0  # one group each


def test_extremes():
    assert float(cramers_v(torch.eye(3))) == pytest.approx(1.0)
    assert float(cramers_v(torch.ones(3, 4))) == pytest.approx(0.0, abs=1e-9)
    assert float(jensen_shannon_distance(torch.tensor([2, 2, 0]), torch.tensor([5, 5, 0]))) == 0.0
    assert float(jensen_shannon_distance(torch.tensor([3, 0]), torch.tensor([0, 9]))) == pytest.approx(1.0)


def test_p_counts_the_draws_that_reach_the_value():
    test = compared_with_null(torch.tensor(0.5), torch.tensor([0.1, 0.5, 0.7, 0.2]))
    assert test.p == pytest.approx(3 / 5)
    assert permutation_test(torch.tensor(2.0), lambda: torch.tensor(1.0), 19).p == pytest.approx(1 / 20)
    assert math.isnan(compared_with_null(torch.tensor(float("nan")), torch.zeros(3)).p)
