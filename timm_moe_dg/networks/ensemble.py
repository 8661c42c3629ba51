"""Ensembles of networks, each with its own preprocessing and its own order of classes."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..cli.values import LOCAL
from ..data import evaluation_transform
from ..data.bands import Pixels, Transform
from ..errors import ArgumentError
from .build import DataConfig, Network, data_config, ensemble_members
from .trained import WithFeatures, label_names, load_trained


class Ensemble(nn.Module):
    """Mean of the class probabilities of several networks, returned as logits: their logarithms.

    Images are transformed by `view`. Metadata is the same for all members. Classes have the order and the names of the
    first member, and members with other classes are an `ArgumentError`. EoA (Arpit et al., NeurIPS 2022,
    arXiv:2110.10832) averages logits instead.

    Args:
        networks: The members, in evaluation mode.
        img_size: Side of the input in pixels; None for that of each member.
        configs: Preprocessing of each member, by default the one that it was saved with.
    """

    def __init__(
        self, networks: Sequence[Network], img_size: int | None = None, configs: Sequence[DataConfig] | None = None
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.configs = configs or [data_config(network, img_size) for network in networks]
        self.orders = [_order(network, networks[0]) for network in networks]
        self.num_classes = networks[0].num_classes
        self.pretrained_cfg = {**networks[0].pretrained_cfg, "input_size": self.configs[0]["input_size"]}
        for name in ("metadata_encoder", "expert_mode", "bands"):  # of members that have them
            if hasattr(networks[0], name):
                setattr(self, name, getattr(networks[0], name))

    @property
    def view(self) -> Transform:
        """The transform from an image to the input of `forward`."""
        if self._is_uniform:
            return _transform(self.configs[0])
        return partial(_side_by_side, [_transform(config) for config in self.configs])

    @property
    def _is_uniform(self) -> bool:
        return all(config == self.configs[0] for config in self.configs)

    def with_features(self) -> "Ensemble":
        """Returns an ensemble that also returns the members' features, side by side: (B, D_1 + ... + D_n)."""
        features = Ensemble(list(self.networks), configs=self.configs)
        features.networks = nn.ModuleList(map(WithFeatures, self.networks))
        return features

    def forward(self, images: Tensor, *metadata: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(B, C, H, W) images, or (B, P) rows of `view`, and metadata -> (B, num_classes), and features if any."""
        outputs = [network(view, *metadata) for network, view in zip(self.networks, self._inputs(images), strict=True)]
        logits = [output[0] if isinstance(output, tuple) else output for output in outputs]
        ordered = [values.float()[:, order] for values, order in zip(logits, self.orders, strict=True)]
        # The logarithm of a mean of probabilities, without underflow
        mean = torch.stack(ordered).log_softmax(-1).logsumexp(0) - math.log(len(ordered))
        if isinstance(outputs[0], tuple):
            return mean, torch.cat([features for _, features in outputs], dim=1)
        return mean

    def _inputs(self, images: Tensor) -> Sequence[Tensor]:
        if self._is_uniform:
            return [images] * len(self.configs)
        shapes = [config["input_size"] for config in self.configs]
        parts = images.split([math.prod(shape) for shape in shapes], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def load_predictor(name: str, *, img_size: int | None = None, **keywords: Any) -> Network:
    """Loads a trained network, see `load_trained`, or the ensemble that `average --method ensemble` wrote."""
    members = ensemble_members(Path(name.removeprefix(LOCAL))) if name.startswith(LOCAL) else []
    if not members:
        return load_trained(name, img_size=img_size, **keywords)
    networks = [load_trained(f"{LOCAL}{member}", img_size=img_size, **keywords) for member in members]
    return Ensemble(networks, img_size).eval()


def evaluation_view(network: Network, img_size: int | None = None) -> Transform:
    """Returns the transform from an image to the input of a network or of an ensemble."""
    return network.view if isinstance(network, Ensemble) else _transform(data_config(network, img_size))


def _transform(config: DataConfig) -> Transform:
    return evaluation_transform(config["input_size"][1:], config["mean"], config["std"])


def _side_by_side(transforms: Sequence[Transform], image: Pixels) -> Tensor:
    """The inputs of several networks for one image, flat and one after the other."""
    return torch.cat([transform(image).flatten() for transform in transforms])


def _order(network: Network, first: Network) -> list[int]:
    """Positions of a network's logits in the order of the first network's classes."""
    names, expected = label_names(network), label_names(first)
    if names is None or expected is None:
        if network.num_classes == first.num_classes:
            return list(range(network.num_classes))
    elif sorted(names) == sorted(expected):
        return [names.index(name) for name in expected]
    other = sorted({*(names or ())} ^ {*(expected or ())})[:8] or network.num_classes
    remedy = f"the members have other classes than the first one: {other}; average networks of the same classes"
    raise ArgumentError.of("classes", list(expected or ())[:8], remedy)
