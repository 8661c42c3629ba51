"""Patches of parts, and associations of routing that follows them or is random."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from timm_moe_dg.analysis.routing.parts import (
    area_members,
    associate_attributes,
    associate_parts,
    count_parts,
    grouped,
    nearest_patches,
    patch_centers,
    point_members,
    sides,
)
from timm_moe_dg.errors import ArgumentError

NAMES = ("background", "left wing", "right wing", "tail")


def test_centers_run_in_rows():
    centers = patch_centers((2, 3), (32, 48))
    assert centers.tolist() == [[8, 8], [24, 8], [40, 8], [8, 24], [24, 24], [40, 24]]


def test_the_nearest_nine_by_hand():
    """14 x 14 patches of 16 pixels: at a center a 3 x 3 block; in a corner the nine of its quarter disc."""
    centers = patch_centers((14, 14), (224, 224))
    block = nearest_patches(torch.tensor([5 * 16 + 8.0, 3 * 16 + 8.0]), centers)
    assert block[0] == 3 * 14 + 5
    assert sorted(block.tolist()) == sorted(r * 14 + c for r in (2, 3, 4) for c in (4, 5, 6))
    corner = nearest_patches(torch.tensor([0.0, 0.0]), centers)
    squares = {r * 14 + c: (16 * c + 8) ** 2 + (16 * r + 8) ** 2 for r in range(14) for c in range(14)}
    assert corner.tolist() == sorted(squares, key=lambda index: (squares[index], index))[:9]  # ties: the lower index


def test_points_count_where_they_are_visible_and_the_rest_of_the_box_is_no_background():
    centers = patch_centers((4, 4), (64, 64))
    points = torch.tensor([[[24.0, 24.0], [40.0, 40.0]]])
    members = point_members(points, torch.tensor([[True, False]]), torch.tensor([[16.0, 16.0, 32.0, 32.0]]), centers)
    assert members.shape == (1, 3, 16)
    assert members[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert not members[0, 1].any()  # not visible
    assert (~members[0, 2]).nonzero().flatten().tolist() == [5, 6, 9, 10]


def test_areas_count_for_the_part_with_most_pixels():
    maps = torch.zeros(1, 4, 4, dtype=torch.long)
    maps[0, 0, :2] = 1
    maps[0, 1, 0] = 1  # three of four pixels
    maps[0, 2:, 2] = 2  # two of four: a tie with the background
    maps[0, 2:, 0:2] = 3
    assert area_members(maps, 4, (2, 2))[0].long().argmax(0).tolist() == [1, 0, 3, 0]


def drawn(seed=0, images=60, patches=16):
    """Parts of patches at random, one each, and which they are."""
    parts = torch.randint(0, 4, (images, patches), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.one_hot(parts, 4).transpose(1, 2).bool(), parts


def test_counting_is_a_loop():
    members, _ = drawn(images=5)
    members[0, 2, 3] = True  # a patch of two parts
    first = torch.randint(0, 3, (5, 16), generator=torch.Generator().manual_seed(1))
    slow = np.zeros((4, 3))
    for image, part, patch in zip(*members.nonzero().T.tolist(), strict=True):
        slow[part, first[image, patch]] += 1
    assert count_parts(members, first, 3).tolist() == slow.tolist()
    with pytest.raises(ArgumentError, match="no patch"):
        associate_parts(torch.zeros_like(members), NAMES, first, 3, 9)


def test_known_routing_has_mutual_information_one():
    members, parts = drawn()
    association = associate_parts(members, NAMES, torch.tensor([2, 0, 3, 1])[parts], 6, permutations=99)
    assert association.nmi.value == pytest.approx(1.0)
    assert association.cramers_v == pytest.approx(1.0)
    assert association.nmi.p == pytest.approx(0.01)
    assert association.nmi.null.max() < 0.1
    assert association.sides == {"wing": pytest.approx(1.0)}
    assert association.shares[0].tolist() == [0, 0, 1, 0, 0, 0]
    association = associate_parts(members, NAMES, torch.tensor([0, 1, 1, 2])[parts], 3, permutations=9)
    assert association.sides["wing"] == pytest.approx(0.0, abs=1e-6)  # experts do not tell the sides apart


def test_random_routing_is_not_significant():
    """Under the null p is uniform: 60 of them pass a Kolmogorov-Smirnov test, and 5% or so are below 0.05."""
    values = []
    for seed in range(60):
        members, _ = drawn(seed, images=12)
        first = torch.randint(0, 4, (12, 16), generator=torch.Generator().manual_seed(1000 + seed))
        values.append(associate_parts(members, NAMES, first, 4, permutations=59, seed=seed).nmi.p)
    assert kstest(values, "uniform").pvalue > 0.01
    assert sum(value <= 0.05 for value in values) <= 9


def test_attributes_count_first_choices_of_whole_images():
    attributes = torch.tensor([[1, 0, 1], [0, 1, 1]]).bool()
    first = torch.tensor([[0, 0, 1], [1, 1, 1]])
    names = ("color::red", "color::blue", "size::small")
    associations = associate_attributes(attributes, names, first, 2, permutations=9)
    assert associations["color"].counts.tolist() == [[2, 1], [0, 3]]
    assert associations["size"].counts.tolist() == [[2, 4]]
    assert associations["color"].rows == ("red", "blue")
    assert associations["color"].lift[0, 0] == pytest.approx(2 * 6 / (3 * 2))


@pytest.mark.parametrize(("follows", "significant"), [(True, True), (False, False)])
def test_attributes_are_tested_by_exchanging_images(follows, significant):
    generator = torch.Generator().manual_seed(0)
    held = torch.randint(0, 2, (80,), generator=generator)
    other = torch.randint(0, 2, (80,), generator=generator)
    first = (held if follows else other)[:, None].expand(80, 9)
    attributes = torch.stack([held == 0, held == 1], dim=1)
    association = associate_attributes(attributes, ("a::x", "a::y"), first, 2, permutations=99)["a"]
    assert (association.nmi.p <= 0.01) == significant
    if follows:
        assert association.nmi.value == pytest.approx(1.0)


def test_images_of_one_picture_are_one_observation():
    """Five copies of each image change no value and no p value. As images of their own, chance would be significant."""
    generator = torch.Generator().manual_seed(0)
    (members, _), held = drawn(images=20), torch.randint(0, 2, (20,), generator=generator).bool()
    attributes, names = torch.stack([held, ~held], dim=1), ("a::x", "a::y")
    first = torch.randint(0, 4, (20, 16), generator=generator).where(torch.rand(20, 16, generator=generator) < 0.5, 0)
    copies, shown = [part.repeat(5, 1, 1) for part in (members, first[..., None])], [str(i) for i in range(20)] * 5
    once = associate_attributes(attributes, names, first, 4, 99)["a"].nmi
    tested = associate_attributes(attributes.repeat(5, 1), names, copies[1][..., 0], 4, 99, pictures=shown)["a"].nmi
    assert (tested.value, tested.p) == (pytest.approx(once.value), once.p)
    parts = associate_parts(members, NAMES, first, 4, 99).nmi
    tests = [associate_parts(copies[0], NAMES, copies[1][..., 0], 4, 99, pictures=names) for names in (shown, None)]
    together, apart = (float(test.nmi.null.mean() / parts.null.mean()) for test in tests)
    assert together == pytest.approx(1, rel=0.1)
    assert apart < 0.3


def test_names_make_groups_and_sides():
    assert grouped(("a::x", "b::y", "a::z", "c")) == {"a": [0, 2], "b": [1], "c": [3]}
    assert sides(("back", "left eye", "right eye", "left leg")) == {"eye": (1, 2)}
