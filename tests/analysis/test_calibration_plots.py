"""Reliability diagrams."""

import pytest
import torch
from PIL import Image

from timm_moe_dg.analysis.score_plots import plot_reliability
from timm_moe_dg.metrics import calibration_bins

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("number", [0, 1, 50])
def test_a_picture_of_any_number_of_predictions(tmp_path, number):
    confidence = torch.linspace(0.3, 1, number)
    bins = calibration_bins(confidence, confidence > 0.5)
    plot_reliability({"held out": bins, "training": bins}, tmp_path / "picture.png")
    assert Image.open(tmp_path / "picture.png").width > 300
