"""Tables of places as domains: who is inside and outside, by role and group; what a table lacks."""

import numpy as np
import pytest

from timm_moe_dg.data import Places
from timm_moe_dg.data.readers.places import PARTS, domains_of
from timm_moe_dg.errors import DataError

PART = ["train", "id_val", "ood_test", "none", "train", "id_test", "ood_val", "id_val", "train"]
GROUP = ["b", "b", "c", "c", "a", "a", "c", "a", "b"]


def table(part=PART, group=GROUP) -> Places:
    """Row k is the gray image of level k, of class k % 2, taken at (k, -k)."""
    numbers = np.arange(len(part))
    images = [np.full((2, 2), number, dtype=np.uint8) for number in numbers]
    metadata = np.stack([numbers, -numbers], axis=1).astype(np.float32)
    return Places(("x", "y"), images, numbers % 2, metadata, np.array(part), np.array(group))


def rows(domain, part) -> list[int]:
    """Which rows of the table a part of a domain's split holds, by their pixels, labels and places."""
    found = [domain.image(index).getpixel((0, 0))[0] for index in part]
    assert [domain.targets[index] for index in part] == [row % 2 for row in found]
    np.testing.assert_array_equal(domain.metadata[part], [(row, -row) for row in found] or np.zeros((0, 2)))
    return found


def test_rows_go_to_the_domain_of_their_role_and_group():
    found = [
        (domain.name, domain.role, domain.group, rows(domain, domain.split.inside), rows(domain, domain.split.outside))
        for domain in domains_of(table())
    ]
    assert found == [
        ("train a", "train", "a", [4], [7]),
        ("train b", "train", "b", [0, 8], [1]),
        ("id a", "id", "a", [5], []),
        ("ood c", "ood", "c", [2], [6]),
    ]


def test_pooled_groups_are_trained_on_as_one_domain():
    first, *others = domains_of(table(), pooled=True)
    assert (first.name, first.group, rows(first, first.split.inside)) == ("train", "all", [0, 4, 8])
    assert [domain.name for domain in others] == ["id a", "ood c"]


def test_training_domains_that_are_not_the_groups():
    names = np.array(["m", "n", "n", "n", "n", "m", "m", "m", "o"])
    found = [
        (domain.name, domain.group, rows(domain, domain.split.inside), rows(domain, domain.split.outside))
        for domain in domains_of(table(), training=names)
    ]
    assert found == [
        ("train m", "m", [0], [7]),
        ("train n", "n", [4], [1]),
        ("train o", "o", [8], []),
        ("id a", "a", [5], []),
        ("ood c", "c", [2], [6]),
    ]


def test_a_group_called_all_does_not_take_in_the_others():
    first, second, *_ = domains_of(table(group=["all" if name == "a" else name for name in GROUP]))
    assert (first.group, rows(first, first.split.inside), rows(first, first.split.outside)) == ("all", [4], [7])
    assert (second.group, rows(second, second.split.inside)) == ("b", [0, 8])


@pytest.mark.parametrize("column", ["targets", "metadata", "part", "group"])
def test_a_table_cannot_be_changed(column):
    part = np.array(PART)
    places = Places(("x",), [""] * 9, np.zeros(9, int), np.zeros((9, 2)), part, np.array(GROUP))
    with pytest.raises(ValueError, match="read-only"):
        getattr(places, column)[0] = getattr(places, column)[1]
    part[0] = "none"  # whose array it was may still write to it


@pytest.mark.parametrize("lacking", [("train",), ("id_val",), ("id_test", "ood_test")])
def test_a_table_with_nothing_to_train_validate_or_test_on(lacking):
    kept = [row for row, part in enumerate(PART) if part not in lacking]
    with pytest.raises(DataError, match="needs images in train, in id_val, and in id_test or ood_test"):
        domains_of(table([PART[row] for row in kept], [GROUP[row] for row in kept]))
    assert set(PARTS) == set(PART) - {"none"}
