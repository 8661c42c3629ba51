"""Small networks in float64 without randomness, minibatches for them, and methods that train them."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache, partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from timm_moe_dg.algorithms import ALGORITHMS, Algorithm, Setup, StepContext
from timm_moe_dg.layers import LossWeights

CLASSES, DOMAINS = 4, 3
LR, WEIGHT_DECAY, AUX = 1e-3, 1e-3, 0.01
# Penalties set in at the second of three steps, with weights that matter
HPARAMS: dict[str, dict[str, float]] = {
    "IRM": {"irm_penalty_anneal_iters": 1},
    "VREx": {"vrex_penalty_anneal_iters": 1},
    "GroupDRO": {"groupdro_eta": 2.0},
    "MLDG": {"n_meta_test": 1, "mldg_beta": 0.7},
    "DANN": {"d_steps_per_g_step": 2, "grad_penalty": 0.3, "weight_decay_d": 0.01, "mlp_width": 8},
    "CDANN": {"grad_penalty": 0.3, "lr_d": 1e-2, "mlp_width": 8, "beta1": 0.2},
    "Fish": {"meta_lr": 0.3},
    "Fishr": {"penalty_anneal_iters": 1, "ema": 0.6},
    "RDM": {"rdm_penalty_anneal_iters": 1, "rdm_lr": 3e-4},
}


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
def _mixture(**router: Any) -> nn.Module:
    torch.manual_seed(0)
    size: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
    quiet: dict[str, Any] = {"router_noise": 0.0, "expert_drop": 0.0, "num_experts": 3, "moe_layers": (1,)}
    return timm.create_model("gmoe_tiny_patch16", num_classes=CLASSES, **size, **quiet, router_kwargs=router).double()


NETWORKS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "mixture": _mixture}
# Whose routers have a state of their own
BALANCED: dict[str, Callable[[], nn.Module]] = {
    "bias": partial(_mixture, bias_speed=0.1),
    "thresholds": partial(_mixture, choice="threshold"),
}


def network(name: str) -> nn.Module:
    """A copy with the same weights every time, in training mode."""
    return deepcopy({**NETWORKS, **BALANCED}[name]()).train()


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


def build(
    name: str, net: nn.Module, domains: int = DOMAINS, per_step: int | None = None, **hparams: float
) -> tuple[Algorithm, StepContext]:
    """An algorithm in float64 and what it takes a step with."""
    torch.manual_seed(7)  # discriminators
    hparams = {"lr": LR, "weight_decay": WEIGHT_DECAY, **HPARAMS.get(name, {}), **hparams}
    weights = LossWeights(aux_coef=AUX)
    setup = Setup(net, domains, CLASSES, hparams=hparams, loss_weights=weights, domains_per_step=per_step)
    algorithm = ALGORITHMS[name](setup).double()
    groups = algorithm.parameter_groups(LR, WEIGHT_DECAY)
    optimizer = torch.optim.Adam([{"params": list(net.parameters())}, *groups], lr=LR, weight_decay=WEIGHT_DECAY)
    return algorithm, StepContext(net, optimizer)


def train(algorithm: Algorithm, context: StepContext, name: str, steps: Iterable[int]) -> dict[str, Tensor]:
    """Takes steps with random numbers of their own, and returns the scalars of the last one."""
    for step in steps:
        torch.manual_seed(step)
        losses = algorithm.update(context, minibatches(name, step))
    return losses
