"""Color jitter against torchvision's own kernels, and against what hues do in closed form."""

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from timm_moe_dg.data.color import ColorJitter, brightness, contrast, hue, saturation

JITTER = (0.3, 0.3, 0.3, 0.3)


@pytest.fixture(scope="module")
def image():
    """Noise, with gray, black, white and pure pixels, where hues are undefined or change sides."""
    pixels = torch.rand(3, 24, 32, generator=torch.Generator().manual_seed(0))
    pixels[:, 0] = 0.4
    pixels[:, 1] = 0.0
    pixels[:, 2] = 1.0
    pixels[:, 3] = torch.eye(3).repeat(1, 11)[:, :32]
    pixels[:, 4] = 1 - torch.eye(3).repeat(1, 11)[:, :32]
    return pixels


@pytest.mark.parametrize("factor", [0.0, 0.7, 1.0, 1.3])
@pytest.mark.parametrize(
    ("adjust", "reference"),
    [
        (brightness, functional.adjust_brightness),
        (contrast, functional.adjust_contrast),
        (saturation, functional.adjust_saturation),
    ],
)
def test_blends_are_those_of_torchvision(image, adjust, reference, factor):
    before = image.clone()
    torch.testing.assert_close(adjust(image, factor), reference(image, factor), atol=1e-6, rtol=0)
    assert torch.equal(image, before)


@pytest.mark.parametrize("shift", [-0.5, -0.3, -0.01, 0.0, 0.1, 0.25, 0.5])
def test_hue_is_that_of_torchvision(image, shift):
    before = image.clone()
    torch.testing.assert_close(hue(image, shift), functional.adjust_hue(image, shift), atol=5e-6, rtol=0)
    assert torch.equal(image, before)


def test_a_third_of_the_circle_exchanges_the_channels(image):
    torch.testing.assert_close(hue(image, 1 / 3), image.roll(1, dims=0), atol=2e-6, rtol=0)
    torch.testing.assert_close(hue(image, -1 / 3), image.roll(-1, dims=0), atol=2e-6, rtol=0)


@pytest.mark.parametrize("seed", range(8))
def test_draws_and_their_order_are_those_of_torchvision(image, seed):
    torch.manual_seed(seed)
    expected = v2.ColorJitter(*JITTER)(image)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    torch.testing.assert_close(ColorJitter(*JITTER)(image), expected, atol=1e-5, rtol=0)
    assert torch.equal(torch.get_rng_state(), state)
