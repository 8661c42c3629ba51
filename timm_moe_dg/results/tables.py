"""Result tables: one per data set and selection rule, with a row per method and model.

A cell is the mean over trial seeds with its standard error. Missing runs are listed below the table.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, product
from types import MappingProxyType
from typing import Any

import pandas as pd

from ..errors import RecordError
from ..protocols.planner import OFFICIAL, PER_REGION, leave_one_domain_out, leave_one_or_two_domains_out, single_source
from ..protocols.records import Record
from ..protocols.selection import (
    OOD_RULES,
    SELECTION_RULES,
    has_ood_validation,
    reported_accuracy,
    validates_on_test_groups,
)
from .regions import joined_regions, trained_region
from .runs import FinishedRun, RowKey, by_row, domain_names
from .table_columns import (
    AVERAGE,
    Column,
    Value,
    at,
    average,
    group_columns,
    held_out_columns,
    official_columns,
    single_source_columns,
)

SINGLE_SOURCE, VALIDATION = "single_source", "training_domain_validation"
CROSS_VALIDATION = "leave_one_domain_out_cv"
# rule -> held-out domains of the runs that the rule needs
NEEDED: Mapping[str, Callable[[int], list[tuple[int, ...]]]] = MappingProxyType(
    {
        VALIDATION: leave_one_domain_out,
        CROSS_VALIDATION: leave_one_or_two_domains_out,
        "oracle": leave_one_domain_out,
        SINGLE_SOURCE: single_source,
        **dict.fromkeys((OFFICIAL, *OOD_RULES, PER_REGION), lambda num_domains: []),
    }
)
TITLES: Mapping[str, str] = MappingProxyType(
    {
        VALIDATION: "training-domain validation",
        CROSS_VALIDATION: "leave-one-domain-out cross-validation",
        "oracle": "test-domain validation (oracle)",
        "ood_worst_group": "the worst group of the ood validation split",
        "ood_f1_macro": "F1-macro on the ood validation split",
        PER_REGION: "a model per region, each on its own",
    }
)
_ORACLE = " (oracle: the split has held-out groups of the test)"
OFFICIAL_RULES = (OFFICIAL, *OOD_RULES, PER_REGION)  # rules for the data's own test domains
AVERAGES = "averages"  # in place of a data set's name: the table over several data sets
Rows = Mapping[RowKey, Sequence[FinishedRun]]
Selected = dict[tuple[RowKey, int, int], Record]  # by row, held-out domain and trial seed


@dataclass(frozen=True, eq=False)
class Table:
    """One table."""

    dataset: str  # the data set, or `AVERAGES`
    rule: str  # a name in `NEEDED`
    title: str  # data set and rule in words
    columns: Sequence[str]  # titles
    rows: Sequence[RowKey]
    scores: pd.Series  # shares by "row", "column" (position) and trial "seed"; missing runs are left out
    expected: Sequence[int]  # number of trial seeds of each column
    runs: Rows = field(default_factory=dict)  # of each row
    missing: Sequence[str] = ()  # a phrase for each group of missing runs
    trained_on: str | None = None  # the only training domain, in single-source tables
    groups: Sequence[str] = ()  # titles of the columns with accuracies of groups

    def summary(self) -> pd.DataFrame:
        """Returns mean, standard error, seeds and expected seeds of each cell, by row and column (position).

        The error is std(ddof=0) / sqrt(seeds), NaN for fewer than two seeds. A cell with a NaN has a mean of NaN.
        """
        groups = self.scores.groupby(level=["row", "column"])
        seeds = groups.size()
        error = (groups.std(ddof=0) / seeds**0.5).where(seeds > 1)
        frame = pd.DataFrame({"mean": groups.mean(), "error": error}).where(groups.count() == seeds).assign(seeds=seeds)
        cells = pd.MultiIndex.from_product([self.rows, range(len(self.columns))], names=["row", "column"])
        frame = frame.reindex(cells).fillna({"seeds": 0}).astype({"seeds": int})
        return frame.assign(expected=[*self.expected] * len(self.rows))

    def shares(self, row: RowKey) -> pd.Series:
        """Returns the shares of a row, by column (position) and trial seed."""
        return at(self.scores, "row", row)

    def differences(self, first: RowKey, second: RowKey) -> pd.Series:
        """Returns first - second by column (position) and trial seed, where both rows have a share."""
        pair = self.shares(first).align(self.shares(second), join="inner")
        return pair[0] - pair[1]

    def on_other_data(self, first: RowKey, second: RowKey) -> bool:
        """Whether two rows have different data. A fingerprint depends on the metadata columns that a run reads."""
        args = [run.args for row in (first, second) for run in self.runs.get(row, ())[:1]]
        columns = {tuple(each.get("metadata_columns") or ()) for each in args}
        return len({each.get("data") for each in args} - {None}) > 1 and len(columns) == 1


def make_tables(
    runs: Sequence[FinishedRun],
    rules: Sequence[str] = tuple(NEEDED),
    report: Value = reported_accuracy,
    further: Sequence[Column] = (),
    by_group: bool = False,
) -> list[Table]:
    """Makes the tables of all rules and data sets that the runs have results for.

    Args:
        runs: Finished runs on any data sets.
        rules: Names in `NEEDED`.
        report: Value of the selected record in held-out tables. Single-source tables always report out-splits.
        further: Additional columns, such as those of `table_columns.OPTIONAL_COLUMNS`.
        by_group: Whether tables of the data's own test domains show every group.
    """
    by_dataset: dict[str, list[FinishedRun]] = {}
    for run in sorted(runs, key=lambda run: run.dataset):
        if run.test_domains:  # a final model, which was trained on all domains, has no test accuracy
            by_dataset.setdefault(run.dataset, []).append(run)
    rows_by_dataset, tables = {dataset: by_row(members) for dataset, members in by_dataset.items()}, []
    for rule in rules:
        made = []
        for dataset, rows in rows_by_dataset.items():
            if not _applies(rule, by_dataset[dataset]):
                continue
            if rule == SINGLE_SOURCE:
                made += _single_source_tables(dataset, rows, further)
            elif rule in OFFICIAL_RULES:
                made.append(_official_table(dataset, rule, rows, further, by_group))
            else:
                made.append(_held_out_table(dataset, rule, rows, report, further))
        tables += made
        # The papers compare averages over data sets, which only held-out tables have.
        if len(made) > 1 and all(AVERAGE in table.columns for table in made):
            tables.append(_averages(rule, made))
    return tables


def rule_title(rule: str, records: Sequence[Record]) -> str:
    """Describes a rule. The rules for the ood validation split are oracles on some data."""
    return TITLES[rule] + (_ORACLE if rule in OOD_RULES and any(map(validates_on_test_groups, records)) else "")


def why_no_table(rule: str, runs: Sequence[FinishedRun]) -> str:
    """Explains in one line why there is no table of a rule for the runs, at least one."""
    if rule in OOD_RULES:
        with_roles = [run for run in runs if run.records[0].roles] or runs
        try:
            SELECTION_RULES[rule](with_roles[0].records)
        except RecordError as error:
            return str(error)
    return "no run holds out the domains that this rule needs"


def _applies(rule: str, runs: Sequence[FinishedRun]) -> bool:
    """Whether any run has results for a rule."""
    if rule == PER_REGION:
        return any(map(trained_region, runs))
    if rule in OOD_RULES:
        return any(has_ood_validation(record, OOD_RULES[rule]) for run in runs for record in run.records)
    # Data with its own test domains has no held-out table, because its runs hold out all of these at once.
    if rule == OFFICIAL or any(run.records[0].roles for run in runs):
        return rule == OFFICIAL and any(run.records[0].roles and not trained_region(run) for run in runs)
    if rule == SINGLE_SOURCE:
        return any(run.num_domains - len(run.test_domains) == 1 for run in runs)
    return {len(run.test_domains) for run in runs} >= ({1, 2} if rule == CROSS_VALIDATION else {1})


def _held_out_table(dataset: str, rule: str, rows: Rows, report: Value, further: Sequence[Column]) -> Table:
    """A column per held-out domain, each from the runs that hold it out, and their mean."""
    names = _names(rows)
    # Cross-validation also needs the runs that hold out another domain beside the test domain.
    sizes = (1, 2) if rule == CROSS_VALIDATION else (1,)
    selected: Selected = {}
    for domain in range(len(names)):
        of_domain = {
            row: [run for run in runs if domain in run.test_domains and len(run.test_domains) in sizes]
            for row, runs in rows.items()
        }
        selected |= _selected(rule, of_domain, domain)
    columns, title = [*held_out_columns(names, report), *further], f"{dataset}, selection by {TITLES[rule]}"
    missing = _missing(NEEDED[rule](len(names)), rows)
    return _table(dataset, rule, title, columns, selected, rows, num_domains=len(names), missing=missing)


def _selected(rule: str, rows: Rows, domain: int = 0) -> Selected:
    """Applies a rule to the runs of each row and trial seed."""
    select = joined_regions if rule == PER_REGION else lambda runs: SELECTION_RULES[rule](_records(runs))
    selected = {}
    for row, runs in rows.items():
        for seed in {run.seeds[0] for run in runs}:
            # A seed without the runs or scores that the rule needs is left out. The table lists it as missing.
            with suppress(RecordError):
                selected[row, domain, seed] = select([run for run in runs if run.seeds[0] == seed])
    return selected


def _single_source_tables(dataset: str, rows: Rows, further: Sequence[Column]) -> list[Table]:
    """One table per training domain."""
    names, tables = _names(rows), []
    for source, held_out in enumerate(single_source(len(names))):
        of_source = {row: [run for run in runs if run.test_domains == held_out] for row, runs in rows.items()}
        if any(of_source.values()):
            selected, columns = _selected(VALIDATION, of_source), [*single_source_columns(names, source), *further]
            title = f"{dataset}, trained on {names[source]} alone and selected on its out-split, accuracy on out-splits"
            more: dict[str, Any] = {"missing": _missing([held_out], rows), "trained_on": names[source]}
            tables.append(_table(dataset, SINGLE_SOURCE, title, columns, selected, rows, **more))
    return tables


def _official_table(dataset: str, rule: str, rows: Rows, further: Sequence[Column], by_group: bool) -> Table:
    """Scores on the data's own test domains. Every run holds out all of them."""
    regional, seeds = rule == PER_REGION, _trial_seeds(rows)
    # Runs of one region and runs of all regions never share a table.
    of_rule = {row: [run for run in runs if bool(trained_region(run)) == regional] for row, runs in rows.items()}
    rows = {row: runs for row, runs in of_rule.items() if runs}
    selected = _selected(VALIDATION if rule == OFFICIAL else rule, rows)
    records = list(selected.values())
    groups = group_columns(records) if by_group else []
    missing_seeds = {row: [seed for seed in seeds if (row, 0, seed) not in selected] for row in rows}
    also = (
        ", or a region's model" if regional else ", or their scores on the ood validation split" * (rule in OOD_RULES)
    )
    missing = [f"{row}: trial seeds {absent}{also}" for row, absent in missing_seeds.items() if absent]
    selection = rule_title(rule if rule in OOD_RULES else VALIDATION, _records(chain(*rows.values())))
    title = f"{dataset}, its own test domains, {TITLES[rule] if regional else f'selection by {selection}'}"
    more: dict[str, Any] = {"missing": missing, "groups": [column.title for column in groups]}
    columns = [*official_columns(records), *groups, *further]
    return _table(dataset, rule, title, columns, selected, rows, seeds=len(seeds), **more)


