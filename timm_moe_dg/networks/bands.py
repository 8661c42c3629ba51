"""The bands of a network's images, and pretrained kernels for bands beyond red, green and blue."""

from collections.abc import Sequence

import torch
from timm.data.model_config import get_model_input_config
from torch import nn

from ..data.bands import RGB, Bands, colors_of
from ..errors import ArgumentError

BAND_INITS = ("mean", "zero")


def in_chans_of(network: nn.Module) -> int:
    """Returns the number of image channels that a network takes."""
    return int(get_model_input_config(network)["input_size"][0])


def bands_of(network: nn.Module) -> Bands:
    """Returns the names of a network's bands, or their number if they have none."""
    return getattr(network, "bands", None) or in_chans_of(network)


def check_bands(network: nn.Module, bands: Bands) -> None:
    """Raises an `ArgumentError` if a network does not take the bands with which images are read."""
    expected, count = bands_of(network), bands if isinstance(bands, int) else len(bands)
    if in_chans_of(network) != count:
        read = f"as RGB, {RGB} channels; leave it out" if bands == RGB else f"with {count} bands"
        remedy = f"images are read {read}, or give --in-chans {in_chans_of(network)} and such images"
        raise ArgumentError.of("in_chans", in_chans_of(network), remedy)
    if expected != bands and not isinstance(expected, int):
        given = None if isinstance(bands, int) else list(bands)
        raise ArgumentError.of("bands", given, f"the model has others; give --bands {' '.join(expected)}")


@torch.no_grad()
def place_kernels(network: nn.Module, rgb: nn.Module, bands: Sequence[str], init: str) -> None:
    """Copies the weights of a network of RGB images, with its first kernels at the bands of their colors.

    Other bands start at the mean of the three kernels, or at zero. The scale stays, so that a network whose other bands
    are zero gives the logits of `rgb`.
    """
    names, state = get_model_input_config(rgb)["first_conv"], rgb.state_dict()
    keys = [f"{name}.weight" for name in ([names] if isinstance(names, str) else names or ())]
    if not keys or any(state[key].ndim != 4 or state[key].shape[1] != RGB for key in keys):
        remedy = f"the first layer of {type(rgb).__name__} has no kernel for each band; give --in-chans instead"
        raise ArgumentError.of("bands", list(bands), remedy)
    for key in keys:
        kernels = state[key]
        other = kernels.mean(1) if init == "mean" else torch.zeros_like(kernels[:, 0])
        placed = [other if color is None else kernels[:, color] for color in colors_of(bands)]
        state[key] = torch.stack(placed, dim=1)
    network.load_state_dict(state)


def by_color(values: Sequence[float], bands: Sequence[str]) -> tuple[float, ...]:
    """Returns a value for each band: that of its color in RGB, or the mean of the three."""
    colors = [None if color is None else values[color % len(values)] for color in colors_of(bands)]
    return tuple(sum(values) / len(values) if value is None else value for value in colors)
