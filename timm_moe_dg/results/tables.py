"""Result tables: one per data set and selection rule, with a row per method and model.

A cell is the mean over trial seeds with its standard error. Missing runs are listed below the table. To add a column,
add a line to `OPTIONAL_COLUMNS`. `tools/collect_results.py --columns NAME` appends it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, product
from math import nan
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd

from ..errors import RecordError
from ..metrics import CLASS_SCORES, METRICS
from ..protocols.planner import OFFICIAL, PER_REGION, leave_one_domain_out, leave_one_or_two_domains_out, single_source
from ..protocols.records import SCORED_ROLES, Record, RoleScores, Score, SplitName
from ..protocols.selection import (
    OOD_RULES,
    SELECTION_RULES,
    has_ood_validation,
    held_out_score,
    rule_title,
    validation_score,
)
from .runs import (
    FinishedRun,
    RowKey,
    by_row,
    domain_names,
    held_out_regions,
    joined_regions,
    scores_by_group,
    trained_region,
)

SINGLE_SOURCE, VALIDATION, CROSS_VALIDATION = "single_source", "training_domain_validation", "leave_one_domain_out_cv"
OFFICIAL_RULES = (OFFICIAL, *OOD_RULES, PER_REGION)  # rules for the data's own test domains
RULES = (VALIDATION, CROSS_VALIDATION, "oracle", SINGLE_SOURCE, *OFFICIAL_RULES)  # in the order of their tables
OFFICIAL_SCORES: Mapping[Score, str] = MappingProxyType(
    {"accuracy": "accuracy", "worst_accuracy": "worst group", "f1_macro": "F1-macro", "balanced_accuracy": "balanced"}
)
AVERAGES = "averages"  # in place of a data set's name: the table over several data sets
AVERAGE = "average"  # title of the column that the table over several data sets shows
AVERAGE_OOD = "average OOD"  # title in single-source tables
Rows = Mapping[RowKey, Sequence[FinishedRun]]


class Column(NamedTuple):
    """One column of a table."""

    title: str
    # Computes a share from a selected record, which tables print in percent; None leaves the record out
    value: Callable[..., float | None]
    has_split: bool = False  # whether the table's part of test domains is a second argument, `split`


OPTIONAL_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "validation": Column("validation", validation_score),
        "out_split": Column("out-split", partial(held_out_score, split="out")),
        **{name: Column(title, partial(held_out_score, metric=name), True) for name, title in CLASS_SCORES.items()},
    }
)


@dataclass(frozen=True, eq=False)
class Table:
    """One table."""

    dataset: str  # the data set, or `AVERAGES`
    rule: str  # a name in `RULES`
    title: str  # data set and rule in words
    columns: Sequence[str]  # titles
    rows: Sequence[RowKey]
    scores: pd.Series  # shares by "row", "column" (position) and trial "seed"; missing runs are left out
    expected: Sequence[int]  # number of trial seeds of each column
    runs: Rows = field(default_factory=dict)  # of each row
    missing: Sequence[str] = ()  # a phrase for each group of missing runs
    trained_on: str | None = None  # the only training domain, in single-source tables

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


def at(scores: pd.Series, level: str, key: object) -> pd.Series:
    """Returns the scores with a key on a level of the index, which may be none."""
    return scores[scores.index.get_level_values(level) == key].droplevel(level)


def average(scores: pd.Series, number: int) -> pd.Series:
    """Averages scores by row and trial seed, where all `number` of them are there. With a NaN, the result is NaN."""
    # Domains of a seed vary together, so the error of an average is that of the averages by seed
    groups = scores.groupby(level=["row", "seed"])
    return groups.mean().where(groups.count() == number)[groups.size() == number]


def side_by_side(columns: Sequence[pd.Series]) -> pd.Series:
    """Joins columns, each a share by row and trial seed, to the scores of a table."""
    return pd.concat(dict(enumerate(columns)), names=["column"]).swaplevel("column", "row").sort_index()


def make_tables(
    runs: Sequence[FinishedRun],
    rules: Sequence[str] = RULES,
    split: SplitName | None = None,
    further: Sequence[Column] = (),
    by_group: bool = False,
) -> list[Table]:
    """Makes the tables of all rules, data sets and metrics that the runs have results for.

    Args:
        runs: Finished runs on any data sets.
        rules: Names in `RULES`.
        split: Part of test domains that held-out tables report, by default `Record.reported_split`, and the in-split
            for "oracle". Single-source tables report out-splits of benchmarks.
        further: Additional columns, such as those of `OPTIONAL_COLUMNS`.
        by_group: Whether tables of the data's own test domains show every group.
    """
    # A final model, which was trained on all domains, has no test accuracy
    with_test = sorted((run for run in runs if run.test_domains), key=_compared)
    data = [by_row(list(members)) for _, members in groupby(with_test, key=_compared)]
    tables: list[Table] = []
    for rule in rules:
        # The oracle selects on the out-split
        part: SplitName | None = split or ("in" if rule == "oracle" else None)
        made: list[Table] = []
        for frame in [frame for frame in data if _applies(rule, list(frame.run))]:
            if rule == SINGLE_SOURCE:
                made += _single_source_tables(frame, further)
            elif rule in OFFICIAL_RULES:
                made += _official_tables(frame, rule, further, by_group)
            else:
                made.append(_held_out_table(frame, rule, part, further))
        tables += made
        # The papers compare averages over data sets, which only held-out tables have.
        for _, alike in groupby(sorted(made, key=_kind_of_score), key=_kind_of_score):
            averaged = list(alike)
            if len(averaged) > 1 and all(AVERAGE in table.columns for table in averaged):
                tables.append(_averages(rule, averaged, part))
    return tables


def _compared(run: FinishedRun) -> tuple[str, str, str]:
    """Runs of one table have the same data set, metric and reported part of test domains."""
    return run.dataset, run.metric, run.records[0].reported_split


def _kind_of_score(table: Table) -> tuple[str, ...]:
    return _compared(next(iter(table.runs.values()))[0])[1:]


def is_tabled(run: FinishedRun, tables: Sequence[Table]) -> bool:
    """Whether a table of all rules counts a run. Pairs of held-out domains count in cross-validation."""
    is_validated = any(table.rule == CROSS_VALIDATION and table.dataset == run.dataset for table in tables)
    return (is_validated and len(run.test_domains) == 2) or any(_applies(rule, [run]) for rule in RULES)


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
        return any(len(run.records[0].training_domains) == 1 for run in runs)
    return {len(run.test_domains) for run in runs} >= ({1, 2} if rule == CROSS_VALIDATION else {1})


def _held_out_table(runs: pd.DataFrame, rule: str, split: SplitName | None, further: Sequence[Column]) -> Table:
    """A column per held-out domain, each from the runs that hold it out, and their mean."""
    names = domain_names([run.records[0] for run in runs.run])
    needed = leave_one_or_two_domains_out(len(names)) if rule == CROSS_VALIDATION else leave_one_domain_out(len(names))
    held_out = runs[runs.test_domains.isin(needed)]
    selected = _selected(rule, held_out.assign(domain=held_out.test_domains).explode("domain"))
    values = selected.map(partial(held_out_score, split=split)).astype(float)
    # A sweep may hold out some of the domains alone
    begun = sorted({domain for domains in held_out.test_domains if len(domains) == 1 for domain in domains})
    average_title = AVERAGE if len(begun) == len(names) else f"{AVERAGE} of {len(begun)} of {len(names)} domains"
    shares = [(names[domain], at(values, "domain", domain)) for domain in begun]
    columns = [Column(average_title, held_out_score, True), *further]
    shares += _averaged(columns, selected, len(begun), split)
    return _table(held_out, rule, f"selection by {rule_title(rule)}", shares, _missing(needed, held_out), split)


def _single_source_tables(runs: pd.DataFrame, further: Sequence[Column]) -> list[Table]:
    """One table per training domain."""
    names, tables = domain_names([run.records[0] for run in runs.run]), []
    needed = single_source(len(names))
    runs = runs[runs.test_domains.isin(needed)]
    for source, held_out in enumerate(needed):
        of_source = runs[runs.test_domains.isin([held_out])]
        if len(of_source):
            titles = {source: f"{names[source]} (IID)", **{domain: names[domain] for domain in held_out}}
            split: SplitName = "whole" if of_source.run.iloc[0].records[0].reported_split == "whole" else "out"
            columns = [Column(title, partial(_transfer, domain)) for domain, title in titles.items()]
            columns += [Column(AVERAGE_OOD, held_out_score, True), *further]
            title = f"trained on {names[source]} alone and selected on its out-split"
            title += "" if split == "whole" else ", scores on out-splits"
            shares = _averaged(columns, _selected(VALIDATION, of_source.assign(domain=source)), split=split)
            table = _table(runs, SINGLE_SOURCE, title, shares, _missing([held_out], runs))
            tables.append(replace(table, trained_on=names[source]))
    return tables


def _official_tables(runs: pd.DataFrame, rule: str, further: Sequence[Column], by_group: bool) -> list[Table]:
    """Scores on the data's own test domains, one table for runs that hold out as many regions besides."""
    regional = rule == PER_REGION
    # Runs of one region and runs of all regions never share a table.
    runs = runs[[bool(trained_region(run)) == regional for run in runs.run]]
    held_out = [[] if regional else held_out_regions(run) for run in runs.run]
    numbers = pd.Series(list(map(len, held_out)), runs.index)
    runs = runs.assign(domain=list(map(", ".join, held_out)))
    return [_official_table(members, rule, further, by_group) for _, members in runs.groupby(numbers)]


