"""Checkpoints that do not fit are refused with a list, also where timm alone loads without `strict`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.models.cases import BY_NAME, Case, overlay
from timm_moe_dg.errors import CheckpointError

GMOE, MOGE = BY_NAME["gmoe_tiny_patch16"], BY_NAME["moge_tiny"]
MISSING, SHAPE, SURPLUS = "missing from the checkpoint", "of another shape", "not in the model"
Weights = dict[str, Tensor]


def without(state_dict: Weights, *parts: str) -> Weights:
    rest = {key: value for key, value in state_dict.items() if not any(part in key for part in parts)}
    assert len(rest) < len(state_dict)
    return rest


def refusal(case: Case, state_dict: Weights, num_classes: int = 3, **options) -> dict[str, list[str]]:
    """The lists in the error: problem -> entries."""
    with pytest.raises(
        CheckpointError, match=r"cannot load this checkpoint: give a checkpoint of this model or"
    ) as error:
        case.small(**{**overlay(state_dict), **options, "num_classes": num_classes})
    assert type(error.value.__cause__) is not TypeError
    _, _, lists = str(error.value).partition("dense counterpart. ")
    problems = {}
    for part in lists.split(". "):
        label, _, entries = part.partition("): ")
        problem, _, number = label.rpartition(" (")
        problems[problem] = entries.split("; ")
        assert int(number) == len(problems[problem])
    return problems


def keys(case: Case, part: str, **options) -> list[str]:
    """Keys of a small variant that contain a part."""
    return [key for key in case.small(**options).state_dict() if part in key]


DENSE_MLP = [f"{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]
REFUSED: dict[str, tuple[Case, Callable[[], Weights], Callable[[], dict[str, list[str]]]]] = {
    "dense without fc1 in a mixture block": (
        GMOE,
        lambda: without(GMOE.small_dense().state_dict(), "blocks.2.mlp.fc1"),
        lambda: {MISSING: keys(GMOE, "blocks.2.mlp.experts.fc1")},
    ),
    "dense without fc1 in a block of MoGE": (
        MOGE,
        lambda: without(MOGE.small_dense().state_dict(), "blocks.2.mlp.fc1"),
        lambda: {MISSING: keys(MOGE, "blocks.2.mlp.experts.fc1") + keys(MOGE, "blocks.2.mlp.shared.fc1")},
    ),
    "dense without a weight in a dense block": (
        GMOE,
        lambda: without(GMOE.small_dense().state_dict(), "blocks.3.mlp.fc2.weight"),
        lambda: {MISSING: ["blocks.3.mlp.fc2.weight"]},
    ),
    "a deeper source": (
        GMOE,
        lambda: GMOE.small_dense(depth=5).state_dict(),
        lambda: {SURPLUS: keys(GMOE, "blocks.4.", depth=5, moe_layers=[0])},
    ),
    "a shallower source": (
        GMOE,
        lambda: GMOE.small_dense(depth=3).state_dict(),
        lambda: {MISSING: keys(GMOE, "blocks.3.")},
    ),
    "a mixture without one router": (
        MOGE,
        lambda: without(MOGE.small().state_dict(), "blocks.2.mlp.router"),
        lambda: {MISSING: keys(MOGE, "blocks.2.mlp.router")},
    ),
    "a mixture without its experts in one layer": (
        GMOE,
        lambda: without(GMOE.small().state_dict(), "blocks.0.mlp.experts"),
        lambda: {MISSING: keys(GMOE, "blocks.0.mlp.experts")},
    ),
    "MoGE without its location encoder": (
        MOGE,
        lambda: without(MOGE.small().state_dict(), "metadata_encoder"),
        lambda: {MISSING: keys(MOGE, "metadata_encoder.")},
    ),
    "an unrelated file, taken for a dense source, whose routers are not needed": (
        GMOE,
        lambda: {"conv1.weight": torch.zeros(4, 3, 3, 3)},
        lambda: {MISSING: [key for key in keys(GMOE, "") if not key.startswith("head.") and ".router." not in key]},
    ),
}


@pytest.mark.parametrize("num_classes", [10, 3], ids=["same classes", "other classes"])
@pytest.mark.parametrize("name", REFUSED)
def test_missing_and_surplus_weights_are_listed(name, num_classes):
    case, weights, expected = REFUSED[name]
    listed = refusal(case, weights(), num_classes)
    assert {problem: sorted(entries) for problem, entries in listed.items()} == {
        problem: sorted(entries) for problem, entries in expected().items()
    }


def test_a_wider_source():
    listed = refusal(GMOE, GMOE.small_dense(embed_dim=64).state_dict())
    assert listed.keys() == {SHAPE}
    assert "cls_token: (1, 1, 64) in the checkpoint, (1, 1, 32) in the model" in listed[SHAPE]
    experts = "blocks.0.mlp.experts.fc1.weight: (6, 256, 64) in the checkpoint, (6, 128, 32) in the model"
    assert experts in listed[SHAPE]
    fitting = ("head", "patch_embed")  # which timm adapts
    assert len(listed[SHAPE]) == len(
        [key for key in keys(GMOE, "") if "router" not in key and not key.startswith(fitting)]
    )


def test_other_mixtures():
    listed = refusal(GMOE, GMOE.small().state_dict(), num_experts=3)
    assert listed.keys() == {SHAPE}
    assert "blocks.0.mlp.router.codes: (6, 256) in the checkpoint, (3, 256) in the model" in listed[SHAPE]
    assert len(listed[SHAPE]) == 2 * 5  # codes, and two weights and biases of the experts, in two layers
    listed = refusal(GMOE, GMOE.small().state_dict(), router="linear")
    assert listed[MISSING] == ["blocks.0.mlp.router.gate.weight", "blocks.2.mlp.router.gate.weight"]
    assert len(listed[SURPLUS]) == 2 * 4
    listed = refusal(GMOE, GMOE.small(moe_layers=[1]).state_dict(), moe_layers=[2])
    assert listed[MISSING] == [f"blocks.1.mlp.{part}" for part in DENSE_MLP]
    assert all(key.startswith("blocks.1.mlp.") for key in listed[SURPLUS])
    listed = refusal(MOGE, GMOE.small().state_dict())
    assert {"blocks.0.mlp.shared.fc1.weight", "blocks.0.mlp.gamma"} <= set(listed[MISSING])
    assert "blocks.0.mlp.router.proj.weight" in listed[SURPLUS]


def test_options_that_the_source_lacks():
    assert refusal(GMOE, GMOE.small_dense().state_dict(), reg_tokens=2)[MISSING] == ["reg_token"]
    with pytest.raises(CheckpointError, match=r"blocks\.1\.mlp\.fc1\.weight"):
        GMOE.small(features_only=True, **overlay(without(GMOE.small_dense().state_dict(), "blocks.1.mlp.fc1")))


def test_timm_refuses_another_first_convolution_and_a_missing_classifier():
    dense = GMOE.small_dense().state_dict()
    with pytest.raises(RuntimeError, match=r"patch_embed\.proj"):
        GMOE.small(**{**overlay({**dense, "patch_embed.proj.weight": torch.zeros(32, 4, 16, 16)}), "num_classes": 3})
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        GMOE.small(**overlay(without(dense, "head.")))
    GMOE.small(**{**overlay(without(dense, "head.")), "num_classes": 3})
