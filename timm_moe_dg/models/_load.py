"""Loading: dense checkpoints into mixture models (upcycling), and mixture checkpoints back, losing nothing silently.

timm loads without `strict` as soon as the number of classes differs, which in fine-tuning is always; so this filter
itself compares the checkpoint with the model and refuses what does not fit.
"""

import logging
from typing import Any, cast

import torch
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ..conversion.tutel import convert_tutel_state_dict, is_tutel_state_dict
from ..errors import CheckpointError
from ..layers.moe_mlp import RoutedMlp

_logger = logging.getLogger(__name__)

# Nothing in a dense checkpoint corresponds to these; they start as the model drew them.
_ROUTER_NAMES = ("router.", "gamma")
METADATA_PREFIX = "metadata_encoder."
_INDEX_PREFIX = f"{METADATA_PREFIX}coverage."


def upcycle_filter_fn(state_dict: dict[str, Tensor], model: VisionTransformer) -> dict[str, Tensor]:
    """The `pretrained_filter_fn` for every model of this package.

    A mixture layer that the checkpoint knows only as a dense feed-forward gets a copy of it in each expert (and in the
    shared expert of MoGE) and keeps its freshly drawn router. A checkpoint of a mixture model passes through, also one
    of the GMoE authors' released code.

    Args:
        state_dict: The checkpoint as read.
        model: The model that it is for.

    Returns:
        A complete state dict for the model, but for the classifier, which timm fits afterwards.

    Raises:
        CheckpointError: Weights that the model needs are missing, do not fit, or belong to blocks it does not have.
    """
    if is_tutel_state_dict(state_dict):
        state_dict = convert_tutel_state_dict(state_dict)
    loaded = checkpoint_filter_fn(state_dict, model, adapt_layer_scale=True)
    own = model.state_dict()
    rename_final_norm(loaded, own)
    # Where another run was trained; a model that is to have an index says so, or gets its own
    loaded = {key: value for key, value in loaded.items() if key in own or not key.startswith(_INDEX_PREFIX)}
    upcycled: list[RoutedMlp] = [
        module
        for name, module in model.named_modules()
        if isinstance(module, RoutedMlp) and _upcycle_layer(f"{name}.", loaded, own, _perturbation(module))
    ]
    if upcycled:
        loaded |= {key: own[key] for key in own if key.startswith(METADATA_PREFIX) and key not in loaded}
    check_complete(loaded, own, model)
    _report(model, upcycled)
    return loaded


def _perturbation(module: nn.Module) -> float:
    """How much noise upcycling adds to a layer's experts, relative to the standard deviation of each matrix."""
    return getattr(module, "expert_perturbation", 0.0)


def _upcycle_layer(prefix: str, loaded: dict[str, Tensor], own: dict[str, Tensor], perturbation: float) -> bool:
    """Fills one mixture layer from its dense counterpart, in place; False if the checkpoint has the layer itself."""
    if any(key.startswith((f"{prefix}router.", f"{prefix}experts.")) for key in loaded):
        return False
    dense = {key.removeprefix(prefix): loaded.pop(key) for key in list(loaded) if key.startswith(prefix)}
    for key in [key for key in own if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        room, _, source = name.partition(".")
        if name.startswith(_ROUTER_NAMES):
            loaded[key] = own[key]
        elif source in dense:
            stacked = room == "experts" and own[key].ndim == dense[source].ndim + 1
            value = dense[source].expand(own[key].shape[0], *dense[source].shape) if stacked else dense[source]
            loaded[key] = value.clone()  # own storage for every expert: an expanded view could not be saved
            if stacked and value.ndim == 3 and perturbation > 0:
                loaded[key] += torch.randn_like(value) * perturbation * dense[source].std()
    return True


def rename_final_norm(loaded: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """With average pooling timm's model normalizes after the pool, under another name."""
    source, target = ("norm", "fc_norm") if "fc_norm.weight" in own else ("fc_norm", "norm")
    for kind in ("weight", "bias"):
        if f"{target}.{kind}" in own and f"{target}.{kind}" not in loaded and f"{source}.{kind}" in loaded:
            loaded[f"{target}.{kind}"] = loaded.pop(f"{source}.{kind}")


def check_complete(loaded: dict[str, Tensor], own: dict[str, Tensor], model: VisionTransformer) -> None:
    """Refuses a filtered checkpoint that does not hold exactly what the model needs, its classifier left aside.

    Raises:
        CheckpointError: Lists what is missing, of another shape, or of blocks that the model does not have.
    """
    classifier, first_conv = (f"{_cfg(model)[key]}." for key in ("classifier", "first_conv"))
    expected = [key for key in own if not key.startswith(classifier)]
    missing = [key for key in expected if key not in loaded]
    # timm sums or repeats the first convolution's input channels after this filter
    misfits = [
        f"{key}: {tuple(loaded[key].shape)} in the checkpoint, {tuple(own[key].shape)} in the model"
        for key in expected
        if key in loaded and loaded[key].shape != own[key].shape and not key.startswith(first_conv)
    ]
    surplus = [key for key in loaded if key.startswith("blocks.") and key not in own]
    problems = {"missing from the checkpoint": missing, "of another shape": misfits, "not in the model": surplus}
    found = [f"{what} ({len(keys)}): {'; '.join(keys)}" for what, keys in problems.items() if keys]
    if found:
        remedy = "give a checkpoint of this model or of its dense counterpart"
        raise CheckpointError(f"{type(model).__name__} cannot load this checkpoint: {remedy}. {'. '.join(found)}")


def _report(model: VisionTransformer, upcycled: list[RoutedMlp]) -> None:
    cfg = _cfg(model)
    given = "the given state dict" if cfg.get("state_dict") else None
    source = given or cfg.get("file") or cfg.get("hf_hub_id") or cfg.get("url") or "checkpoint"
    filled = sum(module.experts.num_experts for module in upcycled)
    if upcycled:
        noise = max(_perturbation(module) for module in upcycled)
        note = f", weights perturbed by {noise:g} of their standard deviation" if noise else ""
        _logger.info(f"Upcycled from {source}: {filled} experts filled in {len(upcycled)} mixture layers{note}.")
    else:
        _logger.info(f"Loaded a mixture-of-experts checkpoint from {source}: no expert upcycled.")


def _cfg(model: VisionTransformer) -> dict[str, Any]:
    """The pretrained cfg, which timm's builder sets once the model is made."""
    return cast(dict[str, Any], model.pretrained_cfg)
