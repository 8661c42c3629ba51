"""Columns of result tables: a title, and a function from a selected record to a number.

To add a column, add a line to `OPTIONAL_COLUMNS`. `tools/collect_results.py --columns NAME` appends it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import nan
from types import MappingProxyType

import pandas as pd

from ..protocols.records import SCORED_ROLES, Record, RoleScores, Score
from ..protocols.selection import transfer_accuracy, validation_accuracy

AVERAGE_OOD = "average OOD"  # title in single-source tables
AVERAGE = "average"  # title of the column that the table over several data sets shows
OFFICIAL_SCORES: Mapping[Score, str] = MappingProxyType(
    {"accuracy": "accuracy", "worst_accuracy": "worst group", "f1_macro": "F1-macro"}
)
Value = Callable[[Record], float]


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    value: Value  # computes a share, which tables print in percent
    domain: int | None = None  # position of the held-out domain, None for the mean over all of them

    def scores(self, selected: pd.Series, num_domains: int) -> pd.Series:
        """Computes shares by row and trial seed, from records by row, held-out domain and trial seed."""
        values = selected.map(self.value).astype(float)
        if self.domain is None:
            return average(values, num_domains)
        return at(values, "domain", self.domain)


def at(scores: pd.Series, level: str, key: object) -> pd.Series:
    """Returns the scores with a key on a level of the index, which may be none."""
    return scores[scores.index.get_level_values(level) == key].droplevel(level)


def average(scores: pd.Series, number: int) -> pd.Series:
    """Averages scores by row and trial seed, where all `number` of them are there. With a NaN, the result is NaN."""
    # Domains of a seed vary together, so the error of an average is that of the averages by seed
    groups = scores.groupby(level=["row", "seed"])
    return groups.mean().where(groups.count() == number)[groups.size() == number]


def held_out_columns(names: Sequence[str], report: Value) -> list[Column]:
    """Columns of a held-out table: the reported value of each domain, and the mean over the domains."""
    return [*(Column(name, report, domain) for domain, name in enumerate(names)), Column(AVERAGE, report)]


def single_source_columns(names: Sequence[str], source: int) -> list[Column]:
    """Columns of a single-source table: out-split accuracy of the training domain, of the others, and their mean."""
    others = [Column(name, _out_accuracy(domain)) for domain, name in enumerate(names) if domain != source]
    return [Column(f"{names[source]} (IID)", _out_accuracy(source)), *others, Column(AVERAGE_OOD, transfer_accuracy)]


def official_columns(records: Sequence[Record]) -> list[Column]:
    """Columns with the scores of a data set's own "id" and "ood" test domains, see `role_scores`."""
    return [
        Column(f"{role} {title}", _role_score(role, score))
        for role, (score, title) in product(SCORED_ROLES, OFFICIAL_SCORES.items())
        if any(score in record.roles.get(role, {}) for record in records)
    ]


def group_columns(records: Sequence[Record]) -> list[Column]:
    """Columns with the accuracy of each group of the "id" and "ood" test domains, by role and then by name."""
    groups = {(role, group) for role in SCORED_ROLES for record in records for group in _by_group(record, role)}
    return [Column(f"{role} {group}", _group_accuracy(role, group)) for role, group in sorted(groups)]


def _out_accuracy(domain: int) -> Value:
    return lambda record: record.out_acc[domain]


def _role_score(role: str, score: Score) -> Value:
    return lambda record: record.roles[role][score]


def _group_accuracy(role: str, group: str) -> Value:
    return lambda record: _by_group(record, role).get(group, nan)


def _by_group(record: Record, role: str) -> Mapping[str, float]:
    return record.roles.get(role, RoleScores()).get("group_accuracy", {})


OPTIONAL_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "validation": Column("validation", validation_accuracy),
        "out_split": Column("out-split", transfer_accuracy),
    }
)
