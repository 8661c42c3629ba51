"""Temperature, distribution of the training images, thresholds, and their file: closed forms, scipy, and damage."""

import math

import numpy as np
import pytest
import scipy.optimize
import torch

from tests.saved_run import saved_run
from timm_moe_dg.data import Split, get_benchmark
from timm_moe_dg.data.readers.digits import CLASSES
from timm_moe_dg.errors import ArgumentError, CheckpointError, DataError
from timm_moe_dg.networks.calibration import (
    Calibration,
    Scores,
    abstention_threshold,
    calibrate,
    fit_distribution,
    fit_temperature,
    held_out_scores,
    load_calibration,
    set_threshold,
)
from timm_moe_dg.storage.run_folder import save_calibration


def scored(scores, held_out=None, method="ERM", domains=()):
    none = Scores(torch.empty(0), torch.empty(0))
    return Calibration(1.0, "", method, ["beagle", "poodle", "tabby"], scores, held_out or none, list(domains))


def scores(*values):
    return Scores(torch.tensor(values).sort().values, torch.tensor(values).sort().values)


def test_the_temperature_of_two_classes_is_the_closed_form():
    logits = torch.tensor([[3.0, 0.0]]).repeat(100, 1)
    target = torch.tensor([0] * 80 + [1] * 20)  # sigmoid(3 / T) = 0.8
    assert fit_temperature(logits, target) == pytest.approx(3 / math.log(0.8 / 0.2), rel=1e-3)


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


def test_the_threshold_has_the_rank_of_the_formula():
    # ceil(20 * 0.9) = 18 of 19 scores, from the largest down
    values = torch.arange(1, 20) / 20
    assert set_threshold(values, 0.9) == pytest.approx(0.1)
    assert set_threshold(values, 0.95) == pytest.approx(0.05)
    with pytest.raises(ArgumentError, match=r"coverage=0.96: needs 24 images .*, and there are 19; give at most 0.95,"):
        set_threshold(values, 0.96)
    with pytest.raises(ArgumentError, match="there are 0; calibrate on more"):
        set_threshold(values[:0], 0.5)


@pytest.mark.parametrize(("count", "coverage"), [(19, 0.9), (50, 0.8)])
def test_marginal_coverage_is_rank_over_n_plus_1(count, coverage):
    # Of exchangeable scores, a new one is above the k-th largest of n with probability k / (n + 1)
    draws = torch.rand(4000, count + 1)
    inside = [set_threshold(row[1:].sort().values, coverage) <= row[0] for row in draws]
    expected = np.ceil((count + 1) * coverage) / (count + 1)
    assert np.mean(inside) == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / 4000))


def test_abstention_is_the_share_of_the_images_that_set_it(caplog):
    confidence = torch.rand(200).sort().values
    for share in (0, 0.2, 0.55, 1):
        assert (confidence < abstention_threshold(confidence, share)).float().mean() == pytest.approx(share)
    assert not caplog.records
    assert abstention_threshold(torch.tensor([0.5, 1, 1, 1, 1]), 0.4) == 1
    assert "abstain=0.4: 20.0% of answers go to a person, because further ones share the confidence" in caplog.text


def test_a_sweep_contributes_the_held_out_domains_of_its_method(tmp_path):
    own = scored(scores(0.9))
    with pytest.raises(ArgumentError, match="holds no calibrated run that held out a domain; calibrate each run: "):
        held_out_scores(tmp_path, own)
    for name, method, values in (("a", "ERM", (0.1, 0.5)), ("b", "ERM", (0.3,)), ("c", "GMoE", (0.8,))):
        (tmp_path / name / "best").mkdir(parents=True)
        saved = scored(scores(0.9), scores(*values), method, [name])
        save_calibration(saved, tmp_path / name / "best")
    (tmp_path / "d" / "best").mkdir(parents=True)
    assert held_out_scores(tmp_path, own).of_target.tolist() == pytest.approx([0.1, 0.3, 0.5])
    with pytest.raises(ArgumentError, match=r"the model is of SWAD with 3 classes, and no run is"):
        held_out_scores(tmp_path, scored(scores(0.9), method="SWAD"))
