"""What a run's network is evaluated on: every image, or those alone that selection and tests look at."""

import math

import pytest

from tests.load_tool import load_tool
from timm_moe_dg.finetuning.loaders import build_loaders, step_sampler
from timm_moe_dg.finetuning.plan import make_plan
from timm_moe_dg.finetuning.resume import parse_resumable
from timm_moe_dg.protocols.options import run_parser
from timm_moe_dg.protocols.records import read_records
from timm_moe_dg.protocols.selection import SELECTION_RULES

CONFIG = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3}


@pytest.mark.parametrize("option", ["--eval-train", "--no-eval-train"])
def test_training_images_are_evaluated_on_only_if_asked_for(option, tmp_path):
    words = ["--output", str(tmp_path), "--test-domains", "2", "4", "--workers", "0", option]
    plan = make_plan(parse_resumable(run_parser(), words))
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
        words = [
            "--model",
            "deit_tiny_patch16_224",
            *size,
            *steps,
            "--output",
            str(tmp_path),
            "--experiment",
            option[2:],
        ]
        load_tool("finetune").main([*words, option])
        records[option] = read_records(tmp_path / option[2:] / "results.jsonl")
    for full, brief in zip(*records.values(), strict=True):
        for name in ("step", "losses", "out_acc", "out_loss"):
            assert getattr(brief, name) == getattr(full, name)
        assert brief.in_acc[0] == full.in_acc[0]  # held out
        assert all(map(math.isnan, brief.in_acc[1:]))
    for rule in ("training_domain_validation", "oracle"):
        assert len({SELECTION_RULES[rule](rows).step for rows in records.values()}) == 1
