"""Costs of the networks of rows: operations for an image, and parameters."""

from collections.abc import Sequence
from math import nan

import torch
from timm.data.model_config import get_model_input_config
from torch import nn

from ..cli.values import LOCAL
from ..errors import CheckpointError, MoeDgError
from ..networks.build import build_network
from ..networks.cost import count_macs
from ..networks.export import sample_metadata
from ..networks.trained import load_trained
from .answer import row_names
from .runs import FinishedRun, by_row

WITHOUT_NETWORK = "none"  # in place of the name of a network, for rows without one


def costs_of(runs: Sequence[FinishedRun]) -> dict[str, tuple[float, float]]:
    """Returns the `cost` of each row, that of its last run."""
    last = dict(by_row(runs)[["row", "run"]].to_numpy()) if runs else {}
    return {name: cost(last[row]) for row, name in row_names(last).items()}


@torch.no_grad()
def cost(run: FinishedRun) -> tuple[float, float]:
    """Returns the billions of multiply-accumulates of an image, and the number of parameters, of a run's network.

    Both are NaN if the run's folder holds no network that can be built.
    """
    if run.model == WITHOUT_NETWORK:
        return 0.0, 0
    folder = run.folder / "best"
    if not (folder / "config.json").is_file():
        return nan, nan
    try:
        network = _network(f"{LOCAL}{folder}")
    except MoeDgError:  # such as an ensemble's
        return nan, nan
    size = get_model_input_config(network)["input_size"]
    metadata = sample_metadata(network, 2)  # the second place is unknown
    macs = count_macs(network, [torch.zeros(1, *size), *([] if metadata is None else [metadata[:1]])])
    return macs / 1e9, sum(parameter.numel() for parameter in network.parameters())


def _network(name: str) -> nn.Module:
    try:
        return load_trained(name)
    except CheckpointError:  # the weights have diverged, or were deleted
        return build_network(name, None).eval()
