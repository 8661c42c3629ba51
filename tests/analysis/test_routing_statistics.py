"""Statistics of tables in closed form and against scikit-learn, and of routing that follows parts or is random."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from sklearn.metrics import normalized_mutual_info_score

from timm_moe_dg.analysis.plots import plot_associations, plot_nulls
from timm_moe_dg.analysis.routing_statistics import (
    associate_attributes,
    associate_parts,
    cohens_kappa,
    count_parts,
    cramers_v,
    lift,
    normalized_mutual_information,
    overall,
    pair_invariance,
    permutation_test,
    rotated_patches,
    routing_invariance,
)
from timm_moe_dg.errors import ArgumentError, DataError

NAMES = ("background", "left wing", "right wing", "tail")


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


def test_empty_rows_and_columns_have_no_part():
    table = torch.tensor([[5, 1, 0], [0, 0, 0], [2, 8, 0]])
    small = table[[0, 2]][:, :2]
    assert cramers_v(table) == pytest.approx(cramers_v(small))
    nmi = normalized_mutual_information(torch.stack([table, table]))
    assert nmi.tolist() == pytest.approx([float(normalized_mutual_information(small))] * 2)
    assert lift(table).isnan().tolist() == [[False, False, True], [True, True, True], [False, False, True]]


def test_tables_that_say_nothing_and_extremes():
    assert math.isnan(cramers_v(torch.tensor([[3, 4]])))
    assert math.isnan(normalized_mutual_information(torch.zeros(2, 2)))
    assert float(normalized_mutual_information(torch.tensor([[3, 0], [0, 0]]))) == 1.0  # one group each
    assert cramers_v(torch.eye(3)) == pytest.approx(1.0)
    assert cramers_v(torch.ones(3, 4)) == pytest.approx(0.0, abs=1e-9)


def test_p_counts_the_draws_that_reach_the_value():
    assert permutation_test(torch.tensor(0.5), torch.tensor([0.1, 0.5, 0.7, 0.2])).p == pytest.approx(3 / 5)
    assert math.isnan(permutation_test(torch.tensor(float("nan")), torch.zeros(3)).p)


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
    assert association.shares[0].tolist() == [0, 0, 1, 0, 0, 0]


def test_random_routing_is_not_significant():
    """Under the null p is uniform: 60 of them pass a Kolmogorov-Smirnov test, and 5% or so are below 0.05."""
    values = []
    for seed in range(60):
        members, _ = drawn(seed, images=12)
        first = torch.randint(0, 4, (12, 16), generator=torch.Generator().manual_seed(1000 + seed))
        values.append(associate_parts(members, NAMES, first, 4, permutations=59).nmi.p)
    assert kstest(values, "uniform").pvalue > 0.01
    assert sum(value <= 0.05 for value in values) <= 9


def test_attributes_count_first_choices_of_whole_images():
    attributes = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
    first = torch.tensor([[0, 0, 1], [1, 1, 1]])
    names = ("color::red", "size::small", "color::blue")
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


@pytest.mark.parametrize("num_experts", [1, 17])
def test_tables_with_empty_rows_and_nulls_are_drawn(num_experts, tmp_path, figures):
    members = torch.zeros(2, 3, 17, dtype=torch.bool)
    members[:, 0, :4] = members[:, 1, 4:] = True  # the third part is nowhere
    parts = associate_parts(members, NAMES[:3], torch.arange(34).view(2, 17) % num_experts, num_experts, 9)
    plot_associations({"a": parts, "b": parts}, tmp_path / "table.png")
    plot_nulls({"a": parts.nmi, "b": parts.nmi}, "NMI", tmp_path / "nulls.png")
    table, nulls = figures
    assert [text.get_text() for text in table.axes[0].get_yticklabels()] == [
        f"{g}: {name}" for g in "ab" for name in NAMES[:3]
    ]
    assert np.allclose(table.axes[0].images[0].get_array().filled(0), parts.shares.nan_to_num().repeat(2, 1))
    assert [line.get_xdata()[0] for line in nulls.axes[0].lines[1::2]] == [parts.nmi.value] * 2
