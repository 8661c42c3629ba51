"""Seeds and splits against an independent derivation: the Mersenne Twister and its shuffle, written out."""

import numpy as np
import pytest

from timm_moe_dg.data import FolderDomain, seed_hash, split_domain, split_domains, training_domains
from timm_moe_dg.errors import ProtocolError

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


def test_split_rounds_down_and_leaves_nothing_out():
    split = split_domain(9, 0, trial_seed=0, holdout_fraction=0.25)
    assert len(split.outside) == 2
    assert sorted([*split.inside, *split.outside]) == list(range(9))


def of_size(size, name="photo"):
    return FolderDomain(name, ("cat",), [0] * size, [""] * size)


def test_splits_follow_the_position_among_all_domains():
    domains = [of_size(40), of_size(40), of_size(40)]
    splits = split_domains(domains, training=[0, 2], trial_seed=1)
    for position, split in enumerate(splits):
        np.testing.assert_array_equal(split.inside, split_domain(40, position, trial_seed=1).inside)
    assert not np.array_equal(splits[0].inside, splits[2].inside)


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


def test_training_domains_are_the_others():
    assert training_domains(["a", "b", "c", "d"], [1]) == [0, 2, 3]
    assert training_domains(["a", "b", "c", "d"], [3, 0]) == [1, 2]


@pytest.mark.parametrize("held_out", [[4], [-1], [0, 0], []], ids=str)
def test_test_domains_that_do_not_exist(held_out):
    with pytest.raises(ProtocolError, match="0 a, 1 b, 2 c, 3 d"):
        training_domains(["a", "b", "c", "d"], held_out)


@pytest.mark.parametrize("names", [["only"], ["one", "two"]], ids=str)
def test_holding_out_everything(names):
    with pytest.raises(ProtocolError, match="none is left to train on"):
        training_domains(names, list(range(len(names))))
