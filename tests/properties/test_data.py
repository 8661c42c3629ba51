"""Splits are partitions that stay, and samplers count."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from timm_moe_dg.data import Domain, Split, split_domain, split_domains
from timm_moe_dg.data.loaders import StepSampler, TrainingDraws, training_loader

pytestmark = pytest.mark.slow  # some of them take two seconds

SEEDS = st.integers(0, 2**31 - 1)
SHARES = st.floats(0, 1, exclude_min=True, exclude_max=True)


@dataclass(frozen=True, eq=False)
class Numbers(Domain[int]):
    """Images of one pixel that say where they are from."""

    def image(self, index: int) -> Image.Image:
        return Image.new("RGB", (1, 1), (self.images[index], len(self.name), 0))


def numbers(name, targets):
    return Numbers(name, ("cat", "dog", "eel"), np.array(targets, dtype=int), list(range(len(targets))))


def pixels(image):
    """Where an image is from: its position, and its domain's by the length of its name."""
    return torch.tensor(image.getpixel((0, 0))[:2])


DOMAINS = st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=30), min_size=2, max_size=4).map(
    lambda all_targets: [numbers("x" * (index + 1), targets) for index, targets in enumerate(all_targets)]
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
    index = data.draw(st.integers(0, len(domains) - 1))
    object.__setattr__(domains[index], "split", official)
    actual = split_domains(domains, [], trial_seed=seed, holdout_fraction=share)
    assert actual[index] is official
    for position, (domain, split) in enumerate(zip(domains, actual, strict=True)):
        alone = split_domain(len(domain), position, trial_seed=seed, holdout_fraction=share)
        assert position == index or split.inside.tolist() == alone.inside.tolist()


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
    return [StepSampler(domains, **options, process=process, num_processes=processes) for process in range(processes)]


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
        numbers_of_step = range(step * first.batch_size, (step + 1) * first.batch_size)
        drawn = [draw for process in steps for draw in process[offset]]
        assert sorted(drawn) == sorted(itertools.product(chosen, numbers_of_step))
        shares = {len(process[offset]) for process in steps}
        assert shares == {first.width * first.batch_size // len(all_processes)}


@given(DOMAINS, SEEDS, st.booleans(), st.integers(0, 50), st.integers(1, 3))
def test_a_loader_draws_of_the_inside_part_and_goes_on_where_it_stopped(domains, seed, balanced, step, batch):
    splits = split_domains(domains, range(len(domains)), trial_seed=seed)
    draws = TrainingDraws(domains, splits, pixels, seed=seed, class_balanced=balanced)
    chosen = list(range(len(domains)))

    def from_step(first):
        return iter(training_loader(draws, StepSampler(chosen, batch, first_step=first), workers=0))

    whole, resumed = from_step(step), from_step(step + 1)
    next(whole)
    for minibatches, again in zip(next(whole), next(resumed), strict=True):
        assert all(torch.equal(*pair) for pair in zip(minibatches, again, strict=True))
    for index, (images, targets) in enumerate(next(whole)):
        assert len(images) == batch
        for (position, length), target in zip(images.tolist(), targets.tolist(), strict=True):
            assert length == index + 1
            assert position in splits[index].inside
            assert target == domains[index].targets[position]
