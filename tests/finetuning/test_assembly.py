"""The task loss in closed form, and sizes and colors that the network is built for."""

import math

import pytest
import torch
from torch import nn

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning import make_plan, parse_resumable, run_parser
from timm_moe_dg.finetuning.assembly import build_task_loss, class_weights, set_expert_mode
from timm_moe_dg.networks.build import build_network, data_config
from timm_moe_dg.protocols.options import RunOptions

SIZE = {"embed_dim": 24, "depth": 1, "num_heads": 2}


def plan_of(tmp_path, *words):
    return make_plan(parse_resumable(run_parser(), ["--output", str(tmp_path / "output"), *words]))


def test_balanced_weights_give_every_class_the_same_share(tmp_path):
    plan = plan_of(tmp_path, "--class-weights", "balanced", "--num-classes", "12")
    weights = class_weights(plan)
    targets = [plan.domains[at].targets[index] for at in plan.training for index in plan.splits[at].inside]
    shares = [sum(weights[target].item() for target in targets if target == label) for label in range(10)]
    assert shares == pytest.approx([len(targets) / 10] * 10)
    assert weights[10:].tolist() == [0, 0]  # classes without images


def test_smoothing_in_closed_form_and_the_plain_loss_without(tmp_path):
    logits, targets = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0])
    norm = math.log(math.exp(2) + 2)
    plain = build_task_loss(plan_of(tmp_path), torch.device("cpu"))
    assert torch.equal(plain(logits, targets), torch.nn.functional.cross_entropy(logits, targets))
    smooth = build_task_loss(plan_of(tmp_path, "--label-smoothing", "0.3"), torch.device("cpu"))
    assert smooth(logits, targets).item() == pytest.approx(0.8 * (norm - 2) + 0.2 * norm)


def test_sizes_between_patches_are_refused():
    with pytest.raises(
        ArgumentError, match=r"img_size=40: is no multiple of the model's patches of 16 pixels; give 32 or 48"
    ):
        build_network("deit_tiny_patch16_224", 3, img_size=40, model_kwargs=SIZE)
    build_network("deit_tiny_patch16_224", 3, img_size=48, model_kwargs=SIZE)


def test_own_colors_go_into_the_configuration():
    network = build_network("deit_tiny_patch16_224", 3, img_size=32, model_kwargs=SIZE)
    config = data_config(network, 32, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert (config["mean"], config["std"]) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert data_config(network, 32)["mean"] == network.pretrained_cfg["mean"]


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
