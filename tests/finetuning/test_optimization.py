"""Optimizers and schedules against their closed forms."""

import math

import pytest
import timm
import torch
from torch import nn

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.optimization import build_optimizer, build_schedule, check_optimizer
from timm_moe_dg.storage.checkpoint import Checkpoints, read_checkpoint


@pytest.fixture(scope="module")
def network():
    return timm.create_model("gmoe_tiny_patch16", embed_dim=48, depth=3, num_heads=3, moe_layers=(1,), img_size=32)


def rates(optimizer, schedule, steps):
    found = []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(step + 1)
    return found


def test_default_is_one_group_of_everything_decayed_alike(network):
    optimizer = build_optimizer(network, "adam", lr=1e-3, weight_decay=0.1)
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.Adam
    assert group["fused"]
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in network.parameters()]
    assert group["weight_decay"] == 0.1
    assert build_schedule(optimizer, None, steps=10) is None


def test_groups_of_the_algorithm_keep_their_own_rates(network):
    extra = nn.Parameter(torch.zeros(3))
    extra_groups = [{"params": [extra], "lr": 0.5, "weight_decay": 0.0}]
    optimizer = build_optimizer(network, "adamw", lr=1e-3, weight_decay=0.1, extra_groups=extra_groups)
    assert (optimizer.param_groups[1]["lr"], optimizer.param_groups[1]["weight_decay"]) == (0.5, 0.0)
    assert "params" in extra_groups[0]


def test_cosine_with_warmup_in_closed_form(network):
    optimizer = build_optimizer(network, "sgd", lr=0.8, weight_decay=0.0)
    schedule = build_schedule(optimizer, "cosine", steps=20, warmup_steps=4, min_lr=0.1)
    cosine = [0.1 + 0.7 * (1 + math.cos(math.pi * step / 20)) / 2 for step in range(4, 20)]
    assert rates(optimizer, schedule, 20) == pytest.approx([0.0, 0.2, 0.4, 0.6, *cosine])


def test_poly_is_a_straight_line(network):
    optimizer = build_optimizer(network, "adam", lr=0.5, weight_decay=0.0)
    schedule = build_schedule(optimizer, "poly", steps=10, min_lr=0.1)
    assert rates(optimizer, schedule, 10) == pytest.approx([0.5 - 0.4 * step / 10 for step in range(10)])


def test_warmup_alone_stays_constant_afterwards(network):
    optimizer = build_optimizer(network, "adam", lr=0.4, weight_decay=0.0)
    schedule = build_schedule(optimizer, None, steps=200, warmup_steps=2)
    assert rates(optimizer, schedule, 200) == pytest.approx([0.0, 0.2, *[0.4] * 198])


def test_layer_decay_reaches_the_rates_at_a_constant_schedule(network):
    optimizer = build_optimizer(network, "adam", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    build_schedule(optimizer, None, steps=10)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    rate = {names[id(value)]: group["lr"] for group in optimizer.param_groups for value in group["params"]}
    assert rate["head.weight"] == 1.0
    above = [rate[f"blocks.{block}.norm1.weight"] for block in (2, 1, 0)] + [rate["patch_embed.proj.weight"]]
    assert above == pytest.approx([0.5, 0.25, 0.125, 0.0625])


def test_mistakes_are_named(network):
    with pytest.raises(ArgumentError, match="opt='adamm'"):
        check_optimizer("adamm")
    optimizer = build_optimizer(network, "adam", lr=0.4, weight_decay=0.0)
    with pytest.raises(ArgumentError, match="warmup_steps=10: is not less than the run's 10 steps"):
        build_schedule(optimizer, "cosine", steps=10, warmup_steps=10)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lamb"])
def test_moments_from_a_checkpoint_have_the_memory_layout_of_their_parameters(tmp_path, name):
    def start():
        torch.manual_seed(0)
        layer = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        return layer, build_optimizer(layer, name, lr=0.1, weight_decay=0.01)

    def steps(layer, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            layer(torch.linspace(0, number, 100).view(1, 4, 5, 5)).square().sum().backward()
            optimizer.step()

    layer, optimizer = start()
    steps(layer, optimizer, (1, 2))
    resumed = start()
    resumed[0].load_state_dict(layer.state_dict())
    resumed[1].load_state_dict(read_checkpoint(Checkpoints(tmp_path).save(2, optimizer.state_dict())))
    for pair in ((layer, optimizer), resumed):
        steps(*pair, (3, 4))
    assert torch.equal(layer.weight, resumed[0].weight)
