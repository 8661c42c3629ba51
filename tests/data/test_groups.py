"""Groups of images in splits: no group in two parts, in any protocol; columns and patterns; what is refused."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from timm_moe_dg.data import FolderDomain, Split
from timm_moe_dg.data.splits import check_groups, group_part, image_groups, split_by_group
from timm_moe_dg.errors import MoeDgError, ProtocolError


def grouped(seed: int, domains: int = 4, shared: float = 0.1) -> tuple[list[FolderDomain], list[list[str]]]:
    """Domains of groups of 1 to 9 images, some of which lie in two domains."""
    rng = np.random.default_rng(seed)
    groups: list[list[str]] = [[] for _ in range(domains)]
    for number in range(40 * domains):
        places = rng.permutation(domains)[: 2 if rng.random() < shared else 1]
        for place in places:
            groups[place] += [f"P{number}"] * int(rng.integers(1, 10))
    for members in groups:
        rng.shuffle(members)
    return [FolderDomain(str(i), ("x",), [0] * len(g), [f"{i}"] * len(g)) for i, g in enumerate(groups)], groups


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("held_out", [[], [0], [1, 3]], ids=str)
def test_no_group_is_in_two_parts_in_any_protocol(seed, held_out):
    domains, groups = grouped(seed)
    training = [index for index in range(4) if index not in held_out]
    splits = split_by_group(domains, training, groups, trial_seed=seed, holdout_fraction=0.2)
    again = split_by_group(domains, training, groups, trial_seed=seed, holdout_fraction=0.2)
    held: dict[str, set[str]] = {"train": set(), "validation": set(), "test": set()}
    counts = Counter(name for members in groups for name in set(members))
    for index, (members, split, same) in enumerate(zip(groups, splits, again, strict=True)):
        assert (split.inside.tolist(), split.outside.tolist()) == (same.inside.tolist(), same.outside.tolist())
        held["train" if index in training else "test"] |= {members[row] for row in split.inside}
        held["validation"] |= {members[row] for row in split.outside}
        used = {*split.inside.tolist(), *split.outside.tolist()}
        assert len(used) == len(split.inside) + len(split.outside)
        # Images of groups of one domain are all used, and a fifth of them goes out, but for a part of a group
        own = [row for row, name in enumerate(members) if counts[name] == 1]
        assert used >= set(own)
        assert abs(len(set(own) & set(split.outside.tolist())) - 0.2 * len(own)) <= 9 / 2
    assert not (held["train"] | held["test"]) & held["validation"]
    assert not held["train"] & held["test"]


def test_the_part_of_a_group_of_one_domain_depends_on_the_seed_and_that_of_several_on_the_name():
    domains, groups = grouped(0)
    first, second = (split_by_group(domains, [0, 1, 2, 3], groups, trial_seed=n, holdout_fraction=0.2) for n in (0, 1))
    assert first[0].outside.tolist() != second[0].outside.tolist()
    for name in set(groups[0]) & set(groups[1]):
        rows = {row for row, member in enumerate(groups[0]) if member == name}
        for split in (first[0], second[0]):
            assert (rows <= set(split.outside.tolist())) == (group_part(name) == "validation")
            assert (rows <= set(split.inside.tolist())) == (group_part(name) == "train")


def test_groups_that_leave_nothing_are_named(caplog):
    domains = [FolderDomain(name, ("x", "y"), [0, 0, 1, 1], [name] * 4) for name in "ab"]
    groups = [["P1"] * 4, ["P2", "P3", "P4", "P4"]]
    splits = split_by_group(domains, [0, 1], groups, trial_seed=0, holdout_fraction=0.2)
    with pytest.raises(
        ProtocolError, match=r"group_column='p': domain 'a' has no validation group among its 4 images of P1"
    ):
        check_groups(domains, [0, 1], groups, splits, "group_column='p'")
    splits = split_by_group(domains, [1], groups, trial_seed=0, holdout_fraction=0.2)
    check_groups(domains, [1], groups, splits, "group_column='p'")  # all of a test domain may be of one group
    assert "one group holds all training images of the classes 'y': training or validation lacks" in caplog.text
    official = replace(domains[1], split=Split(np.array([0, 2]), np.array([1, 3])))
    splits = split_by_group([domains[0], official], [1], groups, trial_seed=0, holdout_fraction=0.2)
    with pytest.raises(ProtocolError, match="own split has training and validation images of P4; correct its split"):
        check_groups([domains[0], official], [1], groups, splits, "group_column='p'")


PATHS = ["a/P1_0.png", "a/P1_1.png", "b/P2_0.png"]


def of_paths(root: Path, text: str | None = None, **args) -> list[list[str]] | None:
    if text:
        (root / "metadata.csv").write_text(text)
    files = [str(root / path) for path in PATHS]
    domains = [FolderDomain("d", ("x",), [0] * 2, files[:2]), FolderDomain("e", ("x",), [0], files[2:])]
    return image_groups(domains, {"data_dir": str(root), **args})


def test_groups_come_from_a_pattern_or_a_column(tmp_path):
    assert of_paths(tmp_path) is None
    assert of_paths(tmp_path, group_column=r"(P\d+)_") == [["P1", "P1"], ["P2"]]
    assert of_paths(tmp_path, group_column=r"^(\w)/P(\d+)") == [["a/1", "a/1"], ["b/2"]]
    rows = "path;patient\nb/P2_0.png;B\n./a/P1_0.png;A\na/P1_1.png;C\nz.png;D\n"
    assert of_paths(tmp_path, rows, group_column="patient") == [["A", "C"], ["B"]]


LACKING = "path,patient\na/P1_0.png,A\n"


@pytest.mark.parametrize(
    ("group_column", "rows", "message"),
    [
        (
            r"(P\d+)_1",
            None,
            r"group_column='.*': does not match 2 of 3 images, such as 'a/P1_0.png'; every image needs",
        ),
        ("(P", None, r"group_column='\(P': is no regular expression \(missing \).*\); give one such as"),
        (
            "patient",
            None,
            r"group_column='patient': is a column, and '.*' holds no metadata.csv; write it, or give a patt",
        ),
        (
            "plot",
            LACKING,
            r"lacks the columns plot; it has path, patient; name one of these, or give a pattern such as",
        ),
        (
            "patient",
            "path,patient\na/P1_0.png,7\na/P1_1.png,07\nb/P2_0.png,B\n",
            r"group_column='patient': these groups differ by spelling alone: '7' in the data, '07' in the",
        ),
        ("patient", LACKING.replace("A", "NaN"), r"column 'patient' is \['NaN'\] in lines 2; every row needs the name"),
        ("patient", LACKING, r"has no row in metadata.csv for 2 of 3 images, such as 'a/P1_1.png'"),
        ("patient", LACKING[:-2], r"column 'patient' is \[''\] in lines 2; every row needs the name of a group"),
    ],
)
def test_bad_columns_and_patterns_are_named(tmp_path, group_column, rows, message):
    with pytest.raises(MoeDgError, match=message) as caught:
        of_paths(tmp_path, rows, group_column=group_column)
    assert "\n" not in str(caught.value)
