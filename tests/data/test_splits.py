"""Seeds and splits against the Mersenne Twister and its shuffle, written out; no group of images in two parts."""

import hashlib
import random
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest

from timm_moe_dg.data import FolderDomain, Split, seed_hash, split_domain, split_domains, training_domains
from timm_moe_dg.data.splits import (
    check_groups,
    domain_positions,
    group_part,
    image_groups,
    make_splits,
    split_by_group,
)
from timm_moe_dg.errors import MoeDgError, ProtocolError


def shuffled(size, seed):
    """Fisher-Yates from the end by Python's MT19937, seeded as by init_genrand (Matsumoto and Nishimura, 1998)."""
    state, items, twister = [seed], list(range(size)), random.Random()
    for index in range(1, 624):
        state.append((1812433253 * (state[-1] ^ state[-1] >> 30) + index) & 0xFFFFFFFF)
    twister.setstate((3, (*state, 624), None))
    for last in range(size - 1, 0, -1):
        # Uniform on 0..last: low bits of a word, drawn again while too large
        mask = (1 << last.bit_length()) - 1
        while (other := twister.getrandbits(32) & mask) > last:
            pass
        items[last], items[other] = items[other], items[last]
    return items


@pytest.mark.parametrize(
    ("parts", "expected"),
    # The last 31 bits of `printf TEXT | md5sum`
    [((0, 0), 894182419), ((2, 5), 941488192), (("PACS", "ERM", [0], 0, 0), 94828300)],
)
def test_seed_hash_is_md5_of_the_text(parts, expected):
    assert seed_hash(*parts) == expected


