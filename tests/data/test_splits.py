"""Seeds and splits against an independent derivation: the Mersenne Twister and its shuffle, written out."""

import hashlib
from pathlib import Path

import pytest

from timm_moe_dg.data import FolderDomain, get_benchmark, seed_hash, split_domain, split_domains
from timm_moe_dg.data.splits import group_part, make_splits
from timm_moe_dg.errors import ArgumentError, ProtocolError

# The last 31 bits of `printf TEXT | md5sum`
HASHES = [((0, 0), 894182419), ((2, 5), 941488192), (("PACS", "ERM", [0], 0, 0), 94828300)]


class Twister:
    """MT19937 (Matsumoto and Nishimura, 1998), seeded with one 32-bit number as their init_genrand does."""

    def __init__(self, seed):
        self.state = [seed]
        for index in range(1, 624):
            last = self.state[-1]
            self.state.append((1812433253 * (last ^ last >> 30) + index) & 0xFFFFFFFF)
        self.position = 624

    def next(self):
        if self.position == 624:
            for index in range(624):
                mixed = (self.state[index] & 0x80000000) | (self.state[(index + 1) % 624] & 0x7FFFFFFF)
                self.state[index] = self.state[(index + 397) % 624] ^ mixed >> 1 ^ (0x9908B0DF if mixed & 1 else 0)
            self.position = 0
        word = self.state[self.position]
        self.position += 1
        word ^= word >> 11
        word ^= word << 7 & 0x9D2C5680
        word ^= word << 15 & 0xEFC60000
        return word ^ word >> 18

    def up_to(self, limit):
        """Uniform on 0..limit: low bits of a word, drawn again while too large."""
        mask = (1 << limit.bit_length()) - 1
        while (value := self.next() & mask) > limit:
            pass
        return value


def shuffled(size, seed):
    """Fisher-Yates from the end."""
    twister, items = Twister(seed), list(range(size))
    for last in range(size - 1, 0, -1):
        other = twister.up_to(last)
        items[last], items[other] = items[other], items[last]
    return items


@pytest.mark.parametrize(("parts", "expected"), HASHES)
def test_seed_hash_is_md5_of_the_text(parts, expected):
    assert seed_hash(*parts) == expected


CASES = [(5, 0, 0), (300, 0, 0), (299, 2, 5), (1670, 1, 3)]


@pytest.mark.parametrize(("size", "trial_seed", "domain"), CASES)
def test_split_is_the_written_out_shuffle(size, trial_seed, domain):
    split = split_domain(size, domain, trial_seed=trial_seed, holdout_fraction=0.2)
    expected = shuffled(size, seed_hash(trial_seed, domain))
    assert list(split.outside) == expected[: size // 5]
    assert list(split.inside) == expected[size // 5 :]


def of_size(size, name="photo"):
    return FolderDomain(name, ("cat",), [0] * size, [""] * size)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.2, 20])
def test_fraction_outside_zero_to_one(fraction):
    with pytest.raises(ProtocolError, match=rf"holdout_fraction={fraction}"):
        split_domains([of_size(10)], training=[0], trial_seed=0, holdout_fraction=fraction)


def test_training_domain_without_validation_images_is_named_but_a_test_domain_may_be_tiny():
    with pytest.raises(ProtocolError, match="'sketch' has 4 images"):
        split_domains([of_size(4, "sketch"), of_size(10)], training=[0, 1], trial_seed=0)
    splits = split_domains([of_size(4, "sketch"), of_size(10)], training=[1], trial_seed=0)
    assert len(splits[0].inside) == 4
    assert len(splits[0].outside) == 0


STYLES = ("Candy", "Mosaic", "Natural", "Udnie")


@pytest.fixture
def domains() -> list[FolderDomain]:
    stems = [f"{label:03d}.Bird/Bird_{label}_{index}" for label in range(20) for index in range(30)]
    # Natural is in another order and of another type: neither may matter
    orders = {style: stems[::-1] if style == "Natural" else stems for style in STYLES}
    endings = {style: "png" if style == "Natural" else "jpg" for style in STYLES}
    paths = {style: [f"{style}/{stem}.{endings[style]}" for stem in orders[style]] for style in STYLES}
    return [FolderDomain(style, ("bird",), [0] * len(stems), paths[style]) for style in STYLES]


def split_by_photograph(domains, training):
    args = {"split_by_photograph": True, "trial_seed": 0}
    return make_splits(domains, training, args, checking=True)


def stems(domain: FolderDomain, positions) -> set[str]:
    return {Path(domain.paths[position]).stem for position in positions}


def test_no_photograph_of_a_test_domain_is_trained_on_in_any_style(domains):
    splits = split_by_photograph(domains, training=[0, 2, 3])
    trained = set().union(*(stems(domains[index], splits[index].inside) for index in (0, 2, 3)))
    validated = set().union(*(stems(domain, split.outside) for domain, split in zip(domains, splits, strict=True)))
    tested = stems(domains[1], splits[1].inside)
    assert tested
    assert not trained & tested
    assert not trained & validated
    assert not tested & validated
    assert len(trained | tested | validated) == 600


def test_the_split_domain_by_domain_does_leak(domains):
    splits = split_domains(domains, [0, 2, 3], trial_seed=0)
    trained = set().union(*(stems(domains[index], splits[index].inside) for index in (0, 2, 3)))
    assert len(trained & stems(domains[1], splits[1].inside)) / len(splits[1].inside) > 0.95


def test_the_part_is_the_md5_of_the_stem_as_a_fraction(domains):
    for path in domains[0].paths[:50]:
        value = int(hashlib.md5(Path(path).stem.encode()).hexdigest()[:16], 16) / 16**16
        assert group_part(Path(path).stem) == ("test" if value < 0.2 else "validation" if value < 0.4 else "train")


def test_shares_are_three_to_one_to_one():
    parts = [group_part(Path(f"Bird_{number}.jpg").stem) for number in range(10_000)]
    for part, share in (("train", 0.6), ("validation", 0.2), ("test", 0.2)):
        assert parts.count(part) / 10_000 == pytest.approx(share, abs=0.02)  # 4 to 5 standard deviations


def test_domains_that_are_no_files_or_too_few_are_refused(domains):
    with pytest.raises(ArgumentError, match="'rot_0' is not made of image files"):
        split_by_photograph(get_benchmark("rotated_digits").read(None), [0])
    of_training = {index for index, path in enumerate(domains[0].paths) if group_part(Path(path).stem) == "train"}
    with pytest.raises(ProtocolError, match="no validation group among its 355 images"):
        split_by_photograph([domains[0].without(set(range(len(domains[0]))) - of_training)], [0])
