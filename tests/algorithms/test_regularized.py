"""MIRO: the blocks that it finds in a network, and networks that do not list theirs."""

import pytest
import timm
import torch
from torch import nn

from tests.algorithms.networks import CLASSES
from timm_moe_dg.algorithms import ALGORITHMS, Setup, StepContext
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.networks.freeze import freeze_batch_norm


def test_miro_refuses_a_network_that_does_not_list_its_blocks():
    with pytest.raises(ArgumentError, match="feature_info"):
        ALGORITHMS["MIRO"](Setup(nn.Linear(2, 2), 3, CLASSES))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", {"channels": (8, 8, 8, 8), "stem_width": 8}),
        ("densenet121", {"growth_rate": 4, "block_config": (1, 1)}),  # its first tapped module is a BatchNorm
    ],
)
def test_miro_finds_the_channels_of_convolutional_networks_with_frozen_statistics(name, size):
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=CLASSES, **size).train()
    freeze_batch_norm(net)
    algorithm = ALGORITHMS["MIRO"](Setup(net, 1, CLASSES, {"ld": 0.1}))
    images = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    losses = algorithm.objective(StepContext(net, None), [images])
    assert [len(b) for b in algorithm.b] == [info["num_chs"] for info in net.feature_info]
    assert losses["penalty"].isfinite()