def _table(
    dataset: str, rule: str, title: str, columns: Sequence[Column], selected: Selected, rows: Rows,
    *, num_domains: int = 1, seeds: int | None = None, **more: Any,
) -> Table:  # fmt: skip
    """Makes a table of selected records."""
    index = pd.MultiIndex.from_tuples(list(selected), names=["row", "domain", "seed"])
    records = pd.Series(list(selected.values()), index=index, dtype=object)
    scores = _side_by_side([column.scores(records, num_domains) for column in columns])
    expected = [seeds or len(_trial_seeds(rows))] * len(columns)
    return Table(dataset, rule, title, [column.title for column in columns], list(rows), scores, expected, rows, **more)


def _side_by_side(columns: Sequence[pd.Series]) -> pd.Series:
    """Joins columns, each a share by row and trial seed, to the scores of a table."""
    return pd.concat(dict(enumerate(columns)), names=["column"]).swaplevel("column", "row").sort_index()


def _averages(rule: str, tables: Sequence[Table]) -> Table:
    """The average columns of the tables of several data sets side by side."""
    pairs = [(table, table.columns.index(AVERAGE)) for table in tables]
    averages = [at(table.scores, "column", position) for table, position in pairs]
    scores = _side_by_side([*averages, average(pd.concat(averages), len(tables))])
    expected = [table.expected[position] for table, position in pairs]
    title, columns = f"averages of the domains, selection by {TITLES[rule]}", [*(t.dataset for t in tables), AVERAGE]
    rows = sorted({row for table in tables for row in table.rows})
    return Table(AVERAGES, rule, title, columns, rows, scores, [*expected, max(expected)])


def _records(runs: Iterable[FinishedRun]) -> list[Record]:
    return [record for run in runs for record in run.records]


def _names(rows: Rows) -> list[str]:
    return domain_names([run.records[0] for runs in rows.values() for run in runs])


def _trial_seeds(rows: Rows) -> list[int]:
    return sorted({run.seeds[0] for runs in rows.values() for run in runs})


def _missing(needed: Sequence[tuple[int, ...]], rows: Rows) -> list[str]:
    """Names the missing runs, one phrase per row, held-out domains and hyper-parameter seed.

    Domains that no run of the table holds out were not planned.
    """
    begun, phrases = {run.test_domains for runs in rows.values() for run in runs}, []
    for row, runs in rows.items():
        finished = {(run.test_domains, run.seeds) for run in runs}
        for held_out, draw in product(filter(begun.__contains__, needed), sorted({run.seeds[1] for run in runs})):
            if absent := [seed for seed in _trial_seeds(rows) if (held_out, (seed, draw)) not in finished]:
                phrases.append(f"{row}: test domains {list(held_out)}, trial seeds {absent}, hparams seed {draw}")
    return phrases
