"""What is set on a network before it is trained."""

import pytest
from torch import nn

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.assembly import set_expert_mode
from timm_moe_dg.protocols.options import RunOptions


class Experts(nn.Module):
    mode = None

    def set_expert_mode(self, mode):
        self.mode = mode


@pytest.mark.parametrize(
    ("asked", "routes", "mode"),
    [("routed", True, "routed"), ("shared", True, "shared"), ("routed", False, "shared")],
)
def test_without_metadata_the_shared_expert_answers_and_is_saved_so(asked, routes, mode):
    network = Experts()
    set_expert_mode(network, RunOptions(expert_mode=asked), routes)
    assert network.mode == mode


def test_a_mode_that_there_is_not_is_refused_and_other_models_need_none():
    for network, routes in ((nn.Linear(1, 1), True), (Experts(), False)):
        with pytest.raises(ArgumentError, match="expert_mode='shared': toy has no metadata-routed experts"):
            set_expert_mode(network, RunOptions(model="toy", expert_mode="shared"), routes)
    set_expert_mode(nn.Linear(1, 1), RunOptions(), False)
