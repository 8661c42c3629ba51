"""The split by photograph: one part per photograph in all domains, and nothing tested on that was trained on."""

import hashlib
from pathlib import Path

import pytest

from timm_moe_dg.data import FolderDomain
from timm_moe_dg.data.splits import photograph_part, split_by_photograph, split_domains
from timm_moe_dg.errors import ProtocolError

STYLES = ("Candy", "Mosaic", "Natural", "Udnie")


@pytest.fixture
def domains() -> list[FolderDomain]:
    stems = [f"{label:03d}.Bird/Bird_{label}_{at}" for label in range(20) for at in range(30)]
    # Natural is in another order and of another type: neither may matter
    orders = {style: stems[::-1] if style == "Natural" else stems for style in STYLES}
    endings = {style: "png" if style == "Natural" else "jpg" for style in STYLES}
    paths = {style: [f"{style}/{stem}.{endings[style]}" for stem in orders[style]] for style in STYLES}
    return [FolderDomain(style, ("bird",), [0] * len(stems), paths[style]) for style in STYLES]


def stems(domain: FolderDomain, positions) -> set[str]:
    return {Path(domain.paths[position]).stem for position in positions}


def test_no_photograph_of_a_test_domain_is_trained_on_in_any_style(domains):
    splits = split_by_photograph(domains, training=[0, 2, 3])
    trained = set().union(*(stems(domains[at], splits[at].inside) for at in (0, 2, 3)))
    validated = set().union(*(stems(domain, split.outside) for domain, split in zip(domains, splits, strict=True)))
    tested = stems(domains[1], splits[1].inside)
    assert tested
    assert not trained & tested
    assert not trained & validated
    assert not tested & validated
    assert len(trained | tested | validated) == 600


def test_the_split_domain_by_domain_does_leak(domains):
    splits = split_domains(domains, [0, 2, 3], trial_seed=0)
    trained = set().union(*(stems(domains[at], splits[at].inside) for at in (0, 2, 3)))
    assert len(trained & stems(domains[1], splits[1].inside)) / len(splits[1].inside) > 0.95


def test_all_training_domains_train_on_the_same_photographs(domains):
    splits = split_by_photograph(domains, training=[0, 2, 3])
    assert stems(domains[0], splits[0].inside) == stems(domains[2], splits[2].inside)
    assert stems(domains[0], splits[0].outside) == stems(domains[1], splits[1].outside)


def test_the_part_is_the_md5_of_the_stem_as_a_fraction(domains):
    for path in domains[0].paths[:50]:
        value = int(hashlib.md5(Path(path).stem.encode()).hexdigest()[:16], 16) / 16**16
        assert photograph_part(path) == ("test" if value < 0.2 else "validation" if value < 0.4 else "train")


def test_shares_are_three_to_one_to_one():
    parts = [photograph_part(f"Bird_{number}.jpg") for number in range(10_000)]
    for part, share in (("train", 0.6), ("validation", 0.2), ("test", 0.2)):
        assert parts.count(part) / 10_000 == pytest.approx(share, abs=0.02)  # 4 to 5 standard deviations


def test_domains_that_are_no_files_or_too_few_are_refused(domains):
    with pytest.raises(ProtocolError, match="not made of image files"):
        split_by_photograph([type("Digits", (), {"name": "digits"})()], [0])
    of_training = {at for at, path in enumerate(domains[0].paths) if photograph_part(path) == "train"}
    with pytest.raises(ProtocolError, match="no validation photographs"):
        split_by_photograph([domains[0].without(set(range(len(domains[0]))) - of_training)], [0])
