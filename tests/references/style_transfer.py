"""The style-transfer network written out on raw arrays, layer by layer, with its own normalization and padding."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def reflected(x: Tensor, pad: int) -> Tensor:
    """Extends both image axes by looking pixels up at their mirrored positions."""
    for axis in (2, 3):
        size = x.shape[axis]
        positions = np.arange(-pad, size + pad)
        mirrored = np.abs(positions)
        mirrored = np.where(mirrored > size - 1, 2 * (size - 1) - mirrored, mirrored)
        x = x.index_select(axis, torch.from_numpy(mirrored))
    return x


def convolved(x: Tensor, weights: Mapping[str, Tensor], name: str, stride: int = 1) -> Tensor:
    weight = weights[f"{name}.conv2d.weight"]
    return F.conv2d(reflected(x, weight.shape[-1] // 2), weight, weights[f"{name}.conv2d.bias"], stride)


def normalized(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    mean, variance = x.mean((2, 3), keepdim=True), x.var((2, 3), correction=0, keepdim=True)
    scale, shift = (weights[f"{name}.{kind}"].view(1, -1, 1, 1) for kind in ("weight", "bias"))
    return (x - mean) / (variance + 1e-5).sqrt() * scale + shift


def restyled(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """(B, 3, H, W) -> (B, 3, H, W), by the parameters' names alone."""
    x = normalized(convolved(x, weights, "conv1"), weights, "in1").clamp(min=0)
    x = normalized(convolved(x, weights, "conv2", 2), weights, "in2").clamp(min=0)
    x = normalized(convolved(x, weights, "conv3", 2), weights, "in3").clamp(min=0)
    for block in ("res1", "res2", "res3", "res4", "res5"):
        y = normalized(convolved(x, weights, f"{block}.conv1"), weights, f"{block}.in1").clamp(min=0)
        x = x + normalized(convolved(y, weights, f"{block}.conv2"), weights, f"{block}.in2")
    for conv, norm in (("deconv1", "in4"), ("deconv2", "in5")):
        doubled = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = normalized(convolved(doubled, weights, conv), weights, norm).clamp(min=0)
    return convolved(x, weights, "deconv3")
