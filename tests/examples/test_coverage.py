"""examples/coverage.py: coverage of halves, and a sweep's calibration without the domain that it is tested on."""

import pandas as pd
import pytest
import torch

from examples import coverage
from tests.networks.test_calibration import scored, scores
from timm_moe_dg.storage.run_folder import save_calibration


def test_halves_of_the_same_scores_cover_each_other():
    assert coverage.within(torch.rand(400), 0.9) == pytest.approx(0.9, abs=0.02)


def test_the_held_out_domain_of_a_run_does_not_calibrate_it(tmp_path, monkeypatch):
    (tmp_path / "best").mkdir()
    tenths = [value / 10 for value in range(1, 11)]
    own = scored(scores(*tenths, *tenths), scores(0.05, 0.25, 0.35, 0.95), domains=["a"])
    save_calibration(own, tmp_path / "best")
    columns = {"role": ["train", "held out"], "test": [0, 1], "ece": [0.1, 0.2], "ece_uncalibrated": [0.3, 0.4]}
    monkeypatch.setattr(coverage.timm_moe_dg, "evaluate", lambda *_, **__: pd.DataFrame(columns))
    others = [own, scored(scores(0.5), scores(0.01, 0.02, 0.03, 0.3), domains=["b"])]
    row = coverage.measure(tmp_path, others, 0.5)
    assert row["outside, validation"] == 0.25  # above 0.5, the eleventh of twenty scores
    assert row["outside, sweep"] == 1.0  # above 0.02, the third of four scores from the largest
    assert (row["ECE within, before"], row["ECE outside, after"]) == (0.3, 0.2)
