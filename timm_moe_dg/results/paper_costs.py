"""Time and memory of a step as the papers state them, for a column beside the measured ones.

paper_costs.csv has one row for each algorithm and network of GMoE's Table 16 and SF-MoE's Table 4. Neither paper names
its GPU. EoA is an ensemble of averaged networks; its row is that of one network with a moving average.
"""

import csv
from importlib.resources import files
from typing import NamedTuple

from .paper_figures import with_tag

IMAGES, PIXELS = 160, 224  # of a step in both papers


class PaperCost(NamedTuple):
    """Cost of a step in a paper."""

    source: str  # paper and table
    mode: str  # "train" or "inference"
    algorithm: str  # followed by " + swad" or " + moving" for averaged weights
    model: str  # timm's name
    seconds: str  # as printed
    gigabytes: str  # as printed


with (files(__package__) / "paper_costs.csv").open(encoding="utf-8") as _lines:
    COSTS = tuple(PaperCost(**row) for row in csv.DictReader(_lines))


def stated_costs(mode: str, algorithm: str, model: str) -> str:
    """Returns the papers' costs of a step of 160 images in words, "" if they state none."""
    key = (mode, algorithm, with_tag(model))
    rows = [cost for cost in COSTS if key == (cost.mode, cost.algorithm, with_tag(cost.model))]
    return "; ".join(f"{cost.seconds} s, {cost.gigabytes} GB ({cost.source})" for cost in rows)