def _official_table(runs: pd.DataFrame, rule: str, further: Sequence[Column], by_group: bool) -> Table:
    """A table of runs that hold out the same number of regions: the mean over all "domains" that are held out."""
    regional, seeds, held_out = rule == PER_REGION, sorted(set(runs.seed)), sorted(set(runs.domain))
    selected = _selected(VALIDATION if rule == OFFICIAL else rule, runs)
    columns = _official_columns(selected, by_group)
    also = ", or their scores on the ood validation split" if rule in OOD_RULES else ", or a region's model" * regional
    absent = {
        (row, domain): [seed for seed in seeds if (row, domain, seed) not in selected]
        for row, domain in product(runs.row.unique(), held_out)
    }
    missing = [
        f"{row}: {f'held out {domain}, ' if domain else ''}trial seeds {without}{also}"
        for (row, domain), without in absent.items()
        if without
    ]
    evaluations = (record for run in runs.run for record in run.records)
    selection = f"selection by {rule_title(rule if rule in OOD_RULES else VALIDATION, evaluations)}"
    title = f"its own test domains, {'a model per region, each on its own' if regional else selection}"
    title += f", held out in turn: {'; '.join(held_out)}" if any(held_out) else ""
    shares = _averaged([*columns, *further], selected, len(held_out))
    return _table(runs, rule, title, shares, missing)


