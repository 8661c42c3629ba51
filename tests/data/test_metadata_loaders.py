"""Metadata travel with their images through both loaders, and official splits are kept."""

import numpy as np
import pytest
import torch

from timm_moe_dg.data import (
    EvaluationImages,
    FolderDomain,
    PlacesDomain,
    Split,
    StepSampler,
    TrainingDraws,
    evaluation_loader,
    evaluation_only,
    split_domains,
    training_domains,
    training_loader,
)
from timm_moe_dg.errors import ProtocolError


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
    loader = training_loader(draws, StepSampler([0, 1], batch_size=6), workers=workers)
    for step, minibatches in zip(range(3), loader, strict=False):
        for domain, (images, targets, metadata) in enumerate(minibatches):
            numbers = images[:, 0, 0, 0]
            assert len(numbers) == 6, step
            assert ((numbers >= 40 * domain) & (numbers < 40 * domain + 15)).all()
            assert torch.equal(metadata, torch.stack([numbers, -numbers], dim=1))
            assert torch.equal(targets, numbers.long() % 3)


def test_evaluation_batches_carry_the_metadata_of_their_images():
    loader = evaluation_loader(EvaluationImages(DOMAINS, SPLITS, gray, with_metadata=True), batch_size=7, workers=0)
    images, targets, groups, metadata = (torch.cat(column) for column in zip(*loader, strict=True))
    numbers = images[:, 0, 0, 0]
    assert len(numbers) == 50
    assert torch.equal(metadata, torch.stack([numbers, -numbers], dim=1))
    assert torch.equal(targets, numbers.long() % 3)
    assert torch.bincount(groups).tolist() == [15, 5, 15, 5, 10]


def test_location_ids_stay_whole_numbers():
    domain = place("train", 0, 4, 1)
    cameras = PlacesDomain(**{**vars(domain), "metadata": np.array([7, -1, 3, 2])})
    images = EvaluationImages([cameras], [cameras.split], gray, with_metadata=True)
    *_, metadata = next(iter(evaluation_loader(images, batch_size=4, workers=0)))
    assert metadata.tolist() == [7, -1, 3, 2]
    assert metadata.dtype == torch.int64


def test_without_being_asked_no_metadata_come():
    draws = TrainingDraws(DOMAINS, SPLITS, gray, seed=0)
    assert [len(minibatch) for minibatch in next(iter(training_loader(draws, StepSampler([0], 2), workers=0)))] == [2]


def test_metadata_of_a_domain_without_any():
    images = EvaluationImages([FolderDomain("photo", ("a",), [0], ["0.png"])], SPLITS[:1], gray, with_metadata=True)
    with pytest.raises(ProtocolError, match="with_metadata=True: domain 'photo' has no metadata; leave it out"):
        images[0]


def test_official_splits_are_kept_whatever_the_seed():
    for seed in (0, 1):
        splits = split_domains(DOMAINS, [0, 1], trial_seed=seed)
        assert [len(split.inside) for split in splits] == [15, 15, 10]
        assert splits[0].outside.tolist() == [15, 16, 17, 18, 19]


def test_domains_set_apart_for_testing_cannot_be_trained_on():
    names, apart = [domain.name for domain in DOMAINS], evaluation_only(DOMAINS)
    assert apart == [2]
    assert training_domains(names, apart, apart) == [0, 1]
    assert training_domains(names, [1, 2], apart) == [0]
    with pytest.raises(ProtocolError, match=r"reserves \[2\]"):
        training_domains(names, [1], apart)
