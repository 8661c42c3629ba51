"""Trained networks: loading with their classifier, class names, the metadata that they read, and their features."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Domain, Split
from ..data.domains import check_spellings, listed, normalized
from ..errors import ArgumentError, CheckpointError, check_name
from .build import UNUSED, Network, build_network, saved_config

_logger = logging.getLogger(__name__)
# Attributes of modules that change outputs and are in no weight
BEHAVIOR: tuple[str, ...] = ("expert_mode", "shared_only", "forced_expert", "radius", "top_k", "normalize_weights")
BEHAVIOR += ("scores", "choice", "seen_locations")
BEHAVIOR += ("first_frequency", "num_heads", "eps", "approximate", "global_pool", "pool_type", "pool_include_prefix")
BEHAVIOR += ("beta", "stride", "padding", "dilation", "window_size", "shift_size")


def load_trained(
    name: str,
    *,
    pretrained: bool = False,
    initial_checkpoint: str | None = None,
    coverage_radius: float | None = None,
    expert_mode: str | None = None,
    **kwargs: Any,
) -> Network:
    """Builds a network with its trained weights and classifier, in evaluation mode.

    The weights of a `local-dir:` or `hf-hub:` source are always loaded. A MoGE model keeps the saved expert mode, such
    as 'shared' if only the shared expert was trained, unless `expert_mode` is "routed" or "shared". The
    `coverage_radius` replaces the saved one, see `models.MetadataRoutingOptions`; infinity for none. Other arguments
    are those of `build_network`.
    """
    check_name(name)
    pretrained = pretrained or (initial_checkpoint is None and ":" in name)
    if not pretrained and initial_checkpoint is None:
        remedy = "comes without weights; add --pretrained or --initial-checkpoint FILE, or give local-dir:FOLDER"
        raise ArgumentError.of("model", name, remedy)
    weights: dict[str, Any] = {"pretrained": pretrained, "initial_checkpoint": initial_checkpoint}
    network: Network = build_network(name, None, **weights, **kwargs)
    if not network.num_classes:
        raise CheckpointError(f"model={name!r}: its weights have no classifier; fine-tune it first")
    # They would give NaN for every image
    if broken := [key for key, value in network.named_parameters() if not value.isfinite().all()]:
        raise CheckpointError(
            f"model={name!r}: {len(broken)} of its weights are not finite, {broken[0]} among them; its training "
            "diverged, or the file is damaged: give another checkpoint"
        )
    if hasattr(network, "set_expert_mode"):
        network.set_expert_mode(expert_mode or saved_config(name).get("expert_mode") or "routed")
    elif expert_mode is not None:
        raise ArgumentError.of("expert_mode", expert_mode, f"{name} has no metadata-routed experts")
    if coverage_radius is not None:
        set_coverage_radius(network, coverage_radius)
    return network.eval()


def set_coverage_radius(network: Network, radius: float) -> None:
    """Sets how far from its training coordinates a MoGE model routes, in km, see `models.MetadataRoutingOptions`."""
    if not hasattr(network, "set_coverage_radius"):
        raise ArgumentError.of("coverage_radius", radius, f"{type(network).__name__} has no metadata-routed experts")
    network.set_coverage_radius(radius)


def label_names(network: Network) -> tuple[str, ...] | None:
    """Returns the names of a network's classes in the order of its logits, or None if the checkpoint has none."""
    names = _in_order(network.pretrained_cfg.get("label_names"))
    return names if names and len(names) == network.num_classes else None


def saved_classes(name: str, checkpoint: str | None) -> tuple[str, ...]:
    """Returns the class names beside a file of weights, else of a `local-dir:` or `hf-hub:` source; may be empty."""
    return tuple(map(normalized, _in_order(saved_config(name, checkpoint).get("label_names"))))


def _in_order(names: Sequence[str] | Mapping[str, str] | None) -> tuple[str, ...]:
    """Returns names in the order of logits, from a list or from a table of names by position."""
    if isinstance(names, Mapping):
        names = [names[key] for key in sorted(names, key=int)]
    return tuple(map(str, names or ()))


