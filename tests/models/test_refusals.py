"""Options, metadata and checkpoints that no model can take: the error names argument and value, or lists keys."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import Tensor

import timm_moe_dg
from tests.models.backbones import BACKBONES
from tests.models.cases import BY_NAME, SMALL, Case, overlay
from timm_moe_dg.errors import (
    ArgumentError,
    CheckpointError,
    MetadataError,
    MoeDgError,
    MoeLayersError,
    OptionError,
    RouterError,
)
from timm_moe_dg.models.erm_le import classify_with_metadata
from timm_moe_dg.models.gmoe import resolve_moe_layers
from timm_moe_dg.models.text_head import use_text_head
from timm_moe_dg.models.upcycling import upcycle_with_metadata
from timm_moe_dg.networks.trained import set_coverage_radius

GMOE, MOGE, VIT = BY_NAME["gmoe_tiny_patch16"], BY_NAME["moge_tiny"], BACKBONES["Mlp"]
PLACES = torch.tensor([[10.0, 50.0], [-120.0, 30.0]])
ON_META = {**SMALL, "img_size": 32, "device": "meta"}


@pytest.mark.parametrize(
    "moe_layers", [[4], [-1], [], [True], [1.0], ["0"], 2, {"first": 0}, "first_two", "FFFFFFFFSFSF", "FFFF", "ssff"]
)
def test_moe_layers(moe_layers: Any) -> None:
    with pytest.raises(MoeLayersError, match=f"^moe_layers={re.escape(repr(moe_layers))}"):
        resolve_moe_layers(moe_layers, 4)


@pytest.mark.parametrize("moe_layers", ["every_two", "last_two"])
def test_a_network_whose_even_blocks_cannot_become_mixtures(moe_layers: str) -> None:
    with pytest.raises(MoeLayersError, match=f"^moe_layers='{moe_layers}': no even-numbered block"):
        resolve_moe_layers(moe_layers, 4, able=[1, 3])


def without_mixture(model: str, **options: Any) -> Callable[[], Any]:
    return lambda: timm.create_model(model, **{**ON_META, **options})


def on_backbone(model: str, backbone: str, **options: Any) -> Callable[[], Any]:
    return lambda: timm.create_model(model, backbone=backbone, device="meta", **options)


def with_coverage(radius: float, **options: Any) -> Callable[[], Any]:
    def make() -> None:
        model = MOGE.small(**options)
        model.set_coverage(PLACES)
        model.set_coverage_radius(radius)

    return make


def with_text_head(model: str) -> Callable[[], Any]:
    return lambda: use_text_head(timm.create_model(model, **SMALL, img_size=32), "absent.safetensors", ["a", "b"])


DENSE = {"depth": 1, "embed_dim": 24, "num_heads": 3}
CLIP = "vit_base_patch16_clip_quickgelu_224"


@pytest.mark.parametrize(
    ("make", "error", "argument"),
    [
        (without_mixture("moge_tiny", router="linear"), OptionError, "router='linear'"),
        (without_mixture("moge_tiny", capacity_factor=1.0), OptionError, "capacity_factor=1.0"),
        (without_mixture("moge_tiny", metadata_encoder="gps"), MetadataError, "metadata_encoder='gps'"),
        (without_mixture("moge_tiny", coverage_radius=5.0), MetadataError, "coverage_radius=5.0"),
        (without_mixture("d3g_tiny_patch16", num_domains=1), ArgumentError, "num_domains=1"),
        (
            lambda: timm.create_model("d3g_tiny_patch16", num_domains=3).set_domains([PLACES, PLACES]),
            ArgumentError,
            "num_domains=3",
        ),
        (with_coverage(-1.0), MetadataError, "coverage_radius=-1.0"),
        (with_coverage(math.nan), MetadataError, "coverage_radius=nan"),
        (with_coverage(5.0, shared_expert=False), MetadataError, "coverage_radius=5.0"),
        (with_coverage(5.0, metadata_encoder="location_id"), MetadataError, "metadata_encoder='LocationIdEmbedding'"),
        (
            lambda: set_coverage_radius(timm.create_model("deit_tiny_patch16_224", **DENSE), 5.0),
            ArgumentError,
            "coverage_radius=5.0",
        ),
        (on_backbone("gmoe", "resnet18"), MoeLayersError, "model='resnet18'"),
        (on_backbone("gmoe", "vit_tiny_patch16_224", moe_layers=[12]), MoeLayersError, "moe_layers=[12]"),
        (on_backbone("gmoe", "vit_tiny_patch16_224.nope"), ArgumentError, "backbone='vit_tiny_patch16_224.nope'"),
        (on_backbone("gmoe", "vit_tiny_patch"), ArgumentError, "backbone='vit_tiny_patch'"),
        (on_backbone("gmoe", "test_vit", metadata_encoder="sincos"), OptionError, "backbone='test_vit'"),
        (on_backbone("gmoe", "test_vit", router="metadata"), RouterError, "router='metadata'"),
        (on_backbone("gmoe", "test_vit", feature_cls="hook"), ArgumentError, "feature_cls='hook'"),
        (on_backbone("moge", CLIP, metadata_encoder="tiles"), MetadataError, "metadata_encoder='tiles'"),
        (on_backbone("moge", CLIP, router="cosine"), OptionError, f"backbone='{CLIP}'"),
        (on_backbone("moge", "convnext_tiny"), MoeLayersError, "model='convnext_tiny'"),
        (on_backbone("moge", "eva02_tiny_patch14_224"), MoeLayersError, "model='eva02_tiny_patch14_224'"),
        (on_backbone("moge", "vit_small_patch16_18x2_224"), MoeLayersError, "model='vit_small_patch16_18x2_224'"),
        (on_backbone("moge", "vitamin_small_224"), RouterError, "mlp='GeGluMlp'"),
        (on_backbone("erm_le", CLIP, moe_layers=[0]), OptionError, f"backbone='{CLIP}'"),
        (on_backbone("erm_le", "convnext_tiny"), MoeLayersError, "model='convnext_tiny'"),
        (lambda: timm.create_model("gmoe.openai"), ArgumentError, "model='gmoe.openai'"),
        (lambda: timm_moe_dg.upcycle(VIT.mixture()), MoeLayersError, "model='gmoe'"),
        (lambda: timm_moe_dg.upcycle(VIT.dense(), topk=1), OptionError, "topk=1"),
        (with_text_head("test_vit"), ArgumentError, "head='text:absent.safetensors'"),
    ],
)
def test_options(make: Callable[[], Any], error: type[MoeDgError], argument: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(argument)}"):
        make()


def test_a_network_that_would_not_hand_metadata_on_is_left_alone() -> None:
    for change, backbone, options in (
        (upcycle_with_metadata, "convnext_tiny", {}),
        (upcycle_with_metadata, "vitamin_small_224", {}),
        (classify_with_metadata, "vitamin_small_224", {"metadata_encoder": "gps"}),
    ):
        model = timm.create_model(backbone, device="meta")
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(MoeDgError):
            change(model, **options)
        assert [type(module) for module in model.modules()] == kinds


def test_metadata_is_checked_by_every_forward() -> None:
    model = MOGE.small().eval()
    for metadata in (torch.tensor([[45.0, 120.0]] * 3), torch.zeros(2, 2), [[13.4, 52.5]] * 3):
        for method in (model.forward, model.forward_features, model.forward_intermediates):
            with pytest.raises(MetadataError):
                method(MOGE.images(), metadata=metadata)


def text_file(path: Path, classes: list[str] | None, **tensors: Tensor) -> Path:
    save_file(tensors, path, {"classes": json.dumps(classes)} if classes else {})
    return path


@pytest.mark.parametrize(
    ("classes", "name", "width"),
    [
        (["a", "b"], "weight", 32),
        (["b", "a", "c"], "weight", 32),
        (None, "weight", 32),
        (["a", "b", "c"], "other", 32),
        (["a", "b", "c"], "weight", 64),
    ],
)
def test_text_embeddings_of_other_classes_order_or_length(
    classes: list[str] | None, name: str, width: int, tmp_path: Path
) -> None:
    path = text_file(tmp_path / "texts", classes, **{name: torch.ones(len(classes or "abc"), width)})
    with pytest.raises(ArgumentError, match=f"^head='text:{path}'"):
        use_text_head(GMOE.small(num_classes=0), path, ["a", "b", "c"])


def test_text_heads_of_damaged_files_and_of_two_classifiers(tmp_path: Path) -> None:
    two, path = timm.create_model("deit_tiny_distilled_patch16_224", **SMALL, img_size=32), tmp_path / "file"
    path.write_bytes(b"text")
    with pytest.raises(ArgumentError, match=f"^head='text:{path}'"):
        use_text_head(GMOE.small(num_classes=0), path, ["a", "b"])
    with pytest.raises(ArgumentError, match=f"^head='text:{path}'.*no single classifier"):
        use_text_head(two, text_file(path, ["a", "b"], weight=torch.ones(2, 32)), ["a", "b"])


def test_a_saved_backbone_that_timm_has_no_longer(tmp_path: Path) -> None:
    save_for_hf(VIT.mixture(), tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"]["backbone"] = "vit_base_patch16_clip_slowgelu_224.openai"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match=r"^backbone='vit_base_patch16_clip_slowgelu_224\.openai'.*quickgelu"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


# Checkpoints: also those that timm alone would load without `strict`

MISSING, SHAPE, SURPLUS = "missing from the checkpoint", "of another shape", "not in the model"
Weights = dict[str, Tensor]


def without(state_dict: Weights, part: str) -> Weights:
    rest = {key: value for key, value in state_dict.items() if part not in key}
    assert len(rest) < len(state_dict)
    return rest


def refusal(case: Case, state_dict: Weights, num_classes: int = 3, **options: Any) -> dict[str, list[str]]:
    """The lists in the error: problem -> entries, sorted."""
    with pytest.raises(CheckpointError, match=r"cannot load this checkpoint") as error:
        case.small(**{**overlay(state_dict), **options, "num_classes": num_classes})
    _, _, lists = str(error.value).partition("dense counterpart. ")
    problems = {}
    for part in lists.split(". "):
        label, _, entries = part.partition("): ")
        problem, _, number = label.rpartition(" (")
        problems[problem] = sorted(entries.split("; "))
        assert int(number) == len(problems[problem])
    return problems


def keys(case: Case, *parts: str, **options: Any) -> list[str]:
    """Keys of a small variant that contain one of the parts, sorted."""
    return sorted(key for key in case.small(**options).state_dict() if any(part in key for part in parts))


@pytest.mark.parametrize("num_classes", [10, 3], ids=["same classes", "other classes"])
def test_missing_and_surplus_weights_are_listed(num_classes: int) -> None:
    dense, mixture, moge = (model.state_dict() for model in (GMOE.small_dense(), GMOE.small(), MOGE.small()))
    deeper, fc1 = GMOE.small_dense(depth=5).state_dict(), "blocks.2.mlp.experts.fc1"
    needed = [key for key in mixture if not key.startswith("head.") and ".router." not in key]
    table: list[tuple[Case, Weights, dict[str, list[str]]]] = [
        (GMOE, without(dense, "blocks.2.mlp.fc1"), {MISSING: keys(GMOE, fc1)}),
        (MOGE, without(dense, "blocks.2.mlp.fc1"), {MISSING: keys(MOGE, fc1, "blocks.2.mlp.shared.fc1")}),
        (GMOE, without(dense, "blocks.3.mlp.fc2.weight"), {MISSING: ["blocks.3.mlp.fc2.weight"]}),
        (GMOE, deeper, {SURPLUS: keys(GMOE, "blocks.4.", depth=5, moe_layers=[0])}),
        (GMOE, without(dense, "blocks.3."), {MISSING: keys(GMOE, "blocks.3.")}),
        (MOGE, without(moge, "blocks.2.mlp.router"), {MISSING: keys(MOGE, "blocks.2.mlp.router")}),
        (GMOE, without(mixture, "blocks.0.mlp.experts"), {MISSING: keys(GMOE, "blocks.0.mlp.experts")}),
        (MOGE, without(moge, "metadata_encoder"), {MISSING: keys(MOGE, "metadata_encoder.")}),
        (GMOE, {"conv1.weight": torch.zeros(4, 3, 3, 3)}, {MISSING: sorted(needed)}),  # taken for a dense source
    ]
    for case, weights, expected in table:
        assert refusal(case, weights, num_classes) == expected


def test_other_sizes_and_mixtures_are_listed() -> None:
    listed = refusal(GMOE, GMOE.small_dense(embed_dim=64).state_dict())
    assert listed.keys() == {SHAPE}
    assert "cls_token: (1, 1, 64) in the checkpoint, (1, 1, 32) in the model" in listed[SHAPE]
    experts = "blocks.0.mlp.experts.fc1.weight: (6, 256, 64) in the checkpoint, (6, 128, 32) in the model"
    assert experts in listed[SHAPE]
    assert not any(entry.startswith(("head", "patch_embed")) for entry in listed[SHAPE])  # which timm adapts
    listed = refusal(GMOE, GMOE.small().state_dict(), num_experts=3)
    assert "blocks.0.mlp.router.codes: (6, 256) in the checkpoint, (3, 256) in the model" in listed[SHAPE]
    assert len(listed[SHAPE]) == 2 * 5  # codes, and two weights and biases of the experts, in two layers
    listed = refusal(GMOE, GMOE.small().state_dict(), router="linear")
    assert listed[MISSING] == ["blocks.0.mlp.router.gate.weight", "blocks.2.mlp.router.gate.weight"]
    assert len(listed[SURPLUS]) == 2 * 4
    listed = refusal(GMOE, GMOE.small(moe_layers=[1]).state_dict(), moe_layers=[2])
    assert listed[MISSING] == keys(GMOE, "blocks.1.mlp.fc", moe_layers=[2])
    assert all(key.startswith("blocks.1.mlp.") for key in listed[SURPLUS])
    assert "blocks.0.mlp.gamma" in refusal(MOGE, GMOE.small().state_dict())[MISSING]
    assert refusal(GMOE, GMOE.small_dense().state_dict(), reg_tokens=2)[MISSING] == ["reg_token"]
    alone = MOGE.small(shared_expert=False).state_dict()
    assert any(".mlp.shared." in key for key in refusal(MOGE, alone)[MISSING])


@pytest.mark.parametrize("name", ["erm_le_tiny_patch16", "d3g_tiny_patch16"])
def test_checkpoints_of_the_baselines(name: str) -> None:
    dense, small = GMOE.small_dense().state_dict(), {**SMALL, "img_size": 32}
    with pytest.raises(CheckpointError, match=rf"{MISSING} .*blocks\.1\.mlp\.fc1\.weight"):
        timm.create_model(name, **{**small, **overlay(without(dense, "blocks.1.mlp"))})
    with pytest.raises(CheckpointError, match=rf"{SHAPE} .*blocks\.0\.mlp\.fc1\.weight"):
        timm.create_model(name, **{**small, **overlay(dense), "mlp_ratio": 2.0, "num_classes": 7})


def test_checkpoints_of_mixtures_on_a_backbone() -> None:
    weights = VIT.mixture().state_dict()
    given = overlay(weights, num_classes=4)
    with pytest.raises(CheckpointError, match=r"missing.*blocks\.1\.mlp\.experts"):
        VIT.mixture(**given, moe_layers=[1])
    with pytest.raises(CheckpointError, match=r"^blocks\.0\.mlp does not fit the checkpoint"):
        VIT.mixture(**given, num_experts=4)
    rest = overlay(without(weights, "blocks.1.norm1.weight"), num_classes=4)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint \(1\): blocks\.1\.norm1\.weight"):
        VIT.mixture(**rest, num_classes=9)
    sizes = {"backbone": CLIP, "img_size": 32, **DENSE}
    for name in ("moge", "erm_le"):
        rest = overlay(without(timm.create_model(name, **sizes).state_dict(), "metadata_encoder."), num_classes=512)
        with pytest.raises(CheckpointError, match=r"missing.*metadata_encoder"):
            timm.create_model(name, **sizes, **rest)
