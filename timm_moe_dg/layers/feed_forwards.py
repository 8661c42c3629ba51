"""The dense feed-forward layers of timm that can be upcycled to experts: their parts, and copies of their weights.

All of them compute norm, W1, act, dropout, norm, W2, dropout. Gated ones multiply the two halves of W1 x.

Axes: D features, H hidden features, E experts, h hidden features of an expert.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from timm.layers import ConvMlp, GluMlp, LayerNorm, LayerNormFp32, Mlp, RmsNorm, SimpleNorm, SwiGLU
from timm.models.inception_next import ConvMlp as InceptionConvMlp
from timm.models.tiny_vit import NormMlp
from timm.models.vitamin import GeGluMlp
from torch import Tensor, nn

from ..errors import RouterError

# Normalizations of each token independently, features last
TOKEN_NORMS = (nn.Identity, nn.LayerNorm, nn.RMSNorm, LayerNorm, LayerNormFp32, RmsNorm, SimpleNorm)


class GatedActivation(nn.Module):
    """act(a) * b of features [a, b] (GLU variants, Shazeer, 2020); or a * act(b) with `gate_last`."""

    def __init__(self, act: nn.Module, gate_last: bool = False) -> None:
        super().__init__()
        self.act = act
        self.gate_last = gate_last

    def forward(self, x: Tensor) -> Tensor:
        """(..., 2 H) -> (..., H)."""
        a, b = x.chunk(2, dim=-1)
        return a * self.act(b) if self.gate_last else self.act(a) * b


class FeedForward(NamedTuple):
    """The parts of a dense feed-forward, in order of computation."""

    pre_norm: nn.Module  # of the input (..., D)
    first: tuple[nn.Module, ...]  # linear layer or 1x1 convolution, two if the halves of a gated one are separate
    act: nn.Module  # a `GatedActivation` halves the number of features
    hidden_drop: float  # dropout rate after the activation
    norm: nn.Module  # of the hidden features
    second: nn.Module  # linear layer or 1x1 convolution
    drop: float  # dropout rate of the output

    @property
    def channels_first(self) -> bool:
        """Whether the input is (B, D, height, width)."""
        return isinstance(self.second, nn.Conv2d)

    def weights(self) -> tuple[Tensor, Tensor]:
        """First (H or 2 H, D) and second (D, H) matrix."""
        first, second = (layer.get_parameter("weight") for layer in (self.first[0], self.second))
        return first.flatten(1), second.flatten(1)


# Any: mypy types every attribute of a module as Tensor or Module
def _plain(mlp: Any) -> FeedForward:
    return FeedForward(nn.Identity(), (mlp.fc1,), mlp.act, mlp.drop1.p, mlp.norm, mlp.fc2, mlp.drop2.p)


def _split(mlp: Any) -> FeedForward:
    gate, act = (mlp.fc1_g, mlp.fc1_x), GatedActivation(mlp.act)
    return FeedForward(nn.Identity(), gate, act, mlp.drop1.p, mlp.norm, mlp.fc2, mlp.drop2.p)


def _normed_gated(mlp: Any) -> FeedForward:
    gate, act = (mlp.w0, mlp.w1), GatedActivation(mlp.act)
    return FeedForward(mlp.norm, gate, act, mlp.drop1.p, nn.Identity(), mlp.w2, mlp.drop2.p)


def _convolutional(mlp: Any) -> FeedForward:
    # Its norm is before the activation and over channels first. read_feed_forward accepts only nn.Identity.
    return FeedForward(nn.Identity(), (mlp.fc1,), mlp.act, mlp.drop.p, mlp.norm, mlp.fc2, 0.0)


DENSE_FORMS: MappingProxyType[type[nn.Module], Callable[[Any], FeedForward]] = MappingProxyType(
    {
        Mlp: _plain,
        GluMlp: lambda mlp: _plain(mlp)._replace(act=GatedActivation(mlp.act, mlp.gate_last)),
        SwiGLU: _split,
        NormMlp: lambda mlp: _plain(mlp)._replace(pre_norm=mlp.norm, norm=nn.Identity()),
        GeGluMlp: _normed_gated,
        ConvMlp: _convolutional,
        InceptionConvMlp: _convolutional,
    }
)


def read_feed_forward(mlp: nn.Module) -> FeedForward:
    """Returns the parts, not copied, of a dense feed-forward whose class is exactly one in `DENSE_FORMS`.

    Raises:
        RouterError: Another class, layers that are neither linear nor 1x1 convolutions, different numbers of input and
            output features, or a normalization or activation that mixes tokens.
    """
    if type(mlp) not in DENSE_FORMS:  # a subclass may compute anything
        classes = ", ".join(form.__name__ for form in DENSE_FORMS)
        raise RouterError.of("mlp", type(mlp).__name__, f"give a two-layer feed-forward, exactly {classes}")
    parts = DENSE_FORMS[type(mlp)](mlp)
    _check_layers(parts)
    norms = (nn.Identity,) if parts.channels_first else TOKEN_NORMS
    for norm in (parts.pre_norm, parts.norm):
        if type(norm) not in norms:
            remedy = "give a feed-forward that normalizes each token independently, or not at all"
            raise RouterError.of("mlp.norm", type(norm).__name__, remedy)
    act = parts.act.act if isinstance(parts.act, GatedActivation) else parts.act
    if isinstance(act, nn.PReLU) and act.num_parameters > 1:
        # PReLU's slopes belong to axis 1: tokens in a dense layer's (B, N, H), features in the experts' (rows, H)
        remedy = "use one slope for all features"
        raise RouterError.of("mlp.act.num_parameters", act.num_parameters, remedy)
    return parts


def _check_layers(parts: FeedForward) -> None:
    for layer in (*parts.first, parts.second):
        if type(layer) is not nn.Linear and not _is_pointwise(layer):
            remedy = "give a feed-forward of linear layers or 1x1 convolutions"
            raise RouterError.of("mlp.fc1", type(layer).__name__, remedy)
    first, second = parts.weights()
    if first.shape[1] != second.shape[0]:
        remedy = f"an expert returns as many features as it takes, in_features={first.shape[1]}"
        raise RouterError.of("mlp.fc2.out_features", second.shape[0], remedy)


def _is_pointwise(layer: nn.Module) -> bool:
    """Whether a layer is a 1x1 convolution over all channels."""
    if type(layer) is not nn.Conv2d:
        return False
    sides = (*layer.kernel_size, *layer.stride, layer.groups)
    return sides == (1, 1, 1, 1, 1) and layer.padding in ((0, 0), "valid", "same")


def copy_dense(source: Tensor, num_experts: int, axis: int | None = None, width: int = 0, halves: int = 1) -> Tensor:
    """Copies a dense parameter for each expert.

    Args:
        source: Weight or bias, with hidden features along an axis.
        num_experts: E.
        axis: Axis of the hidden features: 0 in the first layer, 1 in the second. None for whole copies.
        width: h. Expert e gets the units e h to (e + 1) h - 1, modulo H. Outgoing weights (axis 1) are scaled by H / h,
            so that the mean over experts that cover all units equally often is the dense output.
        halves: 2 if gate and features are one matrix of 2 H.
    """
    if axis is None or source.shape[axis] == width * halves:
        return source.expand(num_experts, *source.shape)
    hidden = source.shape[axis] // halves
    units_Eh = torch.arange(num_experts * width, device=source.device).view(num_experts, width) % hidden
    rows_E = torch.cat([units_Eh + half * hidden for half in range(halves)], dim=1)
    return source[rows_E] if axis == 0 else source[:, rows_E].transpose(0, 1) * (hidden / width)


@torch.no_grad()
def reinitialize(share: float, first: Sequence[Tensor], second: Tensor, halves: int = 1) -> None:
    """Draws a share of each expert's hidden units again, in place (Drop-Upcycling, arXiv:2502.19261, section 3).

    For each expert, floor(share h) units are drawn. Their rows of the `first` matrix and bias (E, h, ...), and columns
    of the `second` matrix (E, D, h), are replaced by normal numbers with the mean and the standard deviation of what
    they replace. With 2 `halves`, gate and features are drawn separately. The paper's layers have no biases.
    """
    num_experts, _, width = second.shape
    for expert in range(num_experts) if share else ():  # share 0 draws no random number
        units = torch.randperm(width, device=second.device)[: int(share * width)]
        parts = [(stack[expert], 0, units + half * width) for stack in first for half in range(halves)]
        for matrix, axis, rows in [*parts, (second[expert], 1, units)] if len(units) else ():
            old = matrix.index_select(axis, rows)
            new = old.mean() + old.std(correction=0) * torch.randn_like(old)
            matrix.index_copy_(axis, rows, new)
