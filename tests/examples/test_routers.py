"""The comparison of routers: its plans, and what it measures."""

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import timm_moe_dg
from tests.invented import invented_records, write_run
from tests.load_tool import load_example
from timm_moe_dg.layers import MoeMlp

EXAMPLES = Path(__file__).parents[2] / "examples"


measure = load_example("routers/measure")


def test_overlap_of_shares():
    targets = np.array([0, 1, 1])
    held_out = measure.by_class(torch.tensor([[0, 0], [1, 2], [1, 2]]), targets, 3)
    training = measure.by_class(torch.tensor([[0, 1], [2, 2], [1, 1]]), targets, 3)
    # Class 0: (1, 0, 0) and (1/2, 1/2, 0). Class 1: (0, 1/2, 1/2) twice. Between them: 1/2, and 0
    same, other = measure.overlaps(held_out, training)
    assert same == pytest.approx((0.5 + 1) / 2)
    assert other == pytest.approx((0 + 0.5) / 2)


@torch.no_grad()
def test_a_changed_routing_reaches_the_experts_and_is_put_back():
    model = MoeMlp(3, num_experts=3, top_k=2, router="linear").eval()
    for parameter in model.experts.parameters():
        nn.init.zeros_(parameter)
    model.experts.fc2.bias.copy_(torch.eye(3))  # expert e answers class e
    x = torch.randn(60, 3)
    plain = model(x)
    with measure.rerouted(model, measure.permuted):
        shuffled = model(x)
    assert not torch.equal(shuffled, plain)
    assert torch.equal(shuffled.sort(0).values, plain.sort(0).values)
    assert torch.equal(model(x), plain)


@pytest.mark.slow
def test_a_run_is_measured(tmp_path):
    kwargs = {"patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 2, "moe_layers": (1,)}
    run = timm_moe_dg.finetune(
        dataset="rotated_digits", model="gmoe_tiny_patch16", model_kwargs=kwargs, test_domains=[1], steps=2,
        eval_freq=1, batch_size=2, workers=0, cpu_threads=1, output=tmp_path, experiment="run",
    )  # fmt: skip
    row = measure.measure(run.path)
    shares = ["entropy", "same class", "other class", "by class", "by domain"]
    assert list(row) == ["run", "accuracy", "permuted", "unused", *shares]
    assert all(0 <= row[name] <= 1 for name in shares)
    assert row["entropy"] > 0.9  # a router that has seen two steps
    scores = timm_moe_dg.evaluate(run, split="all", workers=0).set_index("domain")
    assert row["accuracy"] == pytest.approx(100 * scores.accuracy.iloc[1], abs=1e-6)


def test_recorded_scores_have_an_answer_for_each_data_set(tmp_path, capsys):
    load_example("answer").main(
        [str(EXAMPLES / "routers/scores.csv"), "--reference", "cosine", "--plot", str(tmp_path / "a.png")]
    )
    out = capsys.readouterr().out
    assert out.count("Differences to cosine, points") == 3
    assert len(list(tmp_path.glob("a_*.png"))) == 3
    scores = pd.read_csv(EXAMPLES / "routers/scores.csv")
    wide = scores[scores["shift"] == "blue_marble"].pivot(index=["domain", "seed"], columns="row", values="score")
    difference = (wide.threshold - wide.cosine).groupby("domain").mean().mean()
    assert f"| threshold     | {difference:+.1f} " in out


def test_scores_of_runs_are_saved_and_answered_alike(tmp_path, capsys):
    script = load_example("answer")
    for row, domain, seed in product(("dense", "other"), range(3), range(2)):
        records = invented_records([domain], trial_seed=seed, row=row, model="none")
        write_run(tmp_path / "mine" / f"{row}-{domain}-{seed}", records)
    script.main([str(tmp_path / "mine"), "--save", str(tmp_path / "scores.csv")])
    of_runs = capsys.readouterr().out
    assert "| other | " in " ".join(of_runs.split())
    script.main([str(tmp_path / "scores.csv")])
    assert capsys.readouterr().out == of_runs
