"""Loaders: what is drawn depends on seed, domain and draw; evaluation sees everything once."""

import multiprocessing
import signal
import subprocess
import traceback
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import PILToTensor

from timm_moe_dg.data import (
    AugmentedValidation,
    Domain,
    EvaluationImages,
    FolderDomain,
    PlacesDomain,
    Split,
    StepSampler,
    TrainingDraws,
    evaluation_loader,
    evaluation_only,
    evaluation_transform,
    split_domains,
    training_loader,
    training_transform,
)
from timm_moe_dg.data.splits import test_positions as positions_of_test_domains
from timm_moe_dg.errors import ImageReadError, ProtocolError

SIZES = (30, 50, 41)
NEUTRAL = {"size": (8, 8), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
PHOTOGRAPH = training_transform("photograph", **NEUTRAL)


class Numbered(Domain):
    """A domain whose images say, in their red and green channel, which domain and which image they are."""

    @classmethod
    def of(cls, number, size):
        images = [(number, index) for index in range(size)]
        return cls(f"domain {number}", tuple("abcdefg"), [index % 7 for index in range(size)], images)

    def image(self, index):
        return Image.new("RGB", (4, 4), (*self.images[index], 0))


class Noisy(Numbered):
    """Images with structure, so that a crop shows."""

    def image(self, index):
        pixels = np.random.default_rng(self.images[index]).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        return Image.fromarray(pixels)


class Broken(Numbered):
    """Images that cannot be read."""

    def image(self, index):
        raise ImageReadError(f"image='{self.images[index][0]}/{index}.png': cannot be decoded")


def make_draws(kind=Numbered, transform=None, seed=3):
    domains = [kind.of(number, size) for number, size in enumerate(SIZES)]
    splits = split_domains(domains, training=[0, 1, 2], trial_seed=0)
    return TrainingDraws(domains, splits, transform or PILToTensor(), seed=seed)


def take(draws, steps, workers=0, **sampler):
    loader = training_loader(draws, StepSampler(**{"domains": [0, 2], "batch_size": 6, **sampler}), workers=workers)
    return list(islice(loader, steps))


def identities(images):
    return [(int(image[0, 0, 0]), int(image[1, 0, 0])) for image in images]


def drawn_by(draws, domain, numbers):
    return [identities(draws[domain, number][0][None])[0] for number in numbers]


def test_draws_come_from_the_inside_part_with_replacement():
    draws = make_draws()
    drawn = Counter(index for step in take(draws, 100) for _, index in identities(step[1][0]))
    inside = draws.splits[2].inside
    assert set(drawn) == set(inside.tolist())
    for balanced, first in ((False, [22, 7, 23, 31, 16]), (True, [40, 32, 38, 40, 28])):
        stream = drawn_by(replace(draws, class_balanced=balanced), 2, range(5))
        assert [index for _, index in stream] == first  # or a run of another release would not resume
    expected = 600 / len(inside)
    chi_square = sum((drawn[index] - expected) ** 2 / expected for index in inside.tolist())
    assert chi_square < 60  # 32 degrees of freedom: exceeded by one sound sampler in five hundred


def test_workers_and_other_domains_change_nothing():
    draws = make_draws(Noisy, PHOTOGRAPH)
    expected = take(draws, 5)
    for workers in (1, 2):
        for minibatches, others in zip(take(draws, 5, workers=workers), expected, strict=True):
            for batch, other in zip(minibatches, others, strict=True):
                assert all(map(torch.equal, batch, other))
    for alone, both in zip(take(draws, 5, domains=[2]), expected, strict=True):
        assert torch.equal(alone[0][0], both[1][0])


def test_seed_and_domain_and_draw_all_matter():
    inside = np.arange(30)
    alike, other = (
        TrainingDraws([Numbered.of(0, 30)] * 3, [Split(inside, inside)] * 3, PILToTensor(), seed=seed)
        for seed in (3, 4)
    )
    streams = [(alike, 0, 0), (alike, 1, 0), (alike, 0, 20), (other, 0, 0)]
    assert len({str(drawn_by(draws, domain, range(start, start + 20))) for draws, domain, start in streams}) == 4
    # The same image is augmented anew
    only = np.array([5])
    draws = TrainingDraws([Noisy.of(0, 30)], [Split(only, only)], training_transform("digit", **NEUTRAL), seed=0)
    views = {draws[0, number][0].numpy().tobytes() for number in range(10)}
    assert len(views) > 5  # an image of 12 pixels has few crops, and two may coincide


def test_global_random_state_is_left_alone():
    draws = make_draws(Noisy, PHOTOGRAPH)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    take(draws, 2)
    take(draws, 2, workers=1)
    list(evaluation_loader(EvaluationImages(draws.domains, draws.splits, PILToTensor()), batch_size=50, workers=0))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ({"batch_size": 6, "num_processes": 4}, "batch_size=6"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 3, "num_processes": 2}, "batch_size=3"),
        ({"domains_per_step": -1}, "domains_per_step=-1"),
        ({"domains_per_step": 3}, "domains_per_step=3"),
    ],
)
def test_batches_and_domains_that_cannot_be_shared_out_are_refused(sampler, message):
    with pytest.raises(ProtocolError, match=message):
        take(make_draws(), 1, **sampler)


