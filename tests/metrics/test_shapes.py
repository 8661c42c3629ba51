"""Vectors that do not belong together are refused by every metric in the same words."""

import pytest
import torch

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.metrics._shapes import check_vectors


def test_vectors_of_one_length_pass_empty_ones_too():
    for size in (0, 3):
        check_vectors(predicted=torch.zeros(size), target=torch.zeros(size))


@pytest.mark.parametrize("shape", [(3,), (), (2, 1)])
def test_other_shapes_are_named(shape):
    with pytest.raises(ArgumentError, match=r"^predicted, target=\[\(2,\), .*: give two vectors of equal length$"):
        check_vectors(predicted=torch.zeros(2), target=torch.zeros(shape))
