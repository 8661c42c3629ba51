"""Fitting a small network to tensors that are in memory whole, for experiments on synthetic data."""

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
    """Trains with Adam and yields after each epoch, so that the caller can look at the model.

    Args:
        model: Trained in place; in training mode during an epoch, whatever the caller sets in between.
        inputs: (N, ...).
        targets: (N, ...).
        objective: The model's outputs on a batch and the batch's targets -> a scalar to minimize.
        epochs: Passes over all samples.
        generator: Draws the order of the samples.
        batch_size: Samples in a step; the last batch of an epoch may be smaller.
        lr: Constant learning rate.

    Yields:
        The number of epochs that are done, from 1.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in torch.randperm(len(inputs), generator=generator).split(batch_size):
            optimizer.zero_grad()
            objective(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        yield epoch


@torch.no_grad()
def answers(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's outputs in evaluation mode."""
    return model.eval()(inputs)
