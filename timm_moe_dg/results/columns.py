"""Columns of tables: what each shows of the records that were selected for a row.

A column is a title and a value of a record, and every format, the comparison and the plot follow. A new one is a line
of `OPTIONAL_COLUMNS`; `tools/collect_results.py --columns NAME` puts it behind the table's own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import nan, sqrt
from statistics import fmean
from types import MappingProxyType

from ..protocols.records import SCORED_ROLES, Record, RoleScores, Score
from ..protocols.selection import transfer_accuracy, validation_accuracy

AVERAGE_OOD = "average OOD"  # of single-source tables
AVERAGE = "average"  # title of the column that tables of several data sets are made of
OFFICIAL_SCORES: Mapping[Score, str] = MappingProxyType(
    {"accuracy": "accuracy", "worst_accuracy": "worst group", "f1_macro": "F1-macro"}
)
Value = Callable[[Record], float]
Selected = Mapping[int, Mapping[int, Record]]  # held-out domain -> trial seed -> the record that a rule selects


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        values: Value by trial seed, shares; seeds that it lacks are left out.
        expected: Number of trial seeds of the whole table.
    """

    values: Mapping[int, float]
    expected: int

    @property
    def mean(self) -> float:
        """Mean over the trial seeds; NaN if there are none."""
        return fmean(self.values.values()) if self.values else nan

    @property
    def error(self) -> float:
        """Standard error of the mean, std(ddof=0) / sqrt(n); NaN for less than two seeds."""
        number = len(self.values)
        return sqrt(fmean((value - self.mean) ** 2 for value in self.values.values()) / number) if number > 1 else nan


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: Its header.
        value: What it shows of a selected record: a share, which tables print in percent.
        domain: Position of the held-out domain whose records it shows; None for the mean over all of them.
    """

    title: str
    value: Value
    domain: int | None = None

    def cell(self, selected: Selected, expected: int) -> Cell:
        """Makes the cell of a row.

        Args:
            selected: The row's records.
            expected: Number of trial seeds of the whole table.
        """
        domains = selected if self.domain is None else [self.domain]
        values = [{seed: self.value(record) for seed, record in selected[domain].items()} for domain in domains]
        return average([Cell(by_seed, expected) for by_seed in values])


def paired_differences(first: Cell, second: Cell) -> dict[int, float]:
    """Returns the difference of two cells by trial seed, over the seeds that both have."""
    return {seed: value - second.values[seed] for seed, value in first.values.items() if seed in second.values}


def average(cells: Sequence[Cell]) -> Cell:
    """Averages cells of a row within each trial seed; seeds that a cell lacks are left out."""
    seeds = [seed for seed in cells[0].values if all(seed in cell.values for cell in cells)]
    values = {seed: fmean(cell.values[seed] for cell in cells) for seed in seeds}
    return Cell(values, max(cell.expected for cell in cells))


def held_out_columns(names: Sequence[str], report: Value) -> list[Column]:
    """What is reported of each held-out domain, and its mean over them."""
    return [*(Column(name, report, domain) for domain, name in enumerate(names)), Column(AVERAGE, report)]


def single_source_columns(names: Sequence[str], source: int) -> list[Column]:
    """Accuracies on out-splits: the only training domain's, those of the others, and their mean."""
    others = [domain for domain in range(len(names)) if domain != source]
    return [
        Column(f"{names[source]} (IID)", _out_accuracy(source)),
        *(Column(names[domain], _out_accuracy(domain)) for domain in others),
        Column(AVERAGE_OOD, transfer_accuracy),
    ]


def official_columns(records: Sequence[Record]) -> list[Column]:
    """Scores over the domains that the data sets apart for "id" and "ood" evaluation; see `role_scores`."""
    return [
        Column(f"{role} {title}", _role_score(role, score))
        for role, (score, title) in product(SCORED_ROLES, OFFICIAL_SCORES.items())
        if any(score in record.roles.get(role, {}) for record in records)
    ]


def group_columns(records: Sequence[Record]) -> list[Column]:
    """Accuracies of the groups that these are scores over, by role and then by name."""
    found = {
        (role, group)
        for record in records
        for role in SCORED_ROLES
        for group in record.roles.get(role, RoleScores()).get("group_accuracy", ())
    }
    return [Column(f"{role} {group}", _group_accuracy(role, group)) for role, group in sorted(found)]


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
