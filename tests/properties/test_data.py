"""Splits are partitions that stay, and samplers count."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from timm_moe_dg.data import Domain, Split, split_domain, split_domains, training_domains
from timm_moe_dg.data.loaders import EvaluationImages, StepSampler, TrainingDraws, training_loader
from timm_moe_dg.data.splits import photograph_part, split_by_photograph
from timm_moe_dg.errors import ProtocolError

pytestmark = pytest.mark.slow  # some of them take two seconds

SEEDS = st.integers(0, 2**31 - 1)
SHARES = st.floats(0, 1, exclude_min=True, exclude_max=True)


@dataclass(frozen=True, eq=False)
class Numbers(Domain[int]):
    """Images of one pixel that say where they are from."""

    def image(self, index: int) -> Image.Image:
        return Image.new("RGB", (1, 1), (self.images[index], len(self.name), 0))


@dataclass(frozen=True, eq=False)
class Files(Numbers):
    """The same under names of files."""

    paths: tuple[str, ...] = ()


def numbers(name, targets):
    return Numbers(name, ("cat", "dog", "eel"), np.array(targets, dtype=int), list(range(len(targets))))


def pixels(image):
    """Where an image is from: its position, and its domain's by the length of its name."""
    return torch.tensor(image.getpixel((0, 0))[:2])


DOMAINS = st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=30), min_size=2, max_size=4).map(
    lambda all_targets: [numbers("x" * (at + 1), targets) for at, targets in enumerate(all_targets)]
)


@given(st.integers(0, 400), st.integers(0, 10), SEEDS, SHARES)
def test_a_split_is_a_partition_that_stays(size, position, seed, share):
    split = split_domain(size, position, trial_seed=seed, holdout_fraction=share)
    assert len(split.outside) == int(size * share)
    assert sorted([*split.inside, *split.outside]) == list(range(size))
    again = split_domain(size, position, trial_seed=seed, holdout_fraction=share)
    assert [part.tolist() for part in (again.inside, again.outside)] == [split.inside.tolist(), split.outside.tolist()]


@given(DOMAINS, SEEDS, SHARES, st.data())
def test_the_split_of_a_domain_does_not_depend_on_the_others(domains, seed, share, data):
    official = Split(np.array([0, 2]), np.array([1]))
    at = data.draw(st.integers(0, len(domains) - 1))
    object.__setattr__(domains[at], "split", official)
    found = split_domains(domains, [], trial_seed=seed, holdout_fraction=share)
    assert found[at] is official
    for position, (domain, split) in enumerate(zip(domains, found, strict=True)):
        alone = split_domain(len(domain), position, trial_seed=seed, holdout_fraction=share)
        assert position == at or split.inside.tolist() == alone.inside.tolist()


@given(st.integers(1, 6), st.lists(st.integers(-1, 6), max_size=4), st.lists(st.integers(0, 5), max_size=2))
def test_every_domain_is_trained_on_or_tested_on_or_the_choice_is_refused(number, test, set_apart):
    names = [f"domain {position}" for position in range(number)]
    positions = range(number)
    kept = [position for position in positions if position not in test]
    possible = test and kept and set(set_apart) <= set(test) <= set(positions) and len(set(test)) == len(test)
    if possible:
        assert training_domains(names, test, set_apart) == kept
    else:
        with pytest.raises(ProtocolError):
            training_domains(names, test, set_apart)


@given(st.lists(SEEDS, min_size=2, max_size=3), st.data())
def test_a_photograph_has_one_part_in_all_domains(seeds, data):
    # So many that each part has some
    photographs = [np.random.default_rng(seed).choice(300, 100, replace=False) for seed in seeds]
    domains = [
        Files(f"d{at}", ("cat",), [0] * len(own), [0] * len(own), paths=tuple(f"d{at}/cat/{each}.jpg" for each in own))
        for at, own in enumerate(photographs)
    ]
    held_out = data.draw(st.integers(0, len(domains) - 1))
    splits = split_by_photograph(domains, [at for at in range(len(domains)) if at != held_out])
    trained_on, tested_on = set(), set()
    for at, (domain, split) in enumerate(zip(domains, splits, strict=True)):
        assert not set(split.inside) & set(split.outside)
        inside = {domain.paths[position].rpartition("/")[2] for position in split.inside}
        assert {photograph_part(name) for name in inside} <= {"test" if at == held_out else "train"}
        (tested_on if at == held_out else trained_on).update(inside)
    assert not trained_on & tested_on


