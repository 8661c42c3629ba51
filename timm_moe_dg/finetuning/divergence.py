"""Training that has diverged is stopped, before a checkpoint, an evaluation or a record can be made of it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import DivergenceError


class DivergenceCheck:
    """Looks whether training is still finite, and says since when it is not.

    Args:
        first_step: The step that training starts or goes on with.
        domains: Names of the training domains, all of which are in every step's batch.
    """

    def __init__(self, first_step: int, domains: Sequence[str]) -> None:
        self._unchecked = first_step
        self._domains = domains

    def __call__(self, step: int, total: Tensor, checkpoint: str) -> None:
        """Checks the steps since the last call, up to `step`.

        Args:
            step: The step that was just taken.
            total: A sum over these steps that is finite only if they all were; reading it waits for the device.
            checkpoint: The last good one, for the message.

        Raises:
            DivergenceError: It is not finite.
        """
        value = total.item()
        if not math.isfinite(value):
            since = f"at step {step}" if step == self._unchecked else f"in one of the steps {self._unchecked} to {step}"
            raise DivergenceError(
                f"loss={value}: not finite {since}, on a batch of {', '.join(self._domains)}; lower --lr, warm up, or "
                f"train without --amp-dtype float16; last good checkpoint: {checkpoint}"
            )
        self._unchecked = step + 1


def with_weights(total: Tensor, network: nn.Module) -> Tensor:
    """Makes a sum of losses not finite where a weight of the network is not."""
    finite = torch.stack([parameter.detach().isfinite().all() for parameter in network.parameters()]).all()
    return torch.where(finite, total, torch.full_like(total, math.nan))
