"""Freezing: a new classifier learns, on features that stay the same to the bit."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

import timm_moe_dg
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.networks.freeze import FREEZABLE, freeze_backbone, freeze_batch_norm

SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 3}


def test_only_a_new_classifier_learns_and_features_are_those_of_evaluation() -> None:
    model = timm.create_model("moge_tiny", drop_path_rate=0.5, drop_rate=0.5, expert_drop=0.3, **SIZES)
    old = model.head.weight.clone()
    classifier = freeze_backbone(model)
    model.set_expert_mode("shared")
    assert classifier is model.head
    assert not torch.equal(classifier.weight, old)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}

    images, places = torch.randn(6, 3, 16, 16), torch.rand(6, 2) * 50
    before = model.eval().forward_features(images)
    assert torch.equal(model.train().forward_features(images, places), before)

    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(images, places), torch.arange(6) % 3)
        (loss + timm_moe_dg.auxiliary_loss(model)).backward()
        optimizer.step()
    assert torch.equal(model.eval().forward_features(images), before)
    assert not torch.equal(model.head.weight, classifier.weight.detach() * 0)


@pytest.mark.parametrize(
    "options", [{"capacity_factor": 0.5}, {"router_kwargs": {"choice": "expert"}}, {"router": "linear", "top_k": 1}]
)
def test_frozen_features_are_routed_as_in_evaluation(options: dict[str, Any]) -> None:
    model = timm.create_model("gmoe_tiny_patch16", **SIZES, router_noise=5.0, **options)
    freeze_backbone(model)
    images = torch.randn(6, 3, 16, 16)
    assert torch.equal(model.train().forward_features(images), model.eval().forward_features(images))


@pytest.mark.parametrize(
    ("name", "options"), [("resnet10t", {}), ("vit_tiny_patch16_224", {**SIZES, "patch_drop_rate": 0.5})]
)
def test_frozen_features_lose_nothing_by_chance(name: str, options: dict[str, Any]) -> None:
    model = timm.create_model(name, **{"num_classes": 3, "drop_rate": 0.5, **options})
    freeze_backbone(model)
    freeze_batch_norm(model.train())
    images = torch.randn(2, 3, 16, 16)
    logits = model(images)
    assert torch.equal(model.eval()(images), logits)


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_routers_alone_and_everything_but_routers() -> None:
    sizes = {**SIZES, "moe_layers": (1, 3)}
    one, other = (timm.create_model("gmoe_tiny_patch16", **sizes) for _ in range(2))
    FREEZABLE["all-but-routers"](one)
    FREEZABLE["routers"](other)
    routers = {name for name, _ in one.named_parameters() if ".router." in name}
    assert len({name.split(".")[1] for name in routers}) == 2
    assert trained(one) == routers
    assert trained(other) == {name for name, _ in other.named_parameters()} - routers


def test_everything_but_the_gating() -> None:
    moge = timm.create_model("moge_tiny", **{**SIZES, "moe_layers": (1, 3)})
    FREEZABLE["all-but-gating"](moge)
    expected = {name for name, _ in moge.named_parameters() if ".router." in name or name.startswith("metadata_enc")}
    assert trained(moge) == expected
    assert any(name.startswith("metadata_encoder.") for name in expected)
    moge(torch.randn(4, 3, 16, 16), torch.rand(4, 2) * 50).square().sum().backward()
    assert all(p.grad.any() for name, p in moge.named_parameters() if name.endswith("weight") and p.requires_grad)
    frozen = timm.create_model("moge_tiny", **SIZES)
    frozen.metadata_encoder.requires_grad_(False)  # as published weights of SatCLIP are
    FREEZABLE["all-but-gating"](frozen)
    assert {name.split(".")[0] for name in trained(frozen)} == {"blocks"}


@pytest.mark.parametrize(
    ("part", "model", "reason"),
    [
        ("backbone", "moge_tiny", "no linear classifier"),
        ("routers", "deit_tiny_patch16_224", "has no routers"),
        ("all-but-routers", "deit_tiny_patch16_224", "has no routers"),
        ("all-but-gating", "deit_tiny_patch16_224", "has no routers"),
        ("all-but-gating", "gmoe_tiny_patch16", "does not route by metadata"),
    ],
)
def test_a_part_that_a_model_does_not_have_is_refused(part: str, model: str, reason: str) -> None:
    network = timm.create_model(model, **{**SIZES, "num_classes": 0})
    with pytest.raises(ArgumentError, match=f"^freeze=.*{reason}"):
        FREEZABLE[part](network)
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_batch_norm_keeps_its_statistics_in_training() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    freeze_batch_norm(model)
    before = model[1].running_mean.clone()
    model(torch.randn(2, 3, 8, 8) + 5).sum().backward()
    assert torch.equal(model[1].running_mean, before)
    assert model[1].weight.grad is not None
    assert model[0].training