def _scheduled_and_ended():
    loader = training_loader(make_draws(), StepSampler([0], 6), workers=1)
    before = set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    for _ in range(5):
        next(batches)
    assert worker.is_alive()
    del batches, loader
    worker.terminate()
    worker.join(10)
    assert not worker.is_alive()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="the system does not say who sent a signal")
def test_workers_outlive_a_scheduler_but_not_their_parent(fresh_python):
    # In a process of its own: what other tests have left behind takes signals too
    words = f"from {__name__} import _scheduled_and_ended; _scheduled_and_ended()"
    subprocess.run([fresh_python, "-c", words], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_image_keeps_its_name_on_the_way_out_of_a_worker(workers):
    with pytest.raises(ImageReadError, match=r"image='[02]/\d+.png': cannot be decoded") as caught:
        take(make_draws(Broken), 1, workers=workers)
    traceback.clear_frames(caught.tb)  # or the garbage collection waits 5 s for a worker


def test_class_balanced_draws_are_uniform_over_classes_and_then_within_each():
    domain = replace(Numbered.of(0, 60), targets=[0] * 40 + [1] * 5 + [4] * 15)
    inside = np.array([*range(30), *range(40, 44), *range(50, 60)])  # 30, 4 and 10 of the three classes
    draws = TrainingDraws([domain], [Split(inside, inside)], PILToTensor(), seed=3, class_balanced=True)
    number = 3000
    drawn = Counter(index for _, index in drawn_by(draws, 0, range(number)))
    assert set(drawn) == set(inside.tolist())
    for members, size in ((range(30), 30), (range(40, 44), 4), (range(50, 60), 10)):
        counts = np.array([drawn[index] for index in members])
        assert abs(counts.sum() - number / 3) < 4 * np.sqrt(number * 2 / 9)
        expected = number / 3 / size
        assert ((counts - expected) ** 2 / expected).sum() < size + 5 * np.sqrt(2 * size)


def augmented_evaluation(draws, seed=3):
    augmented = AugmentedValidation(PHOTOGRAPH, (0, 2), seed)
    return EvaluationImages(draws.domains, draws.splits, evaluation_transform(**NEUTRAL), augmented=augmented)


def test_only_validation_images_of_training_domains_are_augmented_by_seed_domain_and_position_alone():
    draws = make_draws(Noisy)
    plain = EvaluationImages(draws.domains, draws.splits, evaluation_transform(**NEUTRAL))
    images = augmented_evaluation(draws)
    changed = Counter()
    for (image, *rest), (other, *others) in zip(plain, images, strict=True):
        assert rest == others
        changed[rest[1]] += not torch.equal(image, other)
    sizes = [len(draws.splits[domain].outside) for domain in (0, 2)]
    assert +changed == {1: sizes[0], 5: sizes[1]}
    again = [batch for batch, *_ in evaluation_loader(images, batch_size=16, workers=2)]
    torch.manual_seed(7)
    once = [batch for batch, *_ in evaluation_loader(images, batch_size=16, workers=0)]
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))
    first = len(draws.splits[0].inside)
    assert not torch.equal(augmented_evaluation(draws, seed=4)[first][0], images[first][0])


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_image_once_in_its_group(workers):
    draws = make_draws()
    images = EvaluationImages(draws.domains, draws.splits, PILToTensor())
    assert len(images) == sum(SIZES)
    seen = []
    for batch, targets, groups in evaluation_loader(images, batch_size=16, workers=workers):
        for (number, index), target, group in zip(identities(batch), targets.tolist(), groups.tolist(), strict=True):
            assert target == draws.domains[number].targets[index]
            seen.append((number, index, group))
    assert seen == [
        (number, int(index), 2 * number + side)
        for number, split in enumerate(draws.splits)
        for side, part in enumerate((split.inside, split.outside))
        for index in part
    ]


