"""Costs of rows are those of their networks, counted by hand."""

from dataclasses import replace
from math import isnan
from pathlib import Path

import torch

from tests.invented import ARGS, make_record
from tests.saved_run import saved_run
from timm_moe_dg.networks.cost import count_macs
from timm_moe_dg.results.costs import WITHOUT_NETWORK, costs_of
from timm_moe_dg.results.runs import FinishedRun


def of_row(row, folder, **args):
    return FinishedRun(Path(folder), [replace(make_record(), args={**ARGS, "row": row, **args})])


def test_rows_cost_what_their_networks_compute_and_hold(tmp_path):
    vit, moge = (saved_run(tmp_path / name, name, ("cat", "dog")) for name in ("gmoe_tiny_patch16", "moge_tiny"))
    (tmp_path / "ensemble" / "best").mkdir(parents=True)
    (tmp_path / "ensemble" / "best" / "config.json").write_text("{}")
    costs = costs_of(
        [
            of_row("most_frequent", tmp_path, model=WITHOUT_NETWORK),
            of_row("gmoe", tmp_path / "gmoe_tiny_patch16"),
            of_row("moge", tmp_path / "moge_tiny"),
            of_row("deleted", tmp_path),
            of_row("ensemble", tmp_path / "ensemble"),
        ]
    )
    assert costs["most_frequent"] == (0, 0)
    images = torch.zeros(1, 3, 32, 32)
    for name, network, inputs in (("gmoe", vit, [images]), ("moge", moge, [images, torch.zeros(1, 2)])):
        gmacs, parameters = costs[name]
        assert gmacs == count_macs(network, inputs) / 1e9
        assert parameters == sum(parameter.numel() for parameter in network.parameters())
    assert all(map(isnan, costs["deleted"]))
    assert all(map(isnan, costs["ensemble"]))
    (tmp_path / "moge_tiny" / "best" / "model.safetensors").unlink()  # as after a diverged run
    assert costs_of([of_row("moge", tmp_path / "moge_tiny")])["moge"] == costs["moge"]