@st.composite
def samplers(draw):
    """Samplers of all processes of a run, and the step that they start at."""
    processes = draw(st.integers(1, 4))
    domains = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    options = {
        "batch_size": processes * draw(st.integers(1, 3)),
        "first_step": draw(st.integers(0, 1000)),
        "domains_per_step": draw(st.none() | st.integers(1, len(domains))),
        "seed": draw(SEEDS),
    }
    return [StepSampler(domains, **options, process=own, num_processes=processes) for own in range(processes)]


@given(samplers())
def test_every_draw_of_a_step_is_made_once_by_one_process(all_processes):
    first = all_processes[0]
    steps = [list(itertools.islice(sampler, 3)) for sampler in all_processes]
    for offset in range(3):
        step = first.first_step + offset
        chosen = first.domains_at(step)
        assert len(set(chosen)) == len(chosen) == first.width
        assert set(chosen) <= set(first.domains)
        assert all(sampler.domains_at(step) == chosen for sampler in all_processes)
        own = range(step * first.batch_size, (step + 1) * first.batch_size)
        drawn = [draw for process in steps for draw in process[offset]]
        assert sorted(drawn) == sorted(itertools.product(chosen, own))
        shares = {len(process[offset]) for process in steps}
        assert shares == {first.width * first.batch_size // len(all_processes)}


@given(DOMAINS, SEEDS, st.booleans(), st.integers(0, 50), st.integers(1, 3))
def test_a_loader_draws_of_the_inside_part_and_goes_on_where_it_stopped(domains, seed, balanced, step, batch):
    splits = split_domains(domains, range(len(domains)), trial_seed=seed)
    draws = TrainingDraws(domains, splits, pixels, seed, class_balanced=balanced)
    chosen = list(range(len(domains)))

    def from_step(first):
        return iter(training_loader(draws, StepSampler(chosen, batch, first), workers=0))

    whole, resumed = from_step(step), from_step(step + 1)
    next(whole)
    for minibatches, again in zip(next(whole), next(resumed), strict=True):
        assert all(torch.equal(*pair) for pair in zip(minibatches, again, strict=True))
    for at, (images, targets) in enumerate(next(whole)):
        assert len(images) == batch
        for (position, length), target in zip(images.tolist(), targets.tolist(), strict=True):
            assert length == at + 1
            assert position in splits[at].inside
            assert target == domains[at].targets[position]


@given(st.lists(st.sampled_from([0, 0, 0, 0, 1, 2]), min_size=1, max_size=60), SEEDS)
def test_balanced_draws_take_every_class_that_is_there_alike(targets, seed):
    domain = numbers("a", targets)
    splits = [Split(np.arange(len(targets)), np.array([], dtype=int))]
    draws = TrainingDraws([domain], splits, pixels, seed, class_balanced=True)
    classes = set(targets)
    counts = np.bincount([draws[0, number][1] for number in range(100)], minlength=3)
    assert set(np.flatnonzero(counts)) == classes
    # Seven standard deviations of a binomial count
    expected = 100 / len(classes)
    assert all(abs(counts[each] - expected) <= 7 * (expected * (1 - 1 / len(classes))) ** 0.5 for each in classes)


@given(DOMAINS, SEEDS, SHARES)
def test_an_evaluation_sees_every_image_once(domains, seed, share):
    splits = split_domains(domains, [], trial_seed=seed, holdout_fraction=share)
    images = EvaluationImages(domains, splits, pixels)
    seen = [(*image.tolist(), target, group) for image, target, group in (images[at] for at in range(len(images)))]
    expected = [
        (position, at + 1, domain.targets[position], 2 * at + (position in splits[at].outside))
        for at, domain in enumerate(domains)
        for position in range(len(domain))
    ]
    assert sorted(seen) == sorted(expected)


@given(DOMAINS, st.data())
def test_leaving_images_out_keeps_the_others_and_their_split(domains, data):
    domain = domains[0]
    object.__setattr__(domain, "split", split_domain(len(domain), 0, trial_seed=0))
    left_out = data.draw(st.sets(st.integers(0, len(domain) - 1)))
    fewer = domain.without(left_out)
    kept = [position for position in range(len(domain)) if position not in left_out]
    assert list(fewer.images) == kept
    assert list(fewer.targets) == [domain.targets[position] for position in kept]
    for part in ("inside", "outside"):
        before = [position for position in getattr(domain.split, part) if position in kept]
        assert [fewer.images[position] for position in getattr(fewer.split, part)] == before
