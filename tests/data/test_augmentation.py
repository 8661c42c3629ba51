"""timm's augmentations: functions of torch's seed alone, and no trace of them elsewhere."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from timm_moe_dg.data import training_transform
from timm_moe_dg.data.transforms import with_timm_augmentation
from timm_moe_dg.errors import ArgumentError

VIEW = {"size": (24, 24), "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
IMAGE = Image.effect_noise((30, 30), 90).convert("RGB")


def plain():
    return training_transform("none", **VIEW)


def test_without_options_the_transform_stays_the_same_object():
    own = plain()
    assert with_timm_augmentation(own, None, 0.0, **VIEW) is own


@pytest.mark.parametrize(
    ("policy", "erasing"), [("rand-m9-mstd0.5", 0.0), ("augmix-m3-w3", 0.0), ("original", 0.5), (None, 0.9)]
)
def test_a_view_follows_from_the_seed_of_torch_and_leaves_other_generators_alone(policy, erasing):
    transform = with_timm_augmentation(plain(), policy, erasing, **VIEW)

    def view(seed, others):
        torch.manual_seed(seed)
        random.seed(others)
        np.random.seed(others)  # noqa: NPY002
        tensor = transform(IMAGE)
        return tensor, random.random(), np.random.rand()  # noqa: NPY002

    first, second = view(3, others=1), view(3, others=2)
    assert torch.equal(first[0], second[0])
    assert first[1] != second[1]
    random.seed(1)
    assert first[1] == random.random()
    several = [view(seed, others=1)[0] for seed in range(8)]
    assert any(not torch.equal(several[0], other) for other in several[1:])
    assert several[0].shape == (3, 24, 24)


def test_a_policy_that_timm_does_not_have_is_named():
    with pytest.raises(ArgumentError, match=r"aa='random': timm has no such policy"):
        with_timm_augmentation(plain(), "random", 0.0, **VIEW)
