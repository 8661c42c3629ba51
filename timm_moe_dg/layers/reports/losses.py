"""Losses that layers and networks report, and their weights in the objective of a run.

A module with losses of its own has a method `training_losses(targets, weights)`, which returns those of the last
training forward by name. `losses.reported_losses` calls it on every module of a model.
"""

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor


def _weight(default: float, loss: str, words: str) -> Any:
    return field(default=default, metadata={"loss": loss, "words": words})


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights of the mixtures' losses, and the temperature of one. Options of a run have the same names.

    Losses with the weight 0 are not computed, apart from the auxiliary loss. The names of the losses and their
    descriptions are in the metadata of the fields. `decades` there is half the width of a random search around a
    default, which leaves out weights of 0.
    """

    aux_coef: float = _weight(0.01, "aux_loss", "the routers' auxiliary loss")
    z_coef: float = _weight(0.0, "z_loss", "the routers' z-loss")
    image_coef: float = _weight(0.0, "image_loss", "the balance of experts within images")
    domain_coef: float = _weight(0.0, "domain_loss", "the balance of experts within domains")
    cka_coef: float = _weight(0.01, "cka_loss", "MoGE's diversity loss (CKA)")  # exists while tokens are forced
    supcon_coef: float = _weight(0.1, "supcon_loss", "MoGE's invariance loss (SupCon)")
    supcon_temperature: float = field(default=0.1, metadata={"decades": 0.5})

    @classmethod
    def of(cls, options: object) -> Self:
        """Takes the weights from the attributes of the same names."""
        return cls(**{item.name: getattr(options, item.name) for item in fields(cls)})


class ReportedLoss(NamedTuple):
    """A loss of one module."""

    value: Tensor  # scalar, not weighted
    weight: float = 1.0
    over_modules: str = "sum"  # the value for a model, of those of its modules: their "sum", "mean" or "last"


class ReportsLosses(Protocol):
    """A module that has losses of its own."""

    def training_losses(self, targets: Tensor, weights: LossWeights) -> dict[str, ReportedLoss]:
        """Returns the losses of the last training forward, for its class indices (B,)."""
