"""The seven registered models, their dense twins, variants small enough for a test, and inputs for them."""

from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn

import timm_moe_dg  # noqa: F401 (registers the models)

SMALL: dict[str, Any] = {"depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 10}


@dataclass(frozen=True)
class Case:
    """One registered model.

    Attributes:
        name: Registered name.
        tag: Of its only pretrained configuration.
        dense: timm's name and tag of the model that it is upcycled from.
        img_size: Registered image size.
        small_size: Image size of the small variant; four patches.
        metadata: 'coordinates', 'ids', or None for a model without metadata.
    """

    name: str
    tag: str
    dense: str
    img_size: int = 224
    small_size: int = 32
    metadata: str | None = None

    def build(self, **kwargs: Any) -> nn.Module:
        """The registered model."""
        return timm.create_model(self.name, **kwargs)

    def build_dense(self, **kwargs: Any) -> nn.Module:
        """Its dense twin."""
        return timm.create_model(self.dense.partition(".")[0], **kwargs)

    def small(self, **kwargs: Any) -> nn.Module:
        """A narrow, shallow variant of the registered model."""
        return self.build(**{**SMALL, "img_size": self.small_size, **kwargs})

    def small_dense(self, **kwargs: Any) -> nn.Module:
        """The small variant's dense twin."""
        return self.build_dense(**{**SMALL, "img_size": self.small_size, **kwargs})

    @property
    def without_chance(self) -> dict[str, float]:
        """Options that switch off what the mixture layers draw in training."""
        encoder = {"metadata_drop": 0.0} if self.metadata else {}
        return {"expert_drop": 0.0, "router_noise": 0.0, **encoder}

    def images(self, batch: int = 3, size: int | None = None, seed: int = 0) -> Tensor:
        """Random images for the small variant."""
        size = size or self.small_size
        return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))

    def locations(self, batch: int = 3) -> Tensor | None:
        """Metadata: known places, and an unknown one at every third position from the second on."""
        if self.metadata == "coordinates":
            known = torch.tensor([[10.0, 20.0], [float("nan"), 20.0], [-120.0, -33.0]])
        elif self.metadata == "ids":
            known = torch.tensor([3, -1, 322])
        else:
            return None
        return torch.cat([known] * (batch // 3 + 1))[:batch]

    def inputs(self, batch: int = 3, size: int | None = None) -> tuple[Tensor, ...]:
        """Everything that the small variant takes."""
        locations = self.locations(batch)
        return (self.images(batch, size),) if locations is None else (self.images(batch, size), locations)


_DEIT = "deit_in1k"
_AUGREG = "augreg_in21k_ft_in1k"
CASES = [
    Case("gmoe_tiny_patch16", _DEIT, "deit_tiny_patch16_224.fb_in1k"),
    Case("gmoe_small_patch16", _DEIT, "deit_small_patch16_224.fb_in1k"),
    Case("gmoe_base_patch16", _DEIT, "deit_base_patch16_224.fb_in1k"),
    Case("sfmoe_small", _DEIT, "deit_small_patch16_224.fb_in1k"),
    Case("hybrid_sfmoe_r26_s16", _AUGREG, f"vit_small_r26_s32_224.{_AUGREG}", small_size=64),
    Case("moge_tiny", _DEIT, "deit_tiny_patch16_224.fb_in1k", metadata="coordinates"),
    Case("moge_small_patch32_384", _AUGREG, f"vit_small_patch32_384.{_AUGREG}", 384, 64, "ids"),
]
BY_NAME = {case.name: case for case in CASES}
FAMILIES = [BY_NAME[name] for name in ("gmoe_tiny_patch16", "sfmoe_small", "hybrid_sfmoe_r26_s16", "moge_tiny")]
MOGE = [case for case in CASES if case.metadata]


def randomize(model: nn.Module, std: float = 0.05, seed: int = 1) -> nn.Module:
    """Moves every weight away from its initial value, so that no bias is 0 and no two experts are equal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=std)
    return model


def overlay(state_dict: dict[str, Tensor], num_classes: int = SMALL["num_classes"]) -> dict[str, Any]:
    """Arguments of `create_model` that load a state dict through timm's builder, its classifier included."""
    return {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": state_dict, "num_classes": num_classes}}


def upcycled(case: Case, dense: nn.Module, **kwargs: Any) -> nn.Module:
    """The small variant with a dense model's weights."""
    return case.small(**overlay(dense.state_dict()), **kwargs)


def mixture_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The mixture layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "record_routing")}
