"""Statistics of tables in closed form and against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score

from timm_moe_dg.analysis.routing.association import (
    cramers_v,
    jensen_shannon_distance,
    lift,
    normalized_mutual_information,
    permutation_test,
)


@pytest.mark.parametrize(("rows", "columns", "largest"), [(2, 4, 3), (6, 2, 30), (16, 6, 900), (3, 3, 2)])
def test_the_mutual_information_is_scikit_learns(rows, columns, largest):
    table = np.random.default_rng(rows).integers(1, largest + 1, (rows, columns))
    labels = [np.repeat(index.ravel(), table.ravel()) for index in np.indices(table.shape)]
    nmi = float(normalized_mutual_information(torch.tensor(table)))
    assert nmi == pytest.approx(normalized_mutual_info_score(*labels), abs=1e-9)


def test_two_by_two_by_hand():
    table = torch.tensor([[30, 10], [20, 40]])
    assert lift(table).tolist() == [[30 / 20, 10 / 20], [20 / 30, 40 / 30]]  # expected: 20, 20, 30, 30
    chi_squared = 10**2 / 20 * 2 + 10**2 / 30 * 2
    assert cramers_v(table) == pytest.approx((chi_squared / 100) ** 0.5)
    entropy = lambda *shares: -sum(share * math.log2(share) for share in shares)  # noqa: E731
    between = entropy((3 / 4 + 1 / 3) / 2, (1 / 4 + 2 / 3) / 2) - (entropy(3 / 4, 1 / 4) + entropy(1 / 3, 2 / 3)) / 2
    assert jensen_shannon_distance(table[0], table[1]) == pytest.approx(between**0.5)


def test_empty_rows_and_columns_have_no_part():
    table = torch.tensor([[5, 1, 0], [0, 0, 0], [2, 8, 0]])
    small = table[[0, 2]][:, :2]
    assert cramers_v(table) == pytest.approx(cramers_v(small))
    nmi = normalized_mutual_information(torch.stack([table, table]))
    assert nmi.tolist() == pytest.approx([float(normalized_mutual_information(small))] * 2)
    assert lift(table).isnan().tolist() == [[False, False, True], [True, True, True], [False, False, True]]
    assert math.isnan(jensen_shannon_distance(table[0], table[1]))


def test_tables_that_say_nothing_and_extremes():
    assert math.isnan(cramers_v(torch.tensor([[3, 4]])))
    assert math.isnan(normalized_mutual_information(torch.zeros(2, 2)))
    assert float(normalized_mutual_information(torch.tensor([[3, 0], [0, 0]]))) == 1.0  # one group each
    assert cramers_v(torch.eye(3)) == pytest.approx(1.0)
    assert cramers_v(torch.ones(3, 4)) == pytest.approx(0.0, abs=1e-9)
    assert jensen_shannon_distance(torch.tensor([2, 2, 0]), torch.tensor([5, 5, 0])) == 0.0
    assert jensen_shannon_distance(torch.tensor([3, 0]), torch.tensor([0, 9])) == pytest.approx(1.0)


def test_p_counts_the_draws_that_reach_the_value():
    assert permutation_test(torch.tensor(0.5), torch.tensor([0.1, 0.5, 0.7, 0.2])).p == pytest.approx(3 / 5)
    assert math.isnan(permutation_test(torch.tensor(float("nan")), torch.zeros(3)).p)
