"""Dense feed-forwards that experts can be copies of: which classes, and what each of them is made of.

Every form is norm, W1, act, dropout, norm, W2, dropout; a gated one multiplies the two halves of W1 x. Classes are
matched exactly, since a subclass may compute anything; whatever is not of each token by itself is refused.

Axes: D features, H hidden features.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from timm.layers import ConvMlp, GluMlp, LayerNorm, LayerNormFp32, Mlp, RmsNorm, SimpleNorm, SwiGLU
from timm.models.inception_next import ConvMlp as InceptionConvMlp
from timm.models.tiny_vit import NormMlp
from timm.models.vitamin import GeGluMlp
from torch import Tensor, nn

from ..errors import RouterError

# Normalizations of a token by itself, features last
TOKEN_NORMS = (nn.Identity, nn.LayerNorm, nn.RMSNorm, LayerNorm, LayerNormFp32, RmsNorm, SimpleNorm)


class GatedActivation(nn.Module):
    """act(a) * b of features [a, b] (GLU variants, Shazeer, 2020), or a * act(b).

    Args:
        act: The activation.
        gate_last: Whether the second half is what passes through it.
    """

    gate_last: Final[bool]

    def __init__(self, act: nn.Module, gate_last: bool = False) -> None:
        super().__init__()
        self.act = act
        self.gate_last = gate_last

    def forward(self, x: Tensor) -> Tensor:
        """(..., 2 H) -> (..., H)."""
        a, b = x.chunk(2, dim=-1)
        return a * self.act(b) if self.gate_last else self.act(a) * b


class FeedForward(NamedTuple):
    """What a dense feed-forward is made of, in the order of its computation.

    Attributes:
        pre_norm: Normalization of the input, shape (..., D).
        first: Linear layers or 1x1 convolutions that read it; two for the halves of a gated one.
        act: Activation; a `GatedActivation` halves its features.
        hidden_drop: Dropout rate behind it.
        norm: Normalization of the hidden features.
        second: Linear layer or 1x1 convolution to the output.
        drop: Dropout rate behind it.
    """

    pre_norm: nn.Module
    first: tuple[nn.Module, ...]
    act: nn.Module
    hidden_drop: float
    norm: nn.Module
    second: nn.Module
    drop: float

    @property
    def channels_first(self) -> bool:
        """Whether it takes (B, D, height, width)."""
        return isinstance(self.second, nn.Conv2d)

    def weights(self) -> tuple[Tensor, Tensor]:
        """First (H or 2 H, D) and second (D, H) matrix, of a convolution too."""
        first, second = (layer.get_parameter("weight") for layer in (self.first[0], self.second))
        return first.flatten(1), second.flatten(1)


# Any: each reader knows its class, and to mypy every attribute of a module may be a tensor
def _plain(mlp: Any) -> FeedForward:
    return FeedForward(nn.Identity(), (mlp.fc1,), mlp.act, mlp.drop1.p, mlp.norm, mlp.fc2, mlp.drop2.p)


def _packed(mlp: Any) -> FeedForward:
    return _plain(mlp)._replace(act=GatedActivation(mlp.act, mlp.gate_last))


def _split(mlp: Any) -> FeedForward:
    gate, act = (mlp.fc1_g, mlp.fc1_x), GatedActivation(mlp.act)
    return FeedForward(nn.Identity(), gate, act, mlp.drop1.p, mlp.norm, mlp.fc2, mlp.drop2.p)


def _normed(mlp: Any) -> FeedForward:
    return FeedForward(mlp.norm, (mlp.fc1,), mlp.act, mlp.drop1.p, nn.Identity(), mlp.fc2, mlp.drop2.p)


def _normed_gated(mlp: Any) -> FeedForward:
    gate, act = (mlp.w0, mlp.w1), GatedActivation(mlp.act)
    return FeedForward(mlp.norm, gate, act, mlp.drop1.p, nn.Identity(), mlp.w2, mlp.drop2.p)


def _convolutional(mlp: Any) -> FeedForward:
    # Its normalization stands before the activation and over channels first; only none at all is accepted below
    return FeedForward(nn.Identity(), (mlp.fc1,), mlp.act, mlp.drop.p, mlp.norm, mlp.fc2, 0.0)


DENSE_FORMS: MappingProxyType[type[nn.Module], Callable[[Any], FeedForward]] = MappingProxyType(
    {
        Mlp: _plain,
        GluMlp: _packed,
        SwiGLU: _split,
        NormMlp: _normed,
        GeGluMlp: _normed_gated,
        ConvMlp: _convolutional,
        InceptionConvMlp: _convolutional,
    }
)


def read_feed_forward(mlp: nn.Module) -> FeedForward:
    """Takes a dense feed-forward apart.

    Args:
        mlp: Exactly of a class in `DENSE_FORMS`.

    Returns:
        Its own parts, not copies.

    Raises:
        RouterError: Another class, layers that are neither linear nor 1x1 convolutions, another number of features
            returned than taken, or a normalization or activation that is not of each token by itself.
    """
    if type(mlp) not in DENSE_FORMS:
        known = ", ".join(_public_name(one) for one in DENSE_FORMS)
        raise RouterError.of("mlp", type(mlp).__name__, f"give a two-layer feed-forward, exactly {known}")
    parts = DENSE_FORMS[type(mlp)](mlp)
    _check_layers(parts)
    norms = (nn.Identity,) if parts.channels_first else TOKEN_NORMS
    for norm in (parts.pre_norm, parts.norm):
        if type(norm) not in norms:
            remedy = "give a feed-forward that normalizes each token by itself, or not at all"
            raise RouterError.of("mlp.norm", type(norm).__name__, remedy)
    act = parts.act.act if isinstance(parts.act, GatedActivation) else parts.act
    if isinstance(act, nn.PReLU) and act.num_parameters > 1:
        remedy = "give one slope for all features: PReLU counts another axis where there are experts"
        raise RouterError.of("mlp.act.num_parameters", act.num_parameters, remedy)
    return parts


def _public_name(cls: type[nn.Module]) -> str:
    return f"{'timm.layers' if cls.__module__.startswith('timm.layers') else cls.__module__}.{cls.__name__}"


def _check_layers(parts: FeedForward) -> None:
    for layer in (*parts.first, parts.second):
        if type(layer) is not nn.Linear and not _is_pointwise(layer):
            raise RouterError.of("mlp.fc1", type(layer).__name__, "give a feed-forward of linear layers, or 1x1 alike")
    first, second = parts.weights()
    if first.shape[1] != second.shape[0]:
        remedy = f"an expert returns as many features as it takes, in_features={first.shape[1]}"
        raise RouterError.of("mlp.fc2.out_features", second.shape[0], remedy)


def _is_pointwise(layer: nn.Module) -> bool:
    """Whether it is a convolution that sees one pixel and all its channels."""
    if type(layer) is not nn.Conv2d:
        return False
    sides = (*layer.kernel_size, *layer.stride, layer.groups)
    return sides == (1, 1, 1, 1, 1) and layer.padding in ((0, 0), "valid", "same")
