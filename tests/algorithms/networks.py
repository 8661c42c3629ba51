"""Small networks in float64 without randomness, and minibatches for them."""

from copy import deepcopy
from functools import cache
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import timm_moe_dg  # noqa: F401 (registers the models)

CLASSES, DOMAINS = 4, 3


class SmallMlp(nn.Module):
    """Images (B, 3, 4, 4) -> 10 -> 6 features -> 4 logits, with what timm's models say of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out, self.head = nn.Linear(48, 10), nn.Linear(10, 6), nn.Linear(6, CLASSES)
        self.feature_info = [{"module": "hidden", "num_chs": 10}, {"module": "out", "num_chs": 6}]

    def get_classifier(self) -> nn.Module:
        return self.head

    def embed(self, images: Tensor) -> Tensor:
        return self.out(F.gelu(self.hidden(images.flatten(1)))).tanh()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.embed(images))


def embed(network: Any, images: Tensor) -> Tensor:
    """What the classifier is given, (B, D)."""
    if hasattr(network, "embed"):
        return network.embed(images)
    return network.forward_head(network.forward_features(images), pre_logits=True)


@cache
def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return SmallMlp().double()


@cache
def _mixture() -> nn.Module:
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "img_size": 8,
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 2,
        "moe_layers": (1,),
    }
    quiet: dict[str, Any] = {"router_noise": 0.0, "expert_drop": 0.0, "num_experts": 3}
    return timm.create_model("gmoe_tiny_patch16", num_classes=CLASSES, **size, **quiet).double()


NETWORKS = {"mlp": _mlp, "mixture": _mixture}


def network(name: str) -> nn.Module:
    """A copy with the same weights every time, in training mode."""
    return deepcopy(NETWORKS[name]()).train()


def minibatches(name: str, step: int, domains: int = DOMAINS, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    """One minibatch per domain; the domains' images differ in their mean."""
    generator = torch.Generator().manual_seed(step)
    side = 4 if name == "mlp" else 8
    return [
        (
            torch.randn(size, 3, side, side, generator=generator, dtype=torch.float64) + 0.5 * domain,
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for domain in range(domains)
    ]