def _official_columns(records: Iterable[Record], by_group: bool) -> list[Column]:
    """Columns with the scores of a data set's own "id" and "ood" test domains and their groups."""
    columns: list[Column] = []
    for role, (score, title) in product(SCORED_ROLES, OFFICIAL_SCORES.items()):
        if any(score in record.roles.get(role, {}) for record in records):
            columns.append(Column(f"{role} {title}", partial(_role_score, role, score)))
    for role in SCORED_ROLES if by_group else ():
        groups = sorted({group for record in records for group in scores_by_group(record, role, "accuracy")})
        columns += [Column(f"{role} {group}", partial(_group_accuracy, role, group)) for group in groups]
    return columns


def _transfer(domain: int, record: Record) -> float:
    is_whole = record.reported_split == "whole" and domain in record.test_domains
    return record.scores_on("whole" if is_whole else "out")[domain]


def _role_score(role: str, score: Score, record: Record) -> float:
    return record.roles.get(role, RoleScores()).get(score, nan)


def _group_accuracy(role: str, group: str, record: Record) -> float | None:
    return scores_by_group(record, role, record.metric).get(group)


def _selected(rule: str, runs: pd.DataFrame) -> pd.Series:
    """Applies a rule to the runs of each row, "domain" and trial seed, and returns records by these three."""
    selected = {}
    for key, members in runs.groupby(["row", "domain", "seed"], sort=False).run:
        # A seed without the runs or scores that the rule needs is left out. The table lists it as missing.
        with suppress(RecordError):
            records = [record for run in members for record in run.records]
            selected[key] = joined_regions(list(members)) if rule == PER_REGION else SELECTION_RULES[rule](records)
    index = pd.MultiIndex.from_tuples(list(selected), names=["row", "domain", "seed"])
    return pd.Series(list(selected.values()), index=index, dtype=object)


