"""Accuracies stated in the papers, for a column beside the measured ones.

paper_figures.csv has one figure per line, in percent and as printed, with F1 scores multiplied by 100. Where two tables
of a paper differ, both figures are listed. Networks have timm's names. ViT-S/16 has the name of the checkpoint that the
experts start from. A tag names the weights, for example torchvision's first ones in "resnet50.tv_in1k". Without a tag
they are timm's default weights.

Known problems of the papers' tables:
- GMoE's Table 10 swaps MLDG's accuracies on PACS and VLCS.
- GMoE's Table 1 mixes runs of 5,000 and 15,000 steps on DomainNet. Table 9 separates them.
- SF-MoE does not state its number of steps on DomainNet. Its ResNet-50 is DomainBed's with 5,000 steps.
- MoGE does not state which of SatCLIP's encoders it uses. Its figure is listed for ten polynomials, the number of
  MoGE's own encoder.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import timm

from ..protocols.options import Arguments
from ..protocols.planner import OFFICIAL
from ..protocols.selection import OOD_RULES

_TEXTS = ("source", "dataset", "rule", "algorithm", "model", "column")


@dataclass(frozen=True)
class PaperFigure:
    """One accuracy stated in a paper."""

    source: str  # paper and table, such as "GMoE, Table 1"
    dataset: str
    rule: str  # a name in `tables.NEEDED`
    algorithm: str  # followed by " + swad" if weights were averaged with SWAD
    model: str  # timm's name, with a tag unless the weights are timm's default
    column: str  # the evaluated domain, "average", or a role and a score such as "ood worst group"
    value: float  # percent
    error: float | None = None  # standard error, None if not stated
    trained_on: str | None = None  # the only training domain, in single-source tables
    steps: int | None = None  # length of the paper's runs, None if the figure holds for any length
    expert_mode: str | None = None  # MoGE's, "routed" or "shared"; None for other models
    model_kwargs: Mapping[str, object] = field(default_factory=dict)  # that differ from the registered model


def read_figures(text: str) -> tuple[PaperFigure, ...]:
    """Reads figures from CSV text with a header of `PaperFigure`'s fields. model_kwargs is JSON."""
    return tuple(
        PaperFigure(
            **{name: row[name] for name in _TEXTS},
            value=float(row["value"]),
            error=float(row["error"]) if row["error"] else None,
            trained_on=row["trained_on"] or None,
            steps=int(row["steps"]) if row["steps"] else None,
            expert_mode=row["expert_mode"] or None,
            model_kwargs=json.loads(row["model_kwargs"] or "{}"),
        )
        for row in csv.DictReader(text.splitlines())
    )


FIGURES = read_figures((files(__package__) / "paper_figures.csv").read_text(encoding="utf-8"))


def figures_for(
    dataset: str, rule: str, args: Arguments, algorithm: str, column: str, trained_on: str | None = None
) -> list[PaperFigure]:
    """Finds the papers' figures for a run with the same network, published weights and options.

    The algorithm includes weight averaging. The column is a domain or "average".
    """
    # The papers fine-tune pretrained networks. A network from scratch has no figure.
    if not (args.get("pretrained") or args.get("initial_checkpoint")):
        return []
    model = with_tag(str(args.get("model")))
    # MoGE does not state its rule: its figures match every rule for the data's own test domains
    rule = OFFICIAL if rule in OOD_RULES else rule
    setting = (dataset, rule, algorithm, model, column, trained_on, args.get("model_kwargs", {}))
    return [
        figure
        for figure in FIGURES
        if setting == _setting(figure)
        and figure.steps in (None, args.get("steps"))
        and figure.expert_mode in (None, args.get("expert_mode"))
    ]


@cache
def with_tag(model: str) -> str:
    """Appends the tag of timm's default weights to a network's name without a tag."""
    cfg = None if "." in model else timm.get_pretrained_cfg(model, allow_unregistered=True)
    return f"{model}.{cfg.tag}" if cfg and cfg.tag else model


def _setting(figure: PaperFigure) -> tuple[object, ...]:
    model = with_tag(figure.model)
    keys = (figure.dataset, figure.rule, figure.algorithm, model, figure.column, figure.trained_on)
    return (*keys, figure.model_kwargs)
