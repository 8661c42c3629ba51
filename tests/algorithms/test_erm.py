"""ERM: the mean over images of the pooled batch, and the auxiliary loss exactly once."""

import math

import pytest
import timm
import torch
from torch import nn

import timm_moe_dg
from timm_moe_dg.algorithms import ERM, Setup, StepContext
from timm_moe_dg.layers import LossWeights
from timm_moe_dg.losses import set_auxiliary_form


class Table(nn.Module):
    """Looks the logits up by the image's first pixel, and counts its calls."""

    LOGITS = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return self.LOGITS[images[:, 0, 0, 0].long()]


def minibatch(rows, targets):
    return torch.tensor(rows, dtype=torch.float)[:, None, None, None].expand(-1, 3, 2, 2), torch.tensor(targets)


def test_mean_is_over_images_not_over_domains():
    # Cross-entropies: log 2 for row 0; log 4/3 for row 1 and class 0, log 4 for class 1
    minibatches = [minibatch([0, 0, 1], [0, 1, 0]), minibatch([1], [1])]
    model = Table()
    losses = ERM(Setup(model, 2, 2)).objective(StepContext(model, None), minibatches)
    expected = (2 * math.log(2) + math.log(4 / 3) + math.log(4)) / 4
    assert losses["task_loss"].item() == pytest.approx(expected)
    assert losses["loss"].item() == pytest.approx(expected)
    assert losses["aux_loss"].item() == 0.0
    assert model.calls == 1


@pytest.fixture
def mixture():
    torch.manual_seed(0)
    size = {"embed_dim": 48, "depth": 3, "num_heads": 3, "moe_layers": (0, 2)}
    return timm.create_model("gmoe_tiny_patch16", num_classes=4, img_size=32, **size)


def random_minibatches():
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(3, 3, 32, 32, generator=generator), torch.randint(4, (3,), generator=generator)) for _ in range(2)
    ]


@pytest.mark.parametrize("aux_coef", [0.0, 0.01, 2.0])
def test_auxiliary_loss_is_added_once_and_weighted(mixture, aux_coef):
    losses = ERM(Setup(mixture, 2, 4, loss_weights=LossWeights(aux_coef=aux_coef))).objective(
        StepContext(mixture, None), random_minibatches()
    )
    aux_loss = timm_moe_dg.auxiliary_loss(mixture)
    assert aux_loss > 0
    assert losses["aux_loss"].item() == pytest.approx(aux_loss.item())
    assert losses["loss"].item() == pytest.approx((losses["task_loss"] + aux_coef * aux_loss).item())


def test_auxiliary_loss_has_the_form_that_is_asked_for(mixture):
    set_auxiliary_form(mixture, "tutel")
    losses = ERM(Setup(mixture, 2, 4, loss_weights=LossWeights(aux_coef=2.0))).objective(
        StepContext(mixture, None), random_minibatches()
    )
    theirs, ours = (timm_moe_dg.auxiliary_loss(mixture, form).item() for form in ("tutel", "vmoe"))
    assert losses["aux_loss"].item() == pytest.approx(theirs)
    assert abs(theirs - ours) > 0.01 * ours
    assert losses["loss"].item() == pytest.approx(losses["task_loss"].item() + 2.0 * theirs)


def test_auxiliary_loss_does_not_grow_over_steps(mixture):
    optimizer = torch.optim.SGD(mixture.parameters(), lr=0.0)
    values = []
    for _ in range(3):
        torch.manual_seed(5)
        losses = ERM(Setup(mixture, 2, 4)).update(StepContext(mixture, optimizer), random_minibatches())
        values.append(losses["aux_loss"].item())
    assert values[0] == values[1] == values[2]


def test_every_parameter_learns(mixture):
    optimizer = torch.optim.SGD(mixture.parameters(), lr=0.0)
    ERM(Setup(mixture, 2, 4)).update(StepContext(mixture, optimizer), random_minibatches())
    assert [name for name, parameter in mixture.named_parameters() if parameter.grad is None] == []