def renew_classifier(network: Network, names: Sequence[str], classes: Sequence[str], num_classes: int) -> None:
    """Gives a network whose logits have `names` a classifier of `classes`. Rows are kept by name, others start anew."""
    if network.num_classes == num_classes and tuple(names[: len(classes)]) == tuple(classes):
        return
    if len(names) != network.num_classes:
        names = ()  # those of another classifier
    before = _classifier_state(network)
    network.reset_classifier(num_classes)
    kept = {row: names.index(name) for row, name in enumerate(classes) if name in names}
    for key, value in _classifier_state(network).items():
        if key in before and before[key].shape[1:] == value.shape[1:]:
            value[list(kept)] = before[key][list(kept.values())]
    new = [name for name in classes if name not in names]
    gone = [name for name in names if name not in classes and not name.startswith(UNUSED)]
    changes = f"new: {listed(new) or 'none'}; left out: {listed(gone) or 'none'}"
    _logger.info(f"classifier: {len(kept)} classes keep their rows, by name; {changes}")


def _classifier_state(network: Network) -> dict[str, Tensor]:
    """Parameters of a network's classifiers, of which distilled ones have several."""
    classifier = network.get_classifier()
    return nn.ModuleList(classifier if isinstance(classifier, tuple) else [classifier]).state_dict()


def class_positions(network: nn.Module, classes: Sequence[str]) -> Tensor:
    """Returns the data's class for each logit, int64 (num_classes,), a permutation.

    Classes are matched by name. A checkpoint without names is assumed to have the data's order. Other
    classes than those of the data are an `ArgumentError`.
    """
    names = label_names(network)
    if names is None and network.num_classes == len(classes):
        return torch.arange(len(classes))
    if names is None or sorted(names) != sorted(classes):
        trained = _counted(names) if names else f"{network.num_classes} without names"
        remedy = f"the checkpoint's are {trained}; fine-tune it on these classes, or give the data it was trained on"
        raise ArgumentError.of("classes", _counted(classes), remedy)
    positions = {name: position for position, name in enumerate(classes)}
    return torch.tensor([positions[name] for name in names])


def match_classes(
    network: nn.Module, domains: Sequence[Domain], splits: Sequence[Split]
) -> tuple[Sequence[Domain], Sequence[Split], Tensor]:
    """Matches the classes of data to those of a network by name, for an evaluation.

    Images of classes that the network lacks are left out, and their numbers logged. Data may lack classes.

    Returns:
        Domains and splits without those images, and each logit's class as `class_positions` returns it.
    """
    classes, names = domains[0].classes, tuple(map(normalized, label_names(network) or ()))
    if not set(names) & set(classes) or set(names) == set(classes):
        return domains, splits, class_positions(network, classes)
    check_spellings("classes", [(name, "the data") for name in classes] + [(name, "the model") for name in names])
    positions = {name: position for position, name in enumerate(names)}
    renumbered = np.array([positions.get(name, -1) for name in classes])
    counts = np.bincount(np.concatenate([domain.targets for domain in domains]), minlength=len(classes))
    if unknown := [f"{name!r} ({counts[index]})" for index, name in enumerate(classes) if renumbered[index] < 0]:
        total = int(counts[renumbered < 0].sum())
        if total == counts.sum():
            raise ArgumentError.of(
                "classes", _counted(classes), f"the model has none of those with images: {_counted(names)}"
            )
        _logger.warning(f"{total} images of classes that the model lacks are left out: {', '.join(unknown)}")
    if absent := [repr(name) for name in names if name not in classes and not name.startswith(UNUSED)]:
        _logger.warning(f"the data have no images of the model's classes {', '.join(absent)}")
    matched = []
    for domain, split in zip(domains, splits, strict=True):
        targets = renumbered[np.asarray(domain.targets, int)]
        whole = replace(domain, classes=names, targets=targets, split=split)
        matched.append(whole.without(set(np.flatnonzero(targets < 0).tolist())) if (targets < 0).any() else whole)
    return matched, [domain.split or Split(*[np.arange(0)] * 2) for domain in matched], torch.arange(len(names))


