"""Prediction sets and abstention: ranks by hand, crepes, coverage as a property, and bad input."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from crepes.base import ConformalClassifier

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.inference.certainty import Certainty, abstention_threshold, held_out_scores, set_threshold
from timm_moe_dg.networks.calibration import Calibration, Scores
from timm_moe_dg.storage.run_folder import save_calibration

CLASSES = ["beagle", "poodle", "tabby"]


def calibration(scores, held_out=None, method="ERM", domains=()):
    none = Scores(torch.empty(0), torch.empty(0))
    return Calibration(1.0, "", method, CLASSES, scores, held_out or none, list(domains))


def scores(*values):
    return Scores(torch.tensor(values).sort().values, torch.tensor(values).sort().values)


def options(**given):
    names = ("coverage", "abstain", "calibration")
    return SimpleNamespace(**{**dict.fromkeys(names), "model": "local-dir:RUN/best", **given})


def test_the_threshold_has_the_rank_of_the_formula():
    # ceil(20 * 0.9) = 18 of 19 scores, from the largest down
    values = torch.arange(1, 20) / 20
    assert set_threshold(values, 0.9) == pytest.approx(0.1)
    assert set_threshold(values, 0.95) == pytest.approx(0.05)
    with pytest.raises(ArgumentError, match=r"coverage=0.96: needs 24 images .*, and there are 19; give at most 0.95,"):
        set_threshold(values, 0.96)
    with pytest.raises(ArgumentError, match="there are 0; calibrate on more"):
        set_threshold(values[:0], 0.5)


@pytest.mark.parametrize(("count", "coverage"), [(10, 0.7), (98, 0.9), (100, 0.9), (250, 0.835)])
def test_sets_are_those_of_crepes(count, coverage):
    # Of sizes for which (n + 1) coverage is not whole, where a rounded comparison would decide
    random = np.random.default_rng(count)
    of_target, probabilities = random.random(count), random.dirichlet([1] * 3, 200)
    library = ConformalClassifier().fit(1 - of_target)
    expected = library.predict_set(1 - probabilities, confidence=coverage, smoothing=False)
    judged = Certainty(options(coverage=coverage), calibration(scores(*of_target.tolist())), CLASSES)
    rows = judged.rows(torch.tensor(probabilities).float())["set"]
    assert [sorted(row) for row in rows] == [
        sorted(name for name, inside in zip(CLASSES, row, strict=True) if inside) for row in expected
    ]


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


def test_columns_do_not_depend_on_the_batch():
    judged = Certainty(options(coverage=0.5, abstain=0.5), calibration(scores(0.2, 0.4, 0.6)), CLASSES)
    probabilities = torch.tensor([[0.3, 0.6, 0.1], [0.45, 0.1, 0.45], [0.3, 0.3, 0.4]])
    table = judged.rows(probabilities)
    assert table["set"] == [["poodle"], ["beagle", "tabby"], ["tabby"]]
    assert table["abstain"] == [False, False, False]
    judged = Certainty(options(abstain=0.9), calibration(scores(0.2, 0.4, 0.6)), CLASSES)
    assert judged.rows(probabilities)["abstain"] == [False, True, True]


def test_options_without_a_calibration_name_the_command():
    for given in ({"coverage": 0.9}, {"abstain": 0.2}):
        with pytest.raises(ArgumentError, match=r"RUN/best is not calibrated: .*evaluate.* --model RUN --calibrate"):
            Certainty(options(**given), None, CLASSES)
    assert Certainty(options(), None, CLASSES).rows(torch.ones(1, 3)) == {}
    with pytest.raises(ArgumentError, match="calibration='x': has no effect alone"):
        Certainty(options(calibration="x"), calibration(scores(0.5)), CLASSES)


def test_a_sweep_contributes_the_held_out_domains_of_its_method(tmp_path):
    own = calibration(scores(0.9))
    with pytest.raises(ArgumentError, match="holds no calibrated run that held out a domain; calibrate each run: "):
        held_out_scores(tmp_path, own)
    for name, method, values in (("a", "ERM", (0.1, 0.5)), ("b", "ERM", (0.3,)), ("c", "GMoE", (0.8,))):
        (tmp_path / name / "best").mkdir(parents=True)
        saved = calibration(scores(0.9), scores(*values), method, [name])
        save_calibration(saved, tmp_path / name / "best")
    (tmp_path / "d" / "best").mkdir(parents=True)
    assert held_out_scores(tmp_path, own).of_target.tolist() == pytest.approx([0.1, 0.3, 0.5])
    with pytest.raises(ArgumentError, match=r"the model is of SWAD with 3 classes, and no run is"):
        held_out_scores(tmp_path, calibration(scores(0.9), method="SWAD"))
    judged = Certainty(options(coverage=0.7, calibration=str(tmp_path)), own, CLASSES)
    assert judged.least == pytest.approx(0.1)