def group_sampler(**changes):
    return StepSampler(**{"domains": [0, 2, 3, 5, 8], "batch_size": 6, "domains_per_step": 2, "seed": 4, **changes})


def test_domains_of_a_step_follow_from_seed_and_step_alone():
    drawn = [group_sampler().domains_at(step) for step in range(120)]
    assert [group_sampler(seed=5).domains_at(step) for step in range(120)] != drawn
    assert drawn[:4] == [[3, 2], [5, 3], [0, 2], [2, 8]]  # or a run of another release would not resume
    steps = islice(group_sampler(first_step=100, process=1, num_processes=2), 20)
    assert [list(dict.fromkeys(domain for domain, _ in step)) for step in steps] == drawn[100:]


@pytest.mark.parametrize("size", [1, 3])
def test_domains_and_ordered_pairs_of_domains_are_drawn_uniformly(size):
    sampler, steps = group_sampler(domains_per_step=size), 6000
    drawn = [sampler.domains_at(step) for step in range(steps)]
    share, counts = size / 5, Counter(domain for step in drawn for domain in step)
    assert len(counts) == 5
    assert all(abs(count - steps * share) < 4 * (steps * share * (1 - share)) ** 0.5 for count in counts.values())
    if size > 1:
        pairs = Counter((step[0], step[1]) for step in drawn)
        assert len(pairs) == 20
        assert all(abs(count - steps / 20) < 4 * (steps / 20 * 19 / 20) ** 0.5 for count in pairs.values())


def place(role: str, first: int, size: int, outside: int) -> PlacesDomain:
    """Images whose gray level is their number, taken at (number, -number); the label is the number modulo 3."""
    numbers = np.arange(first, first + size)
    return PlacesDomain(
        name=f"{role} {first}",
        role=role,
        group=str(first),
        classes=("a", "b", "c"),
        targets=(numbers % 3).tolist(),
        images=[np.full((2, 2), number, dtype=np.uint8) for number in numbers],
        metadata=np.stack([numbers, -numbers], axis=1).astype(np.float32),
        split=Split(np.arange(size - outside), np.arange(size - outside, size)),
    )


def gray(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


DOMAINS = [place("train", 0, 20, 5), place("train", 40, 20, 5), place("id", 80, 10, 0)]
SPLITS = [domain.split for domain in DOMAINS]


@pytest.mark.parametrize("workers", [0, 1])
def test_training_batches_carry_the_metadata_of_their_images(workers):
    draws = TrainingDraws(DOMAINS, SPLITS, gray, seed=0, with_metadata=True)
    for minibatches in take(draws, 3, workers, domains=[0, 1]):
        for domain, (images, targets, metadata) in enumerate(minibatches):
            numbers = images[:, 0, 0, 0]
            assert len(numbers) == 6
            assert ((numbers >= 40 * domain) & (numbers < 40 * domain + 15)).all()
            assert torch.equal(metadata, torch.stack([numbers, -numbers], dim=1))
            assert torch.equal(targets, numbers.long() % 3)
    assert {len(minibatch) for minibatch in take(replace(draws, with_metadata=False), 1)[0]} == {2}


def test_evaluation_batches_carry_the_metadata_of_their_images():
    loader = evaluation_loader(EvaluationImages(DOMAINS, SPLITS, gray, with_metadata=True), batch_size=7, workers=0)
    images, targets, groups, metadata = (torch.cat(column) for column in zip(*loader, strict=True))
    numbers = images[:, 0, 0, 0]
    assert len(numbers) == 50
    assert torch.equal(metadata, torch.stack([numbers, -numbers], dim=1))
    assert torch.equal(targets, numbers.long() % 3)
    assert torch.bincount(groups).tolist() == [15, 5, 15, 5, 10]
    cameras = replace(DOMAINS[2], metadata=np.arange(10) - 1)  # location ids stay whole numbers
    assert EvaluationImages([cameras], SPLITS[2:], gray, with_metadata=True)[0][3].dtype == torch.int64
    photo = FolderDomain("photo", ("a",), [0], ["0.png"])
    with pytest.raises(ProtocolError, match="with_metadata=True: domain 'photo'"):
        EvaluationImages([photo], SPLITS[:1], gray, with_metadata=True)[0]


def test_domains_set_apart_for_testing_cannot_be_trained_on():
    assert evaluation_only(DOMAINS) == [2]
    assert [positions_of_test_domains(given, DOMAINS) for given in ([], [1], [2])] == [[2], [1, 2], [2]]
