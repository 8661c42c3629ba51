"""Checkpoints that cannot be loaded are refused by name, also where timm alone loads without `strict`."""

import pytest
import torch

from tests.models.cases import BY_NAME, Case, overlay
from timm_moe_dg.errors import CheckpointError

GMOE, MOGE = BY_NAME["gmoe_tiny_patch16"], BY_NAME["moge_tiny"]
CLASSES = pytest.mark.parametrize("num_classes", [10, 3], ids=["same classes", "other classes"])


def without(state_dict: dict[str, torch.Tensor], *parts: str) -> dict[str, torch.Tensor]:
    kept = {key: value for key, value in state_dict.items() if not any(part in key for part in parts)}
    assert len(kept) < len(state_dict)
    return kept


def refusal(case: Case, state_dict: dict[str, torch.Tensor], num_classes: int, **options) -> dict[str, list[str]]:
    """What the error lists: 'missing from the checkpoint', 'of another shape', 'not in the model' -> entries."""
    with pytest.raises(CheckpointError) as caught:
        case.small(**{**overlay(state_dict), **options, "num_classes": num_classes})
    assert type(caught.value.__cause__) is not TypeError
    _, _, lists = str(caught.value).partition("dense counterpart. ")
    found = {}
    for part in lists.split(". "):
        label, _, entries = part.partition("): ")
        what, _, number = label.rpartition(" (")
        found[what] = entries.split("; ")
        assert int(number) == len(found[what])
    return found


@CLASSES
@pytest.mark.parametrize("case", [GMOE, MOGE], ids=lambda case: case.name)
def test_dense_without_fc1_in_a_mixture_block(case, num_classes):
    found = refusal(case, without(case.small_dense().state_dict(), "blocks.2.mlp.fc1"), num_classes)
    layer = "blocks.2.mlp"
    shared = [f"{layer}.shared.fc1.weight", f"{layer}.shared.fc1.bias"] if case is MOGE else []
    assert found.keys() == {"missing from the checkpoint"}
    assert sorted(found["missing from the checkpoint"]) == sorted(
        [f"{layer}.experts.fc1.weight", f"{layer}.experts.fc1.bias", *shared]
    )


@CLASSES
def test_dense_without_anything_in_a_dense_block(num_classes):
    found = refusal(GMOE, without(GMOE.small_dense().state_dict(), "blocks.3.mlp.fc2.weight"), num_classes)
    assert found == {"missing from the checkpoint": ["blocks.3.mlp.fc2.weight"]}


@CLASSES
def test_a_wider_source(num_classes):
    found = refusal(GMOE, GMOE.small_dense(embed_dim=64).state_dict(), num_classes)
    assert found.keys() == {"of another shape"}
    assert "cls_token: (1, 1, 64) in the checkpoint, (1, 1, 32) in the model" in found["of another shape"]
    experts = "blocks.0.mlp.experts.fc1.weight: (6, 256, 64) in the checkpoint, (6, 128, 32) in the model"
    assert experts in found["of another shape"]
    assert len(found["of another shape"]) == len(
        [
            key
            for key in GMOE.small().state_dict()
            if "router" not in key and not key.startswith(("head", "patch_embed"))
        ]
    )


@CLASSES
def test_a_deeper_source(num_classes):
    found = refusal(GMOE, GMOE.small_dense(depth=5).state_dict(), num_classes)
    fifth = [key for key in GMOE.small_dense(depth=5).state_dict() if key.startswith("blocks.4.")]
    assert found == {"not in the model": fifth}


@CLASSES
def test_a_shallower_source(num_classes):
    found = refusal(GMOE, GMOE.small_dense(depth=3).state_dict(), num_classes)
    fourth = [key for key in GMOE.small().state_dict() if key.startswith("blocks.3.")]
    assert found == {"missing from the checkpoint": fourth}


@CLASSES
@pytest.mark.parametrize("case", [GMOE, MOGE], ids=lambda case: case.name)
def test_a_mixture_checkpoint_without_one_router(case, num_classes):
    weights = case.small().state_dict()
    found = refusal(case, without(weights, "blocks.2.mlp.router"), num_classes)
    assert found == {"missing from the checkpoint": [key for key in weights if "blocks.2.mlp.router" in key]}


