"""A network with a loss of its own: it is weighted, trained and recorded without an edit to the package."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from timm_moe_dg.algorithms import ERM, Setup, StepContext
from timm_moe_dg.layers import LossWeights, ReportedLoss
from timm_moe_dg.losses import reported_losses


class Sparse(nn.Module):
    """A layer that reports the mean magnitude of its outputs, with a weight of its own."""

    def __init__(self, combine: str) -> None:
        super().__init__()
        self.linear, self.combine = nn.Linear(4, 4), combine

    def forward(self, x: Tensor) -> Tensor:
        self.outputs = self.linear(x)
        return self.outputs

    def training_losses(self, targets: Tensor, weights: LossWeights) -> dict[str, ReportedLoss]:
        """Returns "sparsity_loss"."""
        assert len(targets) == len(self.outputs)
        return {"sparsity_loss": ReportedLoss(self.outputs.abs().mean(), 0.25, self.combine)}


@pytest.mark.parametrize("combine", ["sum", "mean", "last"])
def test_the_losses_of_its_layers_are_weighted_trained_and_recorded(combine: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(Sparse(combine), Sparse(combine))
    images, targets = torch.randn(6, 4), torch.arange(6) % 4
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    logits = network(images)
    values = torch.stack([layer.outputs.abs().mean() for layer in network])
    expected = {"sum": values.sum(), "mean": values.mean(), "last": values[-1]}[combine]
    objective = F.cross_entropy(logits, targets) + 0.25 * expected
    moved = [
        parameter.detach() - 0.1 * gradient
        for parameter, gradient in zip(
            network.parameters(), torch.autograd.grad(objective, [*network.parameters()]), strict=True
        )
    ]
    scalars = ERM(Setup(network, 1, 4)).update(StepContext(network, optimizer), [(images, targets)])
    assert scalars["sparsity_loss"].item() == pytest.approx(expected.item())
    assert scalars["loss"].item() == pytest.approx(objective.item())
    for parameter, value in zip(network.parameters(), moved, strict=True):
        torch.testing.assert_close(parameter.detach(), value)
    assert reported_losses(nn.Linear(4, 4), targets)["aux_loss"].value.item() == 0
