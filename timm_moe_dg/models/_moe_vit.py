"""timm's VisionTransformer with token-routed experts in some blocks: the class behind GMoE and SF-MoE."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from timm.models import build_model_with_cfg
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from ..layers import MoeMlp, RoutedMlp
from ._block import MoeLayers, mixture_block, resolve_moe_layers
from ._options import record_options
from ._upcycle import upcycle_filter_fn

ModelT = TypeVar("ModelT", bound=VisionTransformer)

IMAGENET_CFG: dict[str, Any] = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": None,
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "fixed_input_size": True,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
    "license": "apache-2.0",
}


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Names of the expert and router parameters that take no weight decay.

    Expert biases are (E, features), so rules by number of dimensions would decay them; the length of an expert's code
    does not matter to a cosine, so decaying it only changes the effective learning rate.
    """
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, RoutedMlp)
        for name, _ in module.named_parameters()
        if name in ("experts.fc1.bias", "experts.fc2.bias", "router.codes", "router.logit_scale")
    }


class MoeVisionTransformer(VisionTransformer):
    """Vision transformer whose feed-forward is a `MoeMlp` in some blocks (GMoE, section 4.1; SF-MoE, section 2.3).

    Everything else is timm's VisionTransformer, arguments included.

    Args:
        *args: As timm's VisionTransformer.
        moe_layers: Which blocks, see `resolve_moe_layers`.
        num_experts: E.
        top_k: Experts per token.
        router: 'cosine' or 'linear'.
        capacity_factor: Training capacity; None is dropless.
        normalize_weights: Let combine weights sum to 1; None means top_k > 1.
        router_noise: Standard deviation of the router's noise in training; None means 1 / num_experts.
        expert_drop: Dropout rate of the experts' hidden activations in training.
        **kwargs: As timm's VisionTransformer.

    Raises:
        MoeLayersError: See `resolve_moe_layers`.
        RouterError: See `MoeMlp`.
    """

    def __init__(
        self,
        *args: Any,
        moe_layers: MoeLayers = "last_two",
        num_experts: int = 6,
        top_k: int = 2,
        router: str = "cosine",
        capacity_factor: float | None = None,
        normalize_weights: bool | None = None,
        router_noise: float | None = None,
        expert_drop: float = 0.1,
        **kwargs: Any,
    ) -> None:
        moe_args = {
            "num_experts": num_experts,
            "top_k": top_k,
            "router": router,
            "capacity_factor": capacity_factor,
            "normalize_weights": normalize_weights,
            "router_noise": router_noise,
            "expert_drop": expert_drop,
        }
        layers = resolve_moe_layers(moe_layers, kwargs.get("depth", 12))
        kwargs["block_fn"] = mixture_block(Block, layers, MoeMlp, moe_args)
        super().__init__(*args, **kwargs)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """timm's, and the experts' biases and codes."""
        return super().no_weight_decay() | undecayed_parameters(self)


def create_moe_vit(
    model_cls: type[ModelT],
    variant: str,
    pretrained: bool = False,
    filter_fn: Callable[..., dict[str, Tensor]] = upcycle_filter_fn,
    **kwargs: Any,
) -> ModelT:
    """Builds a registered model through timm's builder, upcycling what it loads, and records all of its options.

    Args:
        model_cls: The model's class.
        variant: Registered name.
        pretrained: Load the weights that the model's cfg names.
        filter_fn: Fits a checkpoint to the model; timm calls it with both.
        **kwargs: Of the class and of timm's builder.

    Returns:
        The model, or timm's feature wrapper around it with `features_only=True`.
    """
    out_indices = kwargs.pop("out_indices", 3)
    model = build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )
    record_options(model, model_cls, kwargs)
    return model
