"""Trains a small network on tensors that fit in memory."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Objective = Callable[[Tensor, Tensor], Tensor]


def fit(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    objective: Objective,
    *,
    epochs: int,
    generator: torch.Generator,
    batch_size: int = 256,
    lr: float = 1e-3,
) -> Iterator[int]:
    """Trains with Adam and yields the number of finished epochs, so that the caller can evaluate in between.

    Args:
        model: Trained in place; every epoch runs in training mode.
        inputs: (N, ...).
        targets: (N, ...).
        objective: Maps outputs and targets of a batch to a scalar loss.
        epochs: Passes over all samples.
        generator: Shuffles the samples.
        batch_size: Samples in a step; the last batch of an epoch may be smaller.
        lr: Constant learning rate.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    for epoch in range(1, epochs + 1):
        model.train()  # the caller may have switched to evaluation mode
        for batch in torch.randperm(len(inputs), generator=generator).split(batch_size):
            optimizer.zero_grad()
            objective(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        yield epoch


@torch.no_grad()
def predict(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's outputs in evaluation mode."""
    return model.eval()(inputs)
