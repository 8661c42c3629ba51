"""Corresponding patches: rotations are undone, and agreement is that of routing made up for the test."""

import numpy as np
import pytest
import torch

from timm_moe_dg.analysis.routing.invariance import (
    cohens_kappa,
    overall,
    pair_invariance,
    rotated_patches,
    routing_invariance,
)
from timm_moe_dg.errors import DataError


def grids(seed, number=20, side=6, experts=4):
    return torch.randint(0, experts, (number, side, side), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("quarters", [0, 1, 2, 3, -1])
@pytest.mark.parametrize("side", [4, 5])
def test_quarter_turns_are_those_of_numpy(quarters, side):
    grid = np.arange(side * side).reshape(side, side)
    turned = np.rot90(grid, quarters)  # counter-clockwise
    places = rotated_patches((side, side), 90.0 * quarters).tolist()
    assert turned.ravel()[places].tolist() == list(range(side * side))


def test_a_patch_is_where_its_center_went():
    """Rotates each center as a complex number, and searches the nearest one."""
    side, degrees = 7, 25.0
    middle = (side - 1) / 2
    centers = [(column - middle) - 1j * (row - middle) for row in range(side) for column in range(side)]  # y up
    for index, place in enumerate(rotated_patches((side, side), degrees).tolist()):
        went = centers[index] * np.exp(1j * np.radians(degrees))
        inside = max(abs(went.real), abs(went.imag)) < side / 2
        assert place == (int(np.argmin([abs(went - center) for center in centers])) if inside else -1)
    assert (rotated_patches((7, 7), 45.0) == -1).sum() > 0


def test_equal_routing_agrees_everywhere_and_unrelated_routing_as_often_as_permuted():
    first, other = grids(0).flatten(1), grids(1).flatten(1)
    same = pair_invariance(("a", "b"), first, first, 99)
    assert (same.agreement.value, same.kappa, same.agreement.p) == (1.0, 1.0, 0.01)
    assert same.agreement.null.mean() == pytest.approx(0.25, abs=0.03)
    unrelated = pair_invariance(("a", "b"), first, other, 99)
    assert unrelated.agreement.value == pytest.approx(0.25, abs=0.06)
    assert unrelated.agreement.p > 0.05
    assert np.isnan(cohens_kappa(torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long)))


def test_a_pattern_of_places_shows_in_other_pictures():
    """Routing by the place alone agrees with any other picture."""
    places = grids(0, number=1).flatten(1).expand(10, -1)
    pair = pair_invariance(("a", "b"), places, places, 19)
    assert pair.agreement.value == pair.other_pictures == 1.0
    single = torch.tensor([[0, 1], [2, 3]])  # each picture has experts of its own
    assert pair_invariance(("a", "b"), single, single, 19).other_pictures == 0.0
    assert np.isnan(pair_invariance(("a", "b"), places[:1], places[:1], 9).other_pictures)


def test_rotations_are_undone():
    upright = grids(0)
    turned = torch.tensor(np.rot90(upright.numpy(), axes=(1, 2)).copy())
    experts, pictures = {"a": upright, "b": turned}, dict.fromkeys(("a", "b"), tuple(map(str, range(20))))
    (undone,) = routing_invariance(experts, pictures, {"b": 90.0}, 19)
    assert undone.agreement.value == 1.0
    (ignored,) = routing_invariance(experts, pictures, {}, 19)
    assert ignored.agreement.value < 0.5


def test_pictures_are_paired_by_name():
    first = grids(0, number=4)
    experts = {"a": first, "b": first[[3, 0]], "c": grids(1, number=1)}
    pictures = {"a": ["p", "q", "r", "s"], "b": ["s", "p"], "c": ["z"]}
    (pair,) = routing_invariance(experts, pictures, {}, 9)
    assert (pair.domains, pair.pictures, pair.patches, pair.agreement.value) == (("a", "b"), 2, 36, 1.0)


def test_the_mean_of_pairs_is_tested_against_the_mean_of_nulls():
    experts = {name: grids(seed) for seed, name in enumerate("abc")}
    pairs = routing_invariance(experts, dict.fromkeys("abc", tuple(map(str, range(20)))), {}, 19)
    assert len(pairs) == 3
    test = overall(pairs)
    assert test.value == pytest.approx(np.mean([pair.agreement.value for pair in pairs]))
    assert test.null.tolist() == pytest.approx(np.mean([pair.agreement.null.numpy() for pair in pairs], axis=0))


def test_unpaired_domains_are_an_error():
    with pytest.raises(DataError, match="no two domains are known to hold the same pictures"):
        routing_invariance({"a": grids(0), "b": grids(1)}, {"a": ["x"] * 20, "b": ["y"] * 20}, {})
