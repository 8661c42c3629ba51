"""Pictures of an evaluation: complete for any number of classes and predictions."""

import numpy as np
import pytest
import torch
from PIL import Image

from timm_moe_dg.inference.evaluated import plot_confusion, plot_reliability
from timm_moe_dg.metrics import calibration_bins


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 10, 31])
@pytest.mark.parametrize("name", ["{}", "a class with a long name, number {} $x_{{"])
def test_no_label_is_cut_off(tmp_path, number, name):
    classes = [name.format(index) for index in range(number)]
    title = "model\nheld out: " + "a domain " * 20
    plot_confusion(torch.eye(number, dtype=torch.long), classes, tmp_path / "a.png", title)
    pixels = np.asarray(Image.open(tmp_path / "a.png").convert("L"))
    assert all((edge == 255).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))


@pytest.mark.parametrize("number", [0, 1, 50])
def test_a_reliability_diagram_of_any_number_of_predictions(tmp_path, number):
    confidence = torch.linspace(0.3, 1, number)
    bins = calibration_bins(confidence, confidence > 0.5)
    plot_reliability({"held out": bins, "training": bins}, tmp_path / "picture.png")
    assert Image.open(tmp_path / "picture.png").width > 300