def _averaged(
    columns: Sequence[Column], selected: pd.Series, number: int = 1, split: SplitName | None = None
) -> list[tuple[str, pd.Series]]:
    """Titles and shares of columns, each a mean over held-out domains."""
    shares = []
    for title, value, has_split in columns:
        part = {"split": split} if has_split else {}
        values = pd.Series([value(record, **part) for record in selected], selected.index, dtype=object)
        # A region is "ood" in the runs that hold it out, and "id" in the others
        absent = values.map(lambda share: share is None).astype(bool)
        without = values[absent].index.get_level_values("domain").nunique()
        shares.append((title, average(values[~absent].astype(float), number - without)))
    return shares


def _table(
    runs: pd.DataFrame,
    rule: str,
    title: str,
    columns: Sequence[tuple[str, pd.Series]],
    missing: Sequence[str],
    split: SplitName | None = None,
) -> Table:
    """Makes a table of columns: their titles, and their shares by row and trial seed."""
    titles, scores = [title for title, _ in columns], side_by_side([shares for _, shares in columns])
    rows: Rows = runs.groupby("row", sort=False).run.agg(list).to_dict()
    first, expected = next(iter(runs.run)), [runs.seed.nunique()] * len(columns)
    title = f"{first.dataset}, {_kind_in_title(first, split)}{title}"
    return Table(first.dataset, rule, title, titles, list(rows), scores, expected, rows, missing)


def _kind_in_title(run: FinishedRun, split: SplitName | None) -> str:
    """Names the metric and the part of test domains, unless they are the usual ones."""
    metric = "" if run.metric == "accuracy" else f"{METRICS[run.metric]}, "
    return f"{metric}{'whole domains, ' if (split or run.records[0].reported_split) == 'whole' else ''}"


def _averages(rule: str, tables: Sequence[Table], split: SplitName | None) -> Table:
    """The average columns of the tables of several data sets side by side."""
    pairs = [(table, table.columns.index(AVERAGE)) for table in tables]
    averages = [at(table.scores, "column", position) for table, position in pairs]
    scores = side_by_side([*averages, average(pd.concat(averages), len(tables))])
    expected = [table.expected[position] for table, position in pairs]
    kind = _kind_in_title(next(iter(tables[0].runs.values()))[0], split)
    title = f"averages of the domains, {kind}selection by {rule_title(rule)}"
    columns = [table.dataset for table in tables]
    rows = sorted({row for table in tables for row in table.rows})
    return Table(AVERAGES, rule, title, [*columns, AVERAGE], rows, scores, [*expected, max(expected)])


def _missing(needed: Sequence[tuple[int, ...]], runs: pd.DataFrame) -> list[str]:
    """Names the missing runs, one phrase per row, held-out domains and hyper-parameter seed.

    Domains that no run of the table holds out were not planned.
    """
    begun, seeds, phrases = set(runs.test_domains), sorted(set(runs.seed)), []
    for row, of_row in runs.groupby("row", sort=False):
        finished = set(zip(of_row.test_domains, of_row.draw, of_row.seed, strict=True))
        for held_out, draw in product(filter(begun.__contains__, needed), sorted(set(of_row.draw))):
            if absent := [seed for seed in seeds if (held_out, draw, seed) not in finished]:
                phrases.append(f"{row}: test domains {list(held_out)}, trial seeds {absent}, hparams seed {draw}")
    return phrases
