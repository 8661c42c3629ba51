"""The comparison of routers: its plans, and what it measures."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import timm_moe_dg

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch):
    """Imports a script of the examples."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def load_file(name):
        spec = spec_from_file_location(Path(name).stem, EXAMPLES / f"{name}.py")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_file


def test_overlap_of_shares(load):
    measure = load("routers/measure")
    targets = np.array([0, 1, 1])
    held_out = measure.by_class(torch.tensor([[0, 0], [1, 2], [1, 2]]), targets, 3)
    training = measure.by_class(torch.tensor([[0, 1], [2, 2], [1, 1]]), targets, 3)
    # Class 0: (1, 0, 0) and (1/2, 1/2, 0). Class 1: (0, 1/2, 1/2) twice. Between them: 1/2, and 0
    same, other = measure.overlaps(held_out, training)
    assert same == pytest.approx((0.5 + 1) / 2)
    assert other == pytest.approx((0 + 0.5) / 2)


@pytest.mark.slow
def test_a_run_is_measured(load, tmp_path):
    measure = load("routers/measure")
    kwargs = {"patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 2, "moe_layers": (1,)}
    run = timm_moe_dg.finetune(
        dataset="rotated_digits", model="gmoe_tiny_patch16", model_kwargs=kwargs, test_domains=[1], steps=2,
        eval_freq=1, batch_size=2, workers=0, cpu_threads=1, output=tmp_path, experiment="run",
    )  # fmt: skip
    row = measure.measure(run.path)
    assert list(row) == ["run", "accuracy", "permuted", "unused", "entropy", "same class", "other class"]
    assert all(0 <= row[name] <= 1 for name in ("entropy", "same class", "other class"))
    assert row["entropy"] > 0.9  # a router that has seen two steps
    scores = timm_moe_dg.evaluate(run, split="all", workers=0).set_index("domain")
    assert row["accuracy"] == pytest.approx(100 * scores.accuracy.iloc[1], abs=1e-6)


def test_networks_are_compared_with_the_cosine_router(load, tmp_path, capsys):
    compare = load("routers/compare")
    random = np.random.default_rng(0)
    places = [(shift, domain, seed) for shift in compare.SHIFTS for domain in range(3) for seed in range(4)]
    gains = {"cosine": 0, "bias": 5, "random": -5}  # in points; the noise is one point
    gains = {(row, shift): gain for row, gain in gains.items() for shift in compare.SHIFTS}
    gains |= {("self", shift): gain for shift, gain in zip(compare.SHIFTS, (5, 5, -5), strict=True)}
    frame = pd.DataFrame(
        [
            (row, *place, 50 + gain + random.normal())
            for (row, shift), gain in gains.items()
            for place in places
            if place[0] == shift
        ],
        columns=["row", "shift", "domain", "seed", "score"],
    )
    table = compare.differences(frame)
    assert len(table) == 9
    for line in table.to_dict("records"):
        assert line["difference"] == pytest.approx(gains[line["row"], line["shift"]], abs=1.5)
        assert line["p"] == pytest.approx(2 / 2**12)  # all twelve pairs have one sign
        assert line["p, Holm"] == pytest.approx(9 * line["p"])
    assert compare.recommended(table) == ["bias"]
    frame.to_csv(tmp_path / "scores.csv", index=False)
    compare.main([str(tmp_path / "scores.csv"), "--picture", str(tmp_path / "routers.png")])
    assert "Recommended: sigmoid, bias without a loss\n" in capsys.readouterr().out
    assert (tmp_path / "routers.png").stat().st_size > 1000
