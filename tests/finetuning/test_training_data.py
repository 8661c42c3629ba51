"""The images that a run evaluates, statistics of its training images, and the coverage of their coordinates."""

import math
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.finetuning.plans import plan_of
from tests.load_tool import load_tool
from timm_moe_dg.data import Split
from timm_moe_dg.data.readers.digits import geo_digits
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.plan import RunPlan
from timm_moe_dg.finetuning.training_data import (
    build_loaders,
    class_weights,
    cover_training_coordinates,
    mean_and_std,
    step_sampler,
    validated_radius,
)
from timm_moe_dg.layers.encoders.coverage import thin_coordinates
from timm_moe_dg.protocols.options import RunOptions
from timm_moe_dg.protocols.records import read_records
from timm_moe_dg.protocols.selection import SELECTION_RULES

CONFIG = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3}
SIZES = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 10}


@pytest.mark.parametrize("option", ["--eval-train", "--no-eval-train"])
def test_training_images_are_evaluated_on_only_if_asked_for(option, tmp_path):
    plan = plan_of(tmp_path, "--test-domains", "2", "4", "--workers", "0", option)
    _, evaluation = build_loaders(plan, CONFIG, step_sampler(plan), with_metadata=False)
    seen = evaluation.dataset
    evaluated = {(group // 2, position) for group, position in zip(seen.groups, seen.positions, strict=True)}
    everything = {(domain, position) for domain in range(6) for position in range(len(plan.domains[domain]))}
    inside = {(domain, position) for domain in plan.training for position in plan.splits[domain].inside}
    assert len(seen) == len(evaluated)
    assert evaluated == (everything if option == "--eval-train" else everything - inside)


@pytest.mark.slow
def test_a_run_trains_and_selects_the_same_without_them(tmp_path):
    size = ["--model-kwargs", "embed_dim=48", "depth=2", "num_heads=3", "patch_size=8", "--img-size", "16"]
    steps = ["--steps", "7", "--eval-freq", "2", "-b", "4", "--workers", "0", "--cpu-threads", "1"]
    records = {}
    for option in ("--eval-train", "--no-eval-train"):
        words = ["--model", "deit_tiny_patch16_224", *size, *steps, "--output", str(tmp_path)]
        load_tool("finetune").main([*words, "--experiment", option[2:], option])
        records[option] = read_records(tmp_path / option[2:] / "results.jsonl")
    for full, brief in zip(*records.values(), strict=True):
        for name in ("step", "losses", "out_acc", "out_loss"):
            assert getattr(brief, name) == getattr(full, name)
        assert brief.in_acc[0] == full.in_acc[0]  # held out
        assert all(map(math.isnan, brief.in_acc[1:]))
    for rule in ("training_domain_validation", "oracle"):
        assert len({SELECTION_RULES[rule](rows).step for rows in records.values()}) == 1


def test_balanced_weights_give_every_class_the_same_share(tmp_path):
    plan = plan_of(tmp_path, "--class-weights", "balanced", "--num-classes", "12")
    weights = class_weights(plan)
    targets = [plan.domains[at].targets[index] for at in plan.training for index in plan.splits[at].inside]
    shares = [sum(weights[target].item() for target in targets if target == label) for label in range(10)]
    assert shares == pytest.approx([len(targets) / 10] * 10)
    assert weights[10:].tolist() == [0, 0]  # classes without images


def test_statistics_of_images_of_more_bits_are_measured_and_those_of_photographs_are_the_models(tmp_path, caplog):
    caplog.set_level("INFO")
    random = np.random.default_rng(0)
    for domain in "ab":
        (tmp_path / "data" / domain / "x").mkdir(parents=True)
        for number in range(8):
            values = random.integers(300, 500, (32, 32), dtype=np.uint16)
            Image.fromarray(values).save(tmp_path / "data" / domain / "x" / f"{number}.png")
    words = ["--dataset", "folder", "--data-dir", str(tmp_path / "data"), "--model", "test_vit"]
    plan, network = plan_of(tmp_path, *words), timm.create_model("test_vit")
    mean, std = mean_and_std(plan, network)
    assert np.allclose(mean, 400 / 65535, rtol=0.02)
    assert np.allclose(std, 200 / 12**0.5 / 65535, rtol=0.02)
    assert "band 1: 0.00458 to 0.00761, mean 0.006" in caplog.text
    for path in (tmp_path / "data" / "a").rglob("*.png"):
        Image.new("L", (32, 32), 90).save(path)
    mean_and_std(plan, network)
    assert "images of b have more than 8 bits, and those of a do not" in caplog.text
    assert "a/x/0.png': the means of its bands are [0.353, 0.353, 0.353], and those of the training" in caplog.text
    for path in (tmp_path / "data" / "b").rglob("*.png"):
        Image.new("L", (32, 32), 90).save(path)
    assert mean_and_std(plan, network) == (None, None)


@pytest.fixture(scope="module")
def domains():
    return geo_digits()


def coverage_plan(domains, radius, model="moge_tiny"):
    """A plan in which Africa and Asia are trained on."""
    none = Split(np.arange(0), np.arange(0))
    parts = {"domains": domains, "training": [0, 1], "splits": [domain.split or none for domain in domains]}
    options = replace(RunOptions(), model=model, coverage_radius=radius)
    return RunPlan(**dict.fromkeys(RunPlan.__dataclass_fields__) | {**parts, "options": options})


def moge(**options) -> nn.Module:
    return timm.create_model("moge_tiny", moe_layers=[1], **{**SIZES, **options}).eval()


def rows(domain, part: str) -> Tensor:
    return torch.from_numpy(domain.metadata[getattr(domain.split, part)])


def test_the_index_is_of_the_in_splits_of_training_domains_alone(domains):
    model = moge()
    cover_training_coordinates(model, coverage_plan(domains, None))
    trained = torch.cat([rows(domain, "inside") for domain in domains[:2]])
    expected = thin_coordinates(trained)
    coverage = model.metadata_encoder.coverage
    torch.testing.assert_close(coverage.points / 1e6, expected.float(), rtol=0, atol=1e-4)
    assert coverage.radius is None
    cover_training_coordinates(model, coverage_plan(domains, 123.0))
    assert model.metadata_encoder.coverage.radius == 123.0


def test_location_ids_are_recorded_if_the_shared_expert_can_answer_for_others(domains):
    traps = [replace(domain, metadata=np.arange(len(domain)) % 7 + position) for position, domain in enumerate(domains)]
    model = moge(metadata_encoder="location_id")
    cover_training_coordinates(model, coverage_plan(traps, None))
    trained = np.concatenate([rows(domain, "inside") for domain in traps[:2]])
    assert model.metadata_encoder.encoder.seen_locations == tuple(sorted({*trained.tolist()}))
    alone = moge(metadata_encoder="location_id", shared_expert=False)
    cover_training_coordinates(alone, coverage_plan(traps, None))
    assert alone.metadata_encoder.encoder.seen is None


def test_auto_is_the_smallest_radius_that_covers_all_validation_images_and_no_held_out_continent(domains):
    model = moge()
    cover_training_coordinates(model, coverage_plan(domains, "auto"))
    coverage = model.metadata_encoder.coverage
    validation = torch.cat([rows(domain, "outside") for domain in domains[:2]])
    assert len(validation) == 400
    assert coverage(validation).all()
    assert coverage.distance(validation).max() > coverage.radius - 1.0
    other = [domain for domain in domains if domain.group in ("Oceania", "North America")]
    assert not any(coverage(torch.as_tensor(domain.metadata)).any() for domain in other)


def test_images_without_coordinates_have_no_say():
    known = torch.arange(101.0)
    unknown = torch.full((50,), float("nan"))
    assert validated_radius(torch.cat([known, unknown])) == 100.0
    with pytest.raises(ArgumentError, match=r"^coverage_radius='auto': no validation image has coordinates[^\n]*$"):
        validated_radius(unknown)


@pytest.mark.parametrize("radius", [200.0, "auto"])
def test_a_radius_is_refused_where_nothing_routes_by_coordinates(domains, radius):
    shared = moge()
    shared.set_expert_mode("shared")
    dense = timm.create_model("deit_tiny_patch16_224", **SIZES)
    for model in (moge(metadata_encoder="location_id"), shared, dense):
        cover_training_coordinates(model, coverage_plan(domains, None))  # which asks for nothing
        with pytest.raises(
            ArgumentError, match=rf"^coverage_radius={radius!r}: .* does not route by coordinates[^\n]*$"
        ):
            cover_training_coordinates(model, coverage_plan(domains, radius))
