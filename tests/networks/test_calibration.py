"""Temperature, distribution of the training images, and their file: closed forms, scipy, and damage."""

import math

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F

from tests.saved_run import saved_run
from timm_moe_dg.data import Split, get_benchmark
from timm_moe_dg.data.readers.digits import CLASSES
from timm_moe_dg.errors import CheckpointError, DataError
from timm_moe_dg.networks.calibration import (
    Calibration,
    Scores,
    calibrate,
    fit_distribution,
    fit_temperature,
    load_calibration,
    pixel_statistics,
)
from timm_moe_dg.storage.run_folder import save_calibration


def test_the_temperature_of_two_classes_is_the_closed_form():
    logits = torch.tensor([[3.0, 0.0]]).repeat(100, 1)
    target = torch.tensor([0] * 80 + [1] * 20)  # sigmoid(3 / T) = 0.8
    assert fit_temperature(logits, target) == pytest.approx(3 / math.log(0.8 / 0.2), rel=1e-3)


def test_the_temperature_is_scipys_minimum_over_its_inverse():
    logits = 4 * torch.randn(500, 7)
    target = (logits / 3).softmax(1).multinomial(1).flatten()
    values = logits.double().numpy()

    def loss(inverse):  # convex in 1 / T
        scaled = values * inverse
        return (np.log(np.exp(scaled).sum(1)) - scaled[np.arange(500), target]).mean()

    inverse = scipy.optimize.minimize(lambda x: loss(x[0]), [1.0], method="Nelder-Mead").x[0]
    temperature = fit_temperature(logits, target)
    assert temperature == pytest.approx(1 / inverse, rel=1e-2)
    assert F.cross_entropy(logits / temperature, target) < F.cross_entropy(logits, target)


def test_without_an_error_the_temperature_stays():
    logits = torch.randn(20, 3)
    assert fit_temperature(logits, logits.argmax(1)) == 1.0


def test_distances_are_those_of_mahalanobis_and_hold_their_share():
    mixing = torch.randn(5, 5)
    labels = torch.arange(4000) % 2
    draws = torch.randn(8000, 5) @ mixing + 20 * torch.cat([labels, labels]).unsqueeze(1)
    fitted = fit_distribution(draws[:4000], labels, draws[4000:])
    # chi with 5 degrees of freedom: its 99.5 % quantile is 4.093
    assert fitted.threshold.item() == pytest.approx(math.sqrt(scipy.stats.chi2.ppf(0.995, 5)), rel=0.05)
    assert fitted.excludes(draws[4000:]).float().mean() <= 0.005
    assert fitted.excludes(torch.full((1, 5), 10.0)).item()  # between both means
    few = fit_distribution(torch.randn(3, 50), torch.zeros(3, dtype=torch.long), torch.randn(2, 50))
    assert few.distance(torch.randn(2, 50)).isfinite().all()


def test_pixel_statistics_tell_a_constant_image():
    images = torch.rand(200, 3, 8, 8)
    fitted = fit_distribution(pixel_statistics(images[:100]), torch.zeros(100).long(), pixel_statistics(images[100:]))
    assert fitted.excludes(pixel_statistics(torch.zeros(1, 3, 8, 8))).all()
    assert not fitted.excludes(pixel_statistics(images[100:])).any()


def calibration(**changes):
    validation, held_out = (Scores(torch.rand(2).sort().values, torch.rand(2).sort().values) for _ in range(2))
    distribution = fit_distribution(torch.randn(9, 2), torch.zeros(9).long(), torch.randn(9, 2))
    values = {"temperature": 1.5, "network": "x", "method": "ERM", "classes": ["a", "b"], "held_out_domains": ["c"]}
    parts = {"validation": validation, "held_out": held_out, "distributions": {"pixels": distribution}}
    return Calibration(**{**values, **parts, **changes})


def test_a_file_is_read_as_it_was_written(tmp_path):
    written = calibration()
    save_calibration(written, tmp_path)
    read = load_calibration(f"local-dir:{tmp_path}")
    assert read.header() == written.header()
    for name, value in written.tensors().items():
        torch.testing.assert_close(read.tensors()[name], value, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.safetensors"]
    assert load_calibration(f"local-dir:{tmp_path / 'none'}") is None


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_damaged_file_is_one_line_with_a_remedy(tmp_path, damage):
    save_calibration(calibration(temperature=0.0), tmp_path)
    if damage is not None:
        (tmp_path / "calibration.safetensors").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"cannot be read as a calibration .*; remove it, or .*--calibrate"):
        load_calibration(f"local-dir:{tmp_path}")


def test_without_validation_images_there_is_no_calibration(tmp_path):
    network = saved_run(tmp_path, "gmoe_tiny_patch16", CLASSES)
    domains = get_benchmark("rotated_digits").read(None)[:2]
    splits = [Split(np.arange(2), np.arange(0)), Split(np.arange(2), np.arange(2, 4))]
    settings = {"method": "", "metadata_columns": None, "batch_size": 4, "workers": 0}
    with pytest.raises(DataError, match="no training domain has validation images; give data with some, or a --hold"):
        calibrate(network, domains, splits, [0], [1], **settings)
    fitted = calibrate(network, domains, splits, [1], [0], **settings)
    assert [len(part.confidence) for part in (fitted.validation, fitted.held_out)] == [2, 2]
    assert fitted.held_out_domains == ["rot_0"]
