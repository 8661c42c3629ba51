"""What every algorithm is: an objective over one minibatch per training domain, and how a step minimises it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ..losses import auxiliary_loss, moge_losses

# Per training domain: images (B, 3, H, W), targets (B,), and metadata for models that take them
Minibatches = Sequence[tuple[Tensor, ...]]


@dataclass
class Algorithm(ABC):
    """A training method.

    Attributes:
        aux_coef: Weight of the routers' auxiliary loss, added once per forward pass; models without routers have none.
        cka_coef: Weight of MoGE's diversity loss; other models have none, nor has MoGE while no tokens are forced.
        supcon_coef: Weight of MoGE's invariance loss; other models have none.
        supcon_temperature: Its temperature.
        HPARAMS: Hyper-parameters of the method and their defaults, beside those of the benchmark.
    """

    aux_coef: float
    cka_coef: float = 0.0
    supcon_coef: float = 0.0
    supcon_temperature: float = 0.1
    HPARAMS: ClassVar[Mapping[str, float]] = {}

    @abstractmethod
    def objective(self, model: nn.Module, minibatches: Minibatches) -> dict[str, Tensor]:
        """Computes what is to be minimised.

        Args:
            model: Maps images (B, 3, H, W) to logits (B, num_classes).
            minibatches: Images and targets of each training domain.

        Returns:
            Scalars: "loss", which is minimised, and its parts for the records.
        """

    def update(
        self,
        model: nn.Module,
        minibatches: Minibatches,
        optimizer: Optimizer,
        backward: Callable[[Tensor], None],
    ) -> dict[str, Tensor]:
        """Takes one step on the objective; methods with inner loops replace this.

        Args:
            model: The model to train.
            minibatches: Images and targets of each training domain.
            optimizer: Steps the model's parameters.
            backward: Computes gradients of a loss, scaled or synchronised as the run needs.

        Returns:
            The objective's scalars, detached.
        """
        losses = self.objective(model, minibatches)
        optimizer.zero_grad()
        backward(losses["loss"])
        optimizer.step()
        return {name: value.detach() for name, value in losses.items()}

    def forward(self, model: nn.Module, images: Tensor, *metadata: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the model once; returns logits (B, num_classes) and that pass's auxiliary loss, a scalar, unweighted."""
        logits = model(images, *metadata)
        return logits, auxiliary_loss(model)

    def specialization(self, model: nn.Module, targets: Tensor) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Weighs MoGE's own losses of the last forward pass; returns the sum and each loss, unweighted, by name."""
        losses = moge_losses(model, targets, self.supcon_temperature)
        weights = {"cka_loss": self.cka_coef, "supcon_loss": self.supcon_coef}
        return sum(weights[name] * loss for name, loss in losses.items()), losses
