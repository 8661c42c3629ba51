"""Columns of result tables: a title, and a function from a selected record to a number.

To add a column, add a line to `OPTIONAL_COLUMNS`. `tools/collect_results.py --columns NAME` appends it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import nan, sqrt
from statistics import fmean
from types import MappingProxyType

from ..protocols.records import SCORED_ROLES, Record, RoleScores, Score
from ..protocols.selection import transfer_accuracy, validation_accuracy

AVERAGE_OOD = "average OOD"  # title in single-source tables
AVERAGE = "average"  # title of the column that the table over several data sets shows
OFFICIAL_SCORES: Mapping[Score, str] = MappingProxyType(
    {"accuracy": "accuracy", "worst_accuracy": "worst group", "f1_macro": "F1-macro"}
)
Value = Callable[[Record], float]
Selected = Mapping[int, Mapping[int, Record]]  # held-out domain -> trial seed -> selected record


@dataclass(frozen=True)
class Cell:
    """One number of a table: a share for each trial seed. Missing seeds are left out."""

    values: Mapping[int, float]
    expected: int  # number of trial seeds of the whole table

    @property
    def mean(self) -> float:
        """Mean over the trial seeds, NaN without any."""
        return fmean(self.values.values()) if self.values else nan

    @property
    def error(self) -> float:
        """Standard error of the mean, std(ddof=0) / sqrt(n), NaN for fewer than two seeds."""
        number = len(self.values)
        return sqrt(fmean((value - self.mean) ** 2 for value in self.values.values()) / number) if number > 1 else nan


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    value: Value  # computes a share, which tables print in percent
    domain: int | None = None  # position of the held-out domain, None for the mean over all of them

    def cell(self, selected: Selected, expected: int) -> Cell:
        """Computes the cell of a row from its selected records."""
        domains = selected if self.domain is None else [self.domain]
        values = [{seed: self.value(record) for seed, record in selected[domain].items()} for domain in domains]
        return average([Cell(by_seed, expected) for by_seed in values])


def paired_differences(first: Cell, second: Cell) -> dict[int, float]:
    """Returns first - second by trial seed, for the seeds of both cells."""
    return {seed: value - second.values[seed] for seed, value in first.values.items() if seed in second.values}


def average(cells: Sequence[Cell]) -> Cell:
    """Averages the cells of a row within each trial seed, for the seeds of all cells."""
    # Domains of a seed vary together, so the error of an average is that of the averages by seed.
    seeds = [seed for seed in cells[0].values if all(seed in cell.values for cell in cells)]
    values = {seed: fmean(cell.values[seed] for cell in cells) for seed in seeds}
    return Cell(values, max(cell.expected for cell in cells))


def held_out_columns(names: Sequence[str], report: Value) -> list[Column]:
    """Columns of a held-out table: the reported value of each domain, and the mean over the domains."""
    return [*(Column(name, report, domain) for domain, name in enumerate(names)), Column(AVERAGE, report)]


def single_source_columns(names: Sequence[str], source: int) -> list[Column]:
    """Columns of a single-source table: out-split accuracy of the training domain, of the others, and their mean."""
    others = [domain for domain in range(len(names)) if domain != source]
    return [
        Column(f"{names[source]} (IID)", _out_accuracy(source)),
        *(Column(names[domain], _out_accuracy(domain)) for domain in others),
        Column(AVERAGE_OOD, transfer_accuracy),
    ]


def official_columns(records: Sequence[Record]) -> list[Column]:
    """Columns with the scores of a data set's own "id" and "ood" test domains, see `role_scores`."""
    return [
        Column(f"{role} {title}", _role_score(role, score))
        for role, (score, title) in product(SCORED_ROLES, OFFICIAL_SCORES.items())
        if any(score in record.roles.get(role, {}) for record in records)
    ]


def group_columns(records: Sequence[Record]) -> list[Column]:
    """Columns with the accuracy of each group of the "id" and "ood" test domains, by role and then by name."""
    groups = {
        (role, group)
        for record in records
        for role in SCORED_ROLES
        for group in record.roles.get(role, RoleScores()).get("group_accuracy", ())
    }
    return [Column(f"{role} {group}", _group_accuracy(role, group)) for role, group in sorted(groups)]


def _out_accuracy(domain: int) -> Value:
    return lambda record: record.out_acc[domain]


def _role_score(role: str, score: Score) -> Value:
    return lambda record: record.roles[role][score]


def _group_accuracy(role: str, group: str) -> Value:
    return lambda record: record.roles.get(role, RoleScores()).get("group_accuracy", {}).get(group, nan)


OPTIONAL_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "validation": Column("validation", validation_accuracy),
        "out_split": Column("out-split", transfer_accuracy),
    }
)
