"""Methods that match features need to know where they are."""

import pytest
from torch import nn

from tests.algorithms.networks import CLASSES, SmallMlp
from timm_moe_dg.algorithms import ALGORITHMS, Setup
from timm_moe_dg.errors import ArgumentError


@pytest.mark.parametrize("method", ["Fishr", "CORAL", "MMD", "DANN", "CDANN"])
def test_a_classifier_that_is_not_linear_is_refused(method):
    net = SmallMlp()
    net.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    with pytest.raises(ArgumentError, match=f"SmallMlp.*{method} needs a linear classifier and this is Sequential"):
        ALGORITHMS[method](Setup(net, 3, CLASSES))