@pytest.mark.parametrize(("size", "trial_seed", "domain"), [(5, 0, 0), (300, 0, 0), (299, 2, 5), (1670, 1, 3)])
def test_split_is_the_written_out_shuffle(size, trial_seed, domain):
    split = split_domain(size, domain, trial_seed=trial_seed, holdout_fraction=0.2)
    expected = shuffled(size, seed_hash(trial_seed, domain))
    assert list(split.outside) == expected[: size // 5]
    assert list(split.inside) == expected[size // 5 :]


def of_size(size, name="photo"):
    return FolderDomain(name, ("cat",), [0] * size, [""] * size)


def test_a_training_domain_needs_validation_images_and_a_test_domain_none():
    for fraction in (0.0, 0.2, 1.0):
        with pytest.raises(ProtocolError, match=rf"holdout_fraction={fraction}"):
            split_domains([of_size(4, "sketch"), of_size(10)], [0, 1], trial_seed=0, holdout_fraction=fraction)
    splits = split_domains([of_size(4, "sketch"), of_size(10)], training=[1], trial_seed=0)
    assert (len(splits[0].inside), len(splits[0].outside)) == (4, 0)


DOMAINS = ["art", "photo", "2019", "1"]


@pytest.mark.parametrize(
    ("given", "positions"),
    [
        (["photo"], [1]),
        (["photo", "art"], [1, 0]),
        ([3, 0], [3, 0]),
        (["3", "0", "photo"], [3, 0, 1]),
        (["2019"], [2]),  # no position, but a name
        ([1], [1]),
        (["none"], []),
        (["photo", "sketch"], None),
        (["1"], None),  # a name and a position
    ],
)
def test_domains_are_found_by_name_and_by_position(given, positions):
    if positions is None:
        with pytest.raises(ProtocolError, match=r"^test_domains="):
            domain_positions(given, DOMAINS)
    else:
        assert domain_positions(given, DOMAINS) == positions


def test_a_name_may_be_given_in_another_form_of_its_letters():
    for given, name in permutations([normalize("NFC", "Zürich"), normalize("NFD", "Zürich")]):
        assert domain_positions([given], ["a", name]) == [1]
        assert domain_positions([given], ["a", "b"], groups=["c", name]) == [1]


@pytest.mark.parametrize("names", [["1", "2", "3"], ["01", "02", "03"], ["0", "1", "2"], ["none", "b", "c"]], ids=str)
def test_a_text_means_its_domain_or_is_refused(names):
    for text in ["0", "1", "2", "3", "01", "03", "none", "b"]:
        meanings = {position for position, name in enumerate(names) if text == name or text == str(position)}
        meanings |= {position for position, name in enumerate(names) if name.isdecimal() and text == str(int(name))}
        if len(meanings) == 1 and text != "none":
            assert domain_positions([text], names) == list(meanings)
        elif len(meanings) > 1 or text in names:
            with pytest.raises(ProtocolError, match=rf"test_domains=\['{text}'\]: .* give @\d for"):
                domain_positions([text], names)


@pytest.mark.parametrize("test_domains", [[0, 0], [3], [-1], [0, 1, 2]])
def test_test_domains_are_different_ones_and_leave_some_to_train_on(test_domains):
    assert training_domains(["a", "b", "c"], [1]) == [0, 2]
    with pytest.raises(ProtocolError, match="test_domains="):
        training_domains(["a", "b", "c"], test_domains)


STYLES = ("Candy", "Mosaic", "Natural", "Udnie")
TRAINED = (0, 2, 3)


@pytest.fixture(scope="module")
def photographs() -> list[FolderDomain]:
    stems = [f"{label:03d}.Bird/Bird_{label}_{index}" for label in range(20) for index in range(30)]
    # Natural is in another order and of another type: neither may matter
    orders = {style: stems[::-1] if style == "Natural" else stems for style in STYLES}
    endings = {style: "png" if style == "Natural" else "jpg" for style in STYLES}
    paths = {style: [f"{style}/{stem}.{endings[style]}" for stem in orders[style]] for style in STYLES}
    return [FolderDomain(style, ("bird",), [0] * len(stems), paths[style]) for style in STYLES]


def split_by_photograph(domains, training):
    return make_splits(domains, training, {"split_by_photograph": True, "trial_seed": 0}, checking=True)


def stems(domain: FolderDomain, positions) -> set[str]:
    return {Path(domain.paths[position]).stem for position in positions}


def test_no_photograph_of_a_test_domain_is_trained_on_in_any_style(photographs):
    splits = split_by_photograph(photographs, training=list(TRAINED))
    trained = set().union(*(stems(photographs[index], splits[index].inside) for index in TRAINED))
    validated = set().union(*(stems(domain, split.outside) for domain, split in zip(photographs, splits, strict=True)))
    tested = stems(photographs[1], splits[1].inside)
    assert tested
    assert not trained & tested
    assert not trained & validated
    assert not tested & validated
    assert len(trained | tested | validated) == 600
    plain = split_domains(photographs, TRAINED, trial_seed=0)  # which does leak
    trained = set().union(*(stems(photographs[index], plain[index].inside) for index in TRAINED))
    assert len(trained & stems(photographs[1], plain[1].inside)) / len(plain[1].inside) > 0.95


def test_the_part_is_the_md5_of_the_stem_as_a_fraction_in_shares_of_three_to_one_to_one():
    parts = Counter()
    for stem in (f"Bird_{number}" for number in range(10_000)):
        value = int(hashlib.md5(stem.encode()).hexdigest()[:16], 16) / 16**16
        assert group_part(stem) == ("test" if value < 0.2 else "validation" if value < 0.4 else "train")
        parts[group_part(stem)] += 1
    for part, share in (("train", 0.6), ("validation", 0.2), ("test", 0.2)):
        assert parts[part] / 10_000 == pytest.approx(share, abs=0.02)  # 4 to 5 standard deviations


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


def test_groups_of_one_domain_are_shuffled_by_the_trial_seed_and_its_position():
    names = [f"P{number}" for number in range(10) for _ in range(2)]
    domain = FolderDomain("a", ("x",), [0] * 20, ["x"] * 20)
    (split,) = split_by_group([domain], [0], [names], trial_seed=2, holdout_fraction=0.2, positions=[3])
    first = [f"P{number}" for number in shuffled(10, seed_hash(2, 3))[:2]]
    assert split.outside.tolist() == [row for row, name in enumerate(names) if name in first]


def test_the_part_of_a_group_of_one_domain_depends_on_the_seed_and_that_of_several_on_the_name():
    domains, groups = grouped(0)
    first, second = (split_by_group(domains, [0, 1, 2, 3], groups, trial_seed=n, holdout_fraction=0.2) for n in (0, 1))
    assert first[0].outside.tolist() != second[0].outside.tolist()
    for name in set(groups[0]) & set(groups[1]):
        rows = {row for row, member in enumerate(groups[0]) if member == name}
        for split in (first[0], second[0]):
            assert (rows <= set(split.outside.tolist())) == (group_part(name) == "validation")
            assert (rows <= set(split.inside.tolist())) == (group_part(name) == "train")


PATHS = ["a/P1_0.png", "a/P1_1.png", "b/P2_0.png"]
LACKING = "path,patient\na/P1_0.png,A\n"


def of_paths(root: Path, text: str | None = None, **args) -> list[list[str]] | None:
    if text:
        (root / "metadata.csv").write_text(text)
    files = [str(root / path) for path in PATHS]
    domains = [FolderDomain("d", ("x",), [0] * 2, files[:2]), FolderDomain("e", ("x",), [0], files[2:])]
    return image_groups(domains, {"data_dir": str(root), **args})


def test_groups_that_leave_nothing_are_refused(caplog):
    domains = [FolderDomain(name, ("x", "y"), [0, 0, 1, 1], [name] * 4) for name in "ab"]
    groups = [["P1"] * 4, ["P2", "P3", "P4", "P4"]]
    official = replace(domains[1], split=Split(np.array([0, 2]), np.array([1, 3])))
    for last, training in ((domains[1], [0, 1]), (domains[1], [1]), (official, [1])):
        both = [domains[0], last]
        splits = split_by_group(both, training, groups, trial_seed=0, holdout_fraction=0.2)
        if last is official or 0 in training:  # parts that share a group, or no validation group
            with pytest.raises(ProtocolError, match=r"group_column='p'.* P[14]"):
                check_groups(both, training, groups, splits, "group_column='p'")
        else:
            check_groups(both, training, groups, splits, "group_column='p'")
            assert "one group holds all training images of the classes 'y'" in caplog.text


def test_groups_come_from_a_pattern_or_a_column(tmp_path):
    assert of_paths(tmp_path) is None
    assert of_paths(tmp_path, group_column=r"(P\d+)_") == [["P1", "P1"], ["P2"]]
    assert of_paths(tmp_path, group_column=r"^(\w)/P(\d+)") == [["a/1", "a/1"], ["b/2"]]
    rows = "path;patient\nb/P2_0.png;B\n./a/P1_0.png;A\na/P1_1.png;C\nz.png;D\n"
    assert of_paths(tmp_path, rows, group_column="patient") == [["A", "C"], ["B"]]


@pytest.mark.parametrize(
    ("column", "rows", "options"),
    [
        (r"(P\d+)_1", None, {}),  # lacking in two of three images
        ("(P", None, {}),
        ("patient", None, {}),
        ("plot", LACKING, {}),
        ("patient", LACKING, {}),
        ("patient", LACKING.replace("A", "NaN"), {}),
        ("patient", LACKING[:-2], {}),
        ("patient", "path,patient\na/P1_0.png,7\na/P1_1.png,07\nb/P2_0.png,B\n", {}),  # of one spelling
        (r"(P\d+)_", None, {"split_by_photograph": True}),
    ],
)
def test_bad_columns_and_patterns_are_refused(tmp_path, column, rows, options):
    with pytest.raises(MoeDgError, match=r"group_column=|columns plot|'patient' is \["):
        of_paths(tmp_path, rows, group_column=column, **options)
