"""Accuracies that the papers state, in percent, to stand beside measured ones in a column of their own.

They lie in paper_figures.csv, one a line, copied as they are printed, F1 scores times 100; where two tables of a paper
differ, both are there. Errors known in the tables: GMoE's Table 10 has MLDG's PACS and VLCS the wrong way round, and
Table 1 mixes runs of 5,000 and 15,000 steps on DomainNet, which Table 9 separates. SF-MoE does not say how long it
trains on DomainNet; its ResNet-50 is DomainBed's of 5,000 steps. Networks go by their names in timm, ViT-S/16 by the
checkpoint that the experts start from. A tag names the weights, such as torchvision's first ones in
"resnet50.tv_in1k"; without one they are timm's default. MoGE does not say which of SatCLIP's encoders it takes; its
figure stands beside the one with ten polynomials, as many as its own encoder has.
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
    """One accuracy in a paper.

    Attributes:
        source: Paper and table, such as "GMoE, Table 1".
        dataset: The data set.
        rule: How the model was selected; a name of `tables.NEEDED`.
        algorithm: The training method, with " + swad" where weights were averaged so.
        model: The network's name in timm, with a tag unless the weights are timm's default.
        column: The domain that it is an accuracy on, "average", or a role with its score.
        value: Percent.
        error: Standard error; None where none is stated.
        trained_on: The only training domain, in single-source tables.
        steps: Length of the paper's runs; None where it tells no figures apart.
        expert_mode: MoGE's, "routed" or "shared"; None for other models.
        model_kwargs: Arguments in which the model differs from the registered one.
    """

    source: str
    dataset: str
    rule: str
    algorithm: str
    model: str
    column: str
    value: float
    error: float | None = None
    trained_on: str | None = None
    steps: int | None = None
    expert_mode: str | None = None
    model_kwargs: Mapping[str, object] = field(default_factory=dict)


def read_figures(text: str) -> tuple[PaperFigure, ...]:
    """Reads figures from CSV with a header that names `PaperFigure`'s fields; model_kwargs is JSON.

    Raises:
        ValueError: A number or an object is not written as such.
        KeyError: A column is missing.
    """
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
    """Finds what the papers state for a run's setting: same network from published weights, same options.

    Args:
        dataset: The data set.
        rule: The selection rule. MoGE does not say how it selects: its figures stand beside every rule for the data's
            own test domains.
        args: The run's arguments.
        algorithm: The training method, with weight averaging.
        column: A domain, or "average".
        trained_on: The only training domain, in single-source tables.
    """
    if not (args.get("pretrained") or args.get("initial_checkpoint")):
        return []
    model = with_tag(str(args.get("model")))
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
    """Completes a network's name by the tag of timm's default weights, if it has none; others stay as they are."""
    cfg = None if "." in model else timm.get_pretrained_cfg(model, allow_unregistered=True)
    return f"{model}.{cfg.tag}" if cfg and cfg.tag else model


def _setting(figure: PaperFigure) -> tuple[object, ...]:
    of = (figure.dataset, figure.rule, figure.algorithm, with_tag(figure.model), figure.column)
    return (*of, figure.trained_on, figure.model_kwargs)
