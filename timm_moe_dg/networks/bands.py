"""The bands of a network's images, and pretrained kernels for bands beyond red, green and blue."""

import logging
from typing import Any

import torch
from timm.data.model_config import get_model_input_config
from torch import nn

from ..data.bands import RGB, Bands
from ..errors import ArgumentError

BAND_INITS = ("mean", "zero")
_logger = logging.getLogger(__name__)


def in_chans_of(network: nn.Module) -> int:
    """Returns the number of image channels that a network takes."""
    return int(get_model_input_config(network)["input_size"][0])


def bands_of(network: nn.Module) -> Bands:
    """Returns the bands of a network's images."""
    return getattr(network, "bands", None) or Bands(in_chans_of(network))


def check_bands(network: nn.Module, bands: Bands) -> None:
    """Raises an `ArgumentError` if a network does not take the bands with which images are read."""
    expected = bands_of(network)
    if expected.count != bands.count:
        read = f"as RGB, {RGB} channels; leave it out" if bands.is_rgb else f"with {bands.count} bands"
        remedy = f"images are read {read}, or give --in-chans {expected.count} and such images"
        raise ArgumentError.of("in_chans", expected.count, remedy)
    if expected.names and expected != bands:
        remedy = f"the model has others; give --bands {' '.join(expected.names)}"
        raise ArgumentError.of("bands", list(bands.names) or None, remedy)


def take_bands(network: Any, bands: Bands, *, keeps_statistics: bool, from_rgb: bool) -> None:
    """Checks the bands that a network is built for, and gives named ones mean and deviation of their colors."""
    if bands.names and not keeps_statistics:
        statistics = {key: network.pretrained_cfg.get(key) for key in ("mean", "std")}
        of_bands = {key: tuple(bands.from_rgb(rgb, sum(rgb) / len(rgb))) for key, rgb in statistics.items() if rgb}
        network.pretrained_cfg = {**network.pretrained_cfg, **of_bands}
    check_bands(network, bands)
    if from_rgb and not bands.names and bands.count != RGB:
        remark = "the kernels of red, green and blue are repeated over the bands by position"
        remedy = "name the bands with --bands, so that each color keeps its own"
        _logger.warning(f"in_chans={bands.count}: {remark}; {remedy}")


@torch.no_grad()
def place_kernels(network: nn.Module, rgb: nn.Module, bands: Bands, init: str) -> None:
    """Copies the weights of a network of RGB images, with its first kernels at the bands of their colors.

    Other bands start at the mean of the three kernels, or at zero. The scale stays, so that a network whose other bands
    are zero gives the logits of `rgb`.
    """
    names, state = get_model_input_config(rgb)["first_conv"], rgb.state_dict()
    keys = [f"{name}.weight" for name in ([names] if isinstance(names, str) else names or ())]
    if not keys or any(state[key].ndim != 4 or state[key].shape[1] != RGB for key in keys):
        remedy = f"the first layer of {type(rgb).__name__} has no kernel for each band; give --in-chans instead"
        raise ArgumentError.of("bands", list(bands.names), remedy)
    for key in keys:
        kernels = state[key]
        other = kernels.mean(1) if init == "mean" else torch.zeros_like(kernels[:, 0])
        state[key] = torch.stack(bands.from_rgb(kernels.unbind(1), other), dim=1)
    network.load_state_dict(state)