def metadata_encoder(network: nn.Module) -> nn.Module | None:
    """Returns the encoder of the metadata that a network reads; None for a network that reads none."""
    return getattr(getattr(network, "metadata_encoder", None), "encoder", None)


def metadata_columns(network: nn.Module) -> tuple[str, ...]:
    """Returns the names of the numbers that a network reads after longitude and latitude."""
    return getattr(metadata_encoder(network), "columns", ())


def uses_metadata(network: nn.Module, images: Tensor, *metadata: Tensor) -> Tensor:
    """Whether a network in evaluation uses the metadata of images (B, ...), bool (B,).

    MoGE uses no unknown place, no place outside the coverage, and no location id without a training image.
    """
    if not hasattr(network, "metadata_encoder"):
        return torch.zeros(len(images), dtype=torch.bool, device=images.device)
    present: Tensor = network.metadata_encoder(images, *metadata)[1]  # type: ignore[operator]
    return present


def unknown_metadata(metadata: np.ndarray, columns: Sequence[str] = ()) -> np.ndarray:
    """Marks rows (N, ...) of metadata by which no network routes, bool (N,): negative ids, or unknown numbers."""
    if metadata.dtype.kind != "f":
        return (metadata < 0).reshape(len(metadata))
    missing = np.isnan(metadata)
    return missing.all(axis=1) if columns else missing.any(axis=1)


def warn_of_unknown_metadata(network: nn.Module, count: int, total: int, remedy: str = "") -> None:
    """Logs how many images have no metadata for a network that routes by them."""
    if count and hasattr(network, "metadata_encoder") and getattr(network, "expert_mode", "routed") == "routed":
        goal = ", which go to the shared expert" if hasattr(network, "expert_mode") else ""
        _logger.warning(f"without metadata: {count} of {total} images{goal}{remedy}")


def takes_metadata(network: nn.Module, domains: Sequence[Domain], columns: Sequence[str] | None = None) -> bool:
    """Returns whether a network gets the images' metadata: it reads metadata, and every domain has them.

    Other `columns` after longitude and latitude than those that the network reads are an `ArgumentError`.
    """
    takes = hasattr(network, "metadata_encoder") and all(domain.metadata is not None for domain in domains)
    given, expected = tuple(columns or ()), metadata_columns(network)
    if (takes or given) and given != expected:
        remedy = "the network reads none; leave it out, or train a MoGE model with them"
        if expected:
            remedy = f"the network reads others; give --metadata-columns {' '.join(expected)}"
        raise ArgumentError.of("metadata_columns", list(given), remedy)
    return takes


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)}: {listed(names, 8)}"


class WithFeatures(nn.Module):
    """A timm model that returns logits (B, C) and the inputs (B, D) of its classifier, which must be a single one.

    Those of the members of an ensemble stand side by side.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self._classifiers()

    def _classifiers(self) -> list[nn.Module]:
        return [single_classifier(member) for member in getattr(self.network, "networks", [self.network])]

    def forward(self, images: Tensor, *metadata: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) images and their metadata -> logits and features."""
        collected: list[Tensor] = []

        def collect(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            collected.append(inputs[0].flatten(1).float())

        handles = [classifier.register_forward_pre_hook(collect) for classifier in self._classifiers()]
        try:
            logits = self.network(images, *metadata)
        finally:
            for handle in handles:
                handle.remove()
        return logits, torch.cat(collected, dim=1)


def single_classifier(network: Network) -> nn.Module:
    """Returns a network's classifier. None, or several, is an `ArgumentError`."""
    classifier = network.get_classifier()
    if not isinstance(classifier, nn.Module) or isinstance(classifier, nn.Identity):
        raise ArgumentError.of("model", type(network).__name__, "has no single classifier; take a model with one")
    return classifier


def network_digest(network: nn.Module) -> str:
    """Returns the SHA-256 of everything that decides a network's logits: weights, coverage radius and expert mode."""
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for name, module in network.named_modules():
        behavior = {key: vars(module)[key] for key in BEHAVIOR if key in vars(module)}
        digest.update(f"{name} {type(module).__name__} {behavior}".encode())
    return digest.hexdigest()
