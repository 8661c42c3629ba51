"""Classifiers of text embeddings, such as CLIP's, in place of a network's own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import ArgumentError, check_regular_file
from ..layers.text_head import TextHead, layer_names
from .upcycling import name_of, record_change


def use_text_head(network: Any, path: str | Path, classes: Sequence[str]) -> None:
    """Replaces the classifier of a timm network by text embeddings from a file, in place.

    The published classifier of CLIP's image towers is the projection to the texts' space, and becomes a part of the
    head. SigLIP's towers need no projection. Saved by timm, the network is loaded again as model 'text_classifier', or
    as the mixture that it is.

    Args:
        network: With its published classifier, or without one.
        path: A safetensors file with `weight` (C, E), optionally `logit_scale`, and metadata `classes`: a JSON list.
        classes: The data's classes (C), which the file must have in the same order.

    Raises:
        ArgumentError: The file cannot be read, its classes or its E are others, or the network has several classifiers.

    >>> from safetensors.torch import save_file
    >>> save_file({"weight": torch.randn(2, 192)}, "texts.safetensors", {"classes": '["cat", "dog"]'})
    >>> network = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    >>> timm_moe_dg.models.use_text_head(network, "texts.safetensors", ["cat", "dog"])
    >>> network(torch.randn(1, 3, 224, 224)).shape
    torch.Size([1, 2])
    """
    weight, scale = _read(path, classes)
    width, classifier = weight.shape[1], network.get_classifier()
    projection = classifier.projection if isinstance(classifier, TextHead) else classifier
    if not isinstance(projection, nn.Linear | nn.Identity):
        remedy = f"{name_of(network)} has no single classifier; take another model"
        raise ArgumentError.of("head", f"text:{path}", remedy)
    published = projection.out_features if isinstance(projection, nn.Linear) else network.head_hidden_size
    if published != width:
        remedy = f"its embeddings have length {width}, and the network's {published}; take both towers of one model"
        raise ArgumentError.of("head", f"text:{path}", remedy)
    head = TextHead(len(classes), width)
    head.projection = projection
    with torch.no_grad():
        head.weight.copy_(weight)
        if scale is not None:
            head.logit_scale.copy_(scale)
    put_text_head(network, head.to(next(network.parameters())))


def put_text_head(model: Any, head: TextHead) -> None:
    """Replaces a network's classifier, and records it for timm's `save_for_hf`."""
    (name,) = layer_names(model.pretrained_cfg["classifier"])
    model.set_submodule(name, head)
    model.num_classes, width = head.weight.shape
    in_features = head.projection.in_features if isinstance(head.projection, nn.Linear) else None
    text_head = {"num_classes": model.num_classes, "width": width, "in_features": in_features}
    record_change(model, None if hasattr(model, "mixture_args") else "text_classifier", {"text_head": text_head})


def _read(path: str | Path, classes: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Reads the class weights (C, E) of a file, and the logarithm of its scale if it has one."""
    try:
        check_regular_file(path)
        with safe_open(path, "pt") as file:
            names = json.loads((file.metadata() or {}).get("classes", "null"))
            weight = file.get_tensor("weight").float()
            scale = file.get_tensor("logit_scale") if "logit_scale" in file.keys() else None  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        remedy = f"cannot be read as text embeddings ({error}); make the file with examples/text_head.py"
        raise ArgumentError.of("head", f"text:{path}", remedy) from error
    if names != list(classes) or weight.ndim != 2 or len(weight) != len(classes):
        remedy = f"its classes are {names!r:.80}, and the data's are {list(classes)!r:.80}; give these, in this order"
        raise ArgumentError.of("head", f"text:{path}", remedy)
    return weight, scale