@CLASSES
def test_a_mixture_checkpoint_without_its_experts_in_one_layer(num_classes):
    weights = GMOE.small().state_dict()
    found = refusal(GMOE, without(weights, "blocks.0.mlp.experts"), num_classes)
    assert found == {"missing from the checkpoint": [key for key in weights if "blocks.0.mlp.experts" in key]}


@CLASSES
def test_another_number_of_experts(num_classes):
    found = refusal(GMOE, GMOE.small().state_dict(), num_classes, num_experts=3)
    assert found.keys() == {"of another shape"}
    assert "blocks.0.mlp.router.codes: (6, 256) in the checkpoint, (3, 256) in the model" in found["of another shape"]
    assert len(found["of another shape"]) == 2 * 5  # codes, and two weights and biases of the experts, in two layers


@CLASSES
def test_another_kind_of_router(num_classes):
    found = refusal(GMOE, GMOE.small().state_dict(), num_classes, router="linear")
    gates = ["blocks.0.mlp.router.gate.weight", "blocks.2.mlp.router.gate.weight"]
    assert found["missing from the checkpoint"] == gates
    assert len(found["not in the model"]) == 2 * 4


@CLASSES
def test_mixtures_in_other_blocks(num_classes):
    found = refusal(GMOE, GMOE.small(moe_layers=[1]).state_dict(), num_classes, moe_layers=[2])
    assert found["missing from the checkpoint"] == [f"blocks.1.mlp.{part}" for part in dense_feed_forward()]
    assert all(key.startswith("blocks.1.mlp.") for key in found["not in the model"])


def dense_feed_forward() -> list[str]:
    return [f"{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]


@CLASSES
def test_a_moge_checkpoint_without_its_location_encoder(num_classes):
    weights = MOGE.small().state_dict()
    found = refusal(MOGE, without(weights, "metadata_encoder"), num_classes)
    assert found == {"missing from the checkpoint": [key for key in weights if key.startswith("metadata_encoder.")]}


@CLASSES
def test_a_gmoe_checkpoint_into_moge(num_classes):
    found = refusal(MOGE, GMOE.small().state_dict(), num_classes)
    assert "blocks.0.mlp.shared.fc1.weight" in found["missing from the checkpoint"]
    assert "blocks.0.mlp.gamma" in found["missing from the checkpoint"]
    assert "blocks.0.mlp.router.proj.weight" in found["not in the model"]


@CLASSES
def test_an_unrelated_file(num_classes):
    found = refusal(GMOE, {"conv1.weight": torch.zeros(4, 3, 3, 3)}, num_classes)
    # Routers are not asked for: a file with nothing of a mixture layer is taken for a dense source
    expected = [key for key in GMOE.small().state_dict() if not key.startswith("head.") and ".router." not in key]
    assert found == {"missing from the checkpoint": expected}


def test_register_tokens_that_the_source_lacks():
    found = refusal(GMOE, GMOE.small_dense().state_dict(), 3, reg_tokens=2)
    assert found["missing from the checkpoint"] == ["reg_token"]


def test_features_only_is_no_excuse():
    with pytest.raises(CheckpointError, match=r"blocks\.1\.mlp\.fc1\.weight"):
        GMOE.small(features_only=True, **overlay(without(GMOE.small_dense().state_dict(), "blocks.1.mlp.fc1")))


def test_first_convolution_of_another_size_is_refused_by_timm():
    weights = {**GMOE.small_dense().state_dict(), "patch_embed.proj.weight": torch.zeros(32, 4, 16, 16)}
    with pytest.raises(RuntimeError, match=r"patch_embed\.proj"):
        GMOE.small(**{**overlay(weights), "num_classes": 3})


def test_a_missing_classifier_is_refused_where_the_classes_agree():
    weights = without(GMOE.small_dense().state_dict(), "head.")
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        GMOE.small(**overlay(weights))
    GMOE.small(**{**overlay(weights), "num_classes": 3})


def test_the_message_names_the_class_and_the_remedy():
    with pytest.raises(
        CheckpointError, match=r"MoeVisionTransformer cannot load .* give a checkpoint of this model or"
    ):
        GMOE.small(**overlay({"conv1.weight": torch.zeros(1)}))
