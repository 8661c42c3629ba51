"""Accuracies stated in the papers, for columns beside the measured ones.

paper_figures.csv has one figure per line, in percent and as printed, with F1 scores multiplied by 100. Where two tables
of a paper differ, both figures are listed. Networks have timm's names. ViT-S/16 has the name of the checkpoint that the
experts start from. A tag names the weights, for example torchvision's first ones in "resnet50.tv_in1k". Without a tag
they are timm's default weights.

A figure belongs to a recipe of tools/recipes. It stands beside runs whose settings in effect are the recipe's.

Known problems of the papers' tables:
- GMoE's Table 10 swaps MLDG's accuracies on PACS and VLCS.
- GMoE's Table 1 mixes runs of 5,000 and 15,000 steps on DomainNet. Table 9 separates them.
- SF-MoE does not state its number of steps on DomainNet. Its ResNet-50 is DomainBed's with 5,000 steps.
- MoGE does not state which of SatCLIP's encoders it uses. Its figure is listed for ten polynomials, the number of
  MoGE's own encoder.
- MoGE selects by the worst group's accuracy in validation, and does not say whether that validation is "id" or "ood".
  Its figures stand beside every rule for the data's own test domains.
- MoGE does not say which deviation its ± is. GMoE and SF-MoE state the standard error of three runs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from io import StringIO

import pandas as pd
import timm

from ..protocols.planner import OFFICIAL
from ..protocols.run_identity import comparable, default_settings, in_effect, spelled_out
from ..protocols.selection import OOD_RULES
from .runs import FinishedRun, RowKey
from .tables import Table

# Settings that the papers do not state: how numbers are computed, how often, and digests
_NOT_STATED = {
    *("amp_dtype", "channels_last", "compile", "data", "eval_freq", "grad_accum_steps", "grad_checkpointing"),
    *("initial_checkpoint", "mixed_precision", "num_classes", "pretrained", "processes"),
    *("skip_unreadable", "validation_batch_size", "weights_sha256"),
}


@dataclass(frozen=True)
class PaperFigure:
    """One accuracy stated in a paper."""

    source: str  # paper and table, such as "GMoE, Table 1"
    dataset: str
    rule: str  # a name in `tables.RULES`
    algorithm: str  # followed by " + swad" if weights were averaged with SWAD
    model: str  # timm's name, with a tag unless the weights are timm's default
    column: str  # the evaluated domain, "average", or a role and a score such as "ood worst group"
    recipe: str  # name of a file in tools/recipes, empty for a command on the page of the papers
    value: float  # percent
    error: float | None = None  # as printed after the plus-minus sign, None if not stated
    trained_on: str | None = None  # the only training domain, in single-source tables
    settings: Mapping[str, object] = field(default_factory=dict, hash=False)  # the recipe's, None if not stated

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error}"
        return f"{self.value}{error} ({self.source})"


def read_figures(text: str) -> tuple[PaperFigure, ...]:
    """Reads figures from CSV text with a header of `PaperFigure`'s fields. Settings are JSON."""
    frame = pd.read_csv(StringIO(text), dtype=str, keep_default_na=False)
    rows = frame.to_dict(orient="records")
    for row in rows:
        row |= {"value": float(row["value"]), "error": float(row["error"]) if row["error"] else None}
        row |= {"trained_on": row["trained_on"] or None, "settings": json.loads(row["settings"] or "{}")}
    return tuple(PaperFigure(**row) for row in rows)


FIGURES = read_figures((files(__package__) / "paper_figures.csv").read_text(encoding="utf-8"))


def figures_for(run: FinishedRun, rule: str, column: str, trained_on: str | None = None) -> list[PaperFigure]:
    """Finds the papers' figures for runs with the same network, published weights and settings in effect.

    The column is a domain, "average", or a role and a score.
    """
    cell = (run.dataset, OFFICIAL if rule in OOD_RULES else rule, column, trained_on)
    figures = [f for f in FIGURES if cell == (f.dataset, f.rule, f.column, f.trained_on)]
    return [figure for figure in figures if is_of_recipe(figure, run)]


def is_of_recipe(figure: PaperFigure, run: FinishedRun) -> bool:
    """Whether a run has the network, the pretrained weights and the settings of a figure's recipe."""
    if (run.algorithm, with_tag(run.model)) != (figure.algorithm, with_tag(figure.model)):
        return False
    # The papers fine-tune pretrained networks, and a recipe draws no hyper-parameters
    if not (run.args.get("pretrained") or run.args.get("initial_checkpoint")) or run.seeds[1]:
        return False
    defaults, given, ours = default_settings(run.args), spelled_out(run.args), in_effect(run.args)
    theirs = {**defaults, **figure.settings}
    if given.pop("epochs", None) is not None:
        given["steps"] = ours["steps"] = run.args["steps"]
    return not any(
        comparable(name, ours) != comparable(name, theirs)
        for name in (given.keys() | figure.settings.keys()) - _NOT_STATED
        if theirs.get(name) is not None or name not in figure.settings
    )


def paper_columns(table: Table) -> dict[str, dict[RowKey, str]]:
    """Returns the papers' figures for a table: column -> row -> text, for the columns with any figure."""
    # A run with drawn hyper-parameters, if any has them, stands for all of its row
    shown = {row: max(runs, key=lambda run: run.seeds[1] != 0) for row, runs in table.runs.items()}
    columns = {
        column: {
            row: "; ".join(map(str, figures_for(run, table.rule, name, table.trained_on))) for row, run in shown.items()
        }
        for column, name in ((column, column.removesuffix(" (IID)")) for column in table.columns)
    }
    return {column: texts for column, texts in columns.items() if any(texts.values())}


def rows_without_figures(tables: Sequence[Table]) -> list[str]:
    """Names the rows that have no figure in any table of their data set."""
    stated = [(table, texts) for table in tables for texts in paper_columns(table).values()]
    with_figures = {(table.dataset, row) for table, texts in stated for row, text in texts.items() if text}
    rows = dict.fromkeys((table.dataset, row) for table in tables for row in table.runs)
    return [f"{dataset}, {row}" for dataset, row in rows if (dataset, row) not in with_figures]


@cache
def with_tag(model: str) -> str:
    """Appends the tag of timm's default weights to a network's name without a tag."""
    cfg = None if "." in model else timm.get_pretrained_cfg(model, allow_unregistered=True)
    return f"{model}.{cfg.tag}" if cfg and cfg.tag else model
