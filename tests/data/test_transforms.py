"""Transforms: what evaluation does to a pixel, and what training may and may not do to an image."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_transform
from torchvision.transforms import v2

from timm_moe_dg.data import evaluation_transform, training_transform
from timm_moe_dg.data.transforms import with_timm_augmentation
from timm_moe_dg.errors import ArgumentError

MEAN, STD = (0.5, 0.4, 0.3), (0.1, 0.2, 0.4)
NEUTRAL = {"size": (32, 32), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def test_evaluation_squeezes_and_normalizes_as_training_without_augmentation_does():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8))
    expected = np.asarray(image.resize((20, 16), Image.Resampling.BILINEAR)).transpose(2, 0, 1) / 255
    expected = (expected - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    result = evaluation_transform((16, 20), MEAN, STD)(image)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, atol=2e-6)
    assert torch.equal(training_transform("none", (16, 20), MEAN, STD)(image), result)


def test_tensors_of_bytes_are_divided_by_255():
    image = torch.full((3, 8, 8), 51, dtype=torch.uint8)
    view = evaluation_transform((4, 4), [0.1, 0.2, 0.3], [0.5] * 3)(image)
    torch.testing.assert_close(view, torch.tensor([0.2, 0.0, -0.2])[:, None, None].expand(3, 4, 4))


@pytest.mark.parametrize("augmentation", [None, "photograph", "digit", "none"])
def test_a_resized_image_loses_no_more_than_the_values_without_data(augmentation):
    pixels = torch.full((4, 80, 80), 0.75)
    pixels[:, ::4, ::4] = torch.nan  # each pixel of the view covers some
    normalization = ([0.25] * 4, [0.5] * 4)
    view = evaluation_transform((8, 8), *normalization)
    if augmentation:
        view = training_transform(augmentation, (8, 8), *normalization)
    torch.testing.assert_close(view(pixels), torch.full((4, 8, 8), 15 / 16), atol=0.03, rtol=0)


@pytest.mark.parametrize("photograph", [0, 1], ids=["china", "flower"])
def test_photographs_are_augmented_as_by_torchvision_on_pil_but_for_rounding(photograph):
    """PIL rounds to 256 levels up to six times; a draw of its base would differ by tens of levels."""
    image = Image.fromarray(load_sample_images().images[photograph]).resize((160, 107))
    # DomainBed's, in the same order, so that equal seeds draw the same
    steps = [v2.RandomResizedCrop((32, 32), scale=(0.7, 1.0)), v2.RandomHorizontalFlip()]
    steps += [v2.ColorJitter(0.3, 0.3, 0.3, 0.3), v2.RandomGrayscale(0.1), v2.PILToTensor()]
    ours, theirs = training_transform("photograph", **NEUTRAL), v2.Compose([*steps, v2.ToDtype(torch.float32, True)])
    for seed in range(25):
        torch.manual_seed(seed)
        view = ours(image)
        torch.manual_seed(seed)
        difference = 255 * (view - theirs(image)).abs()
        assert difference.mean() < 3
        assert difference.max() < 25


def test_digits_are_never_mirrored_and_keep_their_color():
    transform = training_transform("digit", **NEUTRAL)
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    pixels[:, 16:] = 200, 80, 40
    views = torch.stack([transform(Image.fromarray(pixels)) for _ in range(60)])
    color = torch.tensor([200, 80, 40])[:, None, None] / 255
    assert (views[..., 28:] - color).abs().max() < 1e-6  # the crop holds 70% of the area
    assert not views[..., :4].any()


@pytest.mark.parametrize("values", [(0.1, 0.3, 0.5, 0.7, 0.9), (-2.0, 3.0, 0.005)])
def test_images_of_more_bits_or_bands_are_cropped_and_mirrored_alone(values):
    """Color jitter would change the spectrum, and clips to 0..1."""
    pixels = torch.tensor(values)[:, None, None].repeat(1, 12, 10)
    augment = training_transform("photograph", (8, 8), [0.0] * len(values), [1.0] * len(values))
    for _ in range(20):
        torch.testing.assert_close(augment(pixels), pixels[:, :8, :8])


VIEW = {"size": (24, 24), "mean": (0.5, 0.5, 0.5)}


def augmented(policy, erasing):
    return with_timm_augmentation(training_transform("none", **VIEW, std=(0.25,) * 3), policy, erasing, **VIEW)


@pytest.mark.parametrize(
    ("policy", "erasing"), [("rand-m9-mstd0.5", 0.0), ("augmix-m3-w3", 0.0), ("original", 0.5), (None, 0.9)]
)
def test_a_view_follows_from_the_seed_of_torch_and_leaves_other_generators_alone(policy, erasing):
    transform, image = augmented(policy, erasing), Image.effect_noise((30, 30), 90).convert("RGB")

    def view(seed, others):
        torch.manual_seed(seed)
        random.seed(others)
        np.random.seed(others)  # noqa: NPY002
        tensor = transform(image)
        return tensor, random.random(), np.random.rand()  # noqa: NPY002

    first, second = view(3, others=1), view(3, others=2)
    assert torch.equal(first[0], second[0])
    assert first[1] != second[1]
    random.seed(1)
    assert first[1] == random.random()
    several = [view(seed, others=1)[0] for seed in range(8)]
    assert any(not torch.equal(several[0], other) for other in several[1:])
    assert several[0].shape == (3, 24, 24)


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5", "augmix-m5-w3", "original"])
def test_policies_are_those_of_timms_loaders(policy):
    base = training_transform("none", **VIEW, std=(0.25,) * 3)
    # timm's train.py has interpolation="random"
    options = {"is_training": True, "auto_augment": policy, "interpolation": "random", "mean": VIEW["mean"]}
    theirs = create_transform(24, **options, separate=True)[1].transforms[-1]
    image = Image.effect_noise((30, 30), 90).convert("RGB")
    for number in range(20):
        torch.manual_seed(number)
        ours = with_timm_augmentation(base, policy, 0.0, **VIEW)(image)
        torch.manual_seed(number)
        seed = int(torch.randint(2**32, (1,)))
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        assert torch.equal(ours, base(theirs(image)))


def test_without_options_the_transform_stays_the_same_object_and_others_are_refused():
    base = evaluation_transform((8, 8), MEAN, STD)
    assert with_timm_augmentation(base, None, 0.0, **VIEW) is base
    with pytest.raises(ArgumentError, match="augmentation='cutmix'"):
        training_transform("cutmix", **NEUTRAL)
    with pytest.raises(ArgumentError, match="aa='random'"):
        augmented("random", 0.0)
    with pytest.raises(ArgumentError, match=r"aa: .* 8 bits"):
        augmented("rand-m9-mstd0.5", 0.0)(torch.zeros(3, 8, 8))
