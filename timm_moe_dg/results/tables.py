"""Tables of results: one per data set and selection rule, a row per method and model, columns of `columns.py`.

A cell is the mean over trial seeds with its standard error, the population deviation over the root of their number.
What a table lacks is listed, run by run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType

from ..errors import RecordError
from ..protocols.planner import OFFICIAL, leave_one_domain_out, leave_one_or_two_domains_out, single_source
from ..protocols.records import Record
from ..protocols.selection import SELECTION_RULES, reported_accuracy, training_domain_validation
from .columns import (
    AVERAGE,
    Cell,
    Column,
    Selected,
    Value,
    average,
    held_out_columns,
    official_columns,
    single_source_columns,
)
from .runs import FinishedRun, RowKey, by_row, domain_names

SINGLE_SOURCE = "single_source"
# rule -> the runs that it needs, as sets of held-out domains
NEEDED: Mapping[str, Callable[[int], list[tuple[int, ...]]]] = MappingProxyType(
    {
        "training_domain_validation": leave_one_domain_out,
        "leave_one_domain_out_cv": leave_one_or_two_domains_out,
        "oracle": leave_one_domain_out,
        SINGLE_SOURCE: single_source,
        OFFICIAL: lambda num_domains: [],
    }
)
TITLES: Mapping[str, str] = MappingProxyType(
    {
        "training_domain_validation": "training-domain validation",
        "leave_one_domain_out_cv": "leave-one-domain-out cross-validation",
        "oracle": "test-domain validation (oracle)",
        SINGLE_SOURCE: "single source",
        OFFICIAL: "the data's own test domains",
    }
)
AVERAGES = "averages"  # stands for the data set where several are averaged
Rows = Mapping[RowKey, Sequence[FinishedRun]]


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        dataset: The data set, or `AVERAGES`.
        rule: The selection rule, a name in `NEEDED`.
        title: What it shows.
        columns: Titles of the columns.
        rows: Cells by row, in the order of the columns.
        runs: The runs of each row.
        missing: Runs that it lacks, one phrase each.
        trained_on: The only training domain, in single-source tables.
    """

    dataset: str
    rule: str
    title: str
    columns: Sequence[str]
    rows: Mapping[RowKey, Sequence[Cell]]
    runs: Rows = field(default_factory=dict)
    missing: Sequence[str] = ()
    trained_on: str | None = None


def make_tables(
    runs: Sequence[FinishedRun],
    rules: Sequence[str] = tuple(NEEDED),
    report: Value = reported_accuracy,
    further: Sequence[Column] = (),
) -> list[Table]:
    """Makes the tables that runs have something for.

    Args:
        runs: Finished runs of any data sets.
        rules: Names in `NEEDED`.
        report: What is reported of the selected record; single-source tables report out-splits in any case.
        further: Columns behind a table's own, such as those of `columns.OPTIONAL_COLUMNS`.

    Raises:
        RecordError: Two runs are of the same row, held-out domains and seeds.
    """
    rows_of = {
        dataset: by_row([run for run in runs if run.dataset == dataset])
        for dataset in sorted({run.dataset for run in runs})
    }
    tables = []
    for rule in rules:
        made = []
        for dataset, rows in rows_of.items():
            if not _has_something(rule, rows):
                continue
            if rule == SINGLE_SOURCE:
                made += _single_source_tables(dataset, rows, further)
            elif rule == OFFICIAL:
                made.append(_official_table(dataset, rows, further))
            else:
                made.append(_held_out_table(dataset, rule, rows, report, further))
        tables += made
        if len(made) > 1 and rule in SELECTION_RULES:
            tables.append(_averages(rule, made))
    return tables


def _has_something(rule: str, rows: Rows) -> bool:
    """Whether some run shows that a rule is meant to be applied."""
    runs = _runs(rows)
    held_out = {len(run.test_domains) for run in runs}
    if rule == OFFICIAL or any(run.records[0].roles for run in runs):
        return rule == OFFICIAL and any(run.records[0].roles for run in runs)
    if rule == SINGLE_SOURCE:
        return any(run.num_domains - len(run.test_domains) == 1 for run in runs)
    return held_out >= ({1, 2} if rule == "leave_one_domain_out_cv" else {1})


def _held_out_table(dataset: str, rule: str, rows: Rows, report: Value, further: Sequence[Column]) -> Table:
    """A column per held-out domain, each of its own runs, and their mean."""
    names, seeds = domain_names(_firsts(rows)), _trial_seeds(rows)
    selected = {
        row: {domain: _selected(rule, runs, domain, seeds) for domain in range(len(names))}
        for row, runs in rows.items()
    }
    columns = [*held_out_columns(names, report), *further]
    title = f"{dataset}, selection by {TITLES[rule]}"
    missing = _missing(NEEDED[rule](len(names)), rows)
    return Table(dataset, rule, title, _titles(columns), _cells(columns, selected, seeds), rows, missing)


def _selected(rule: str, runs: Sequence[FinishedRun], domain: int, seeds: Sequence[int]) -> dict[int, Record]:
    """What a rule selects for a test domain, by trial seed; seeds that lack runs are left out."""
    sizes = (1, 2) if rule == "leave_one_domain_out_cv" else (1,)
    found = {}
    for seed in seeds:
        mine = [run for run in runs if run.seeds[0] == seed and domain in run.test_domains]
        records = [record for run in mine if len(run.test_domains) in sizes for record in run.records]
        with suppress(RecordError):
            found[seed] = SELECTION_RULES[rule](records)
    return found


def _single_source_tables(dataset: str, rows: Rows, further: Sequence[Column]) -> list[Table]:
    """One table per source."""
    names, seeds = domain_names(_firsts(rows)), _trial_seeds(rows)
    tables = []
    for source, held_out in enumerate(single_source(len(names))):
        of_source = {row: [run for run in runs if run.test_domains == held_out] for row, runs in rows.items()}
        selected = {row: {source: _validated(runs, seeds)} for row, runs in of_source.items()}
        columns = [*single_source_columns(names, source), *further]
        title = f"{dataset}, trained on {names[source]} alone and selected on its out-split, accuracy on out-splits"
        cells, missing = _cells(columns, selected, seeds), _missing([held_out], rows)
        tables.append(
            Table(dataset, SINGLE_SOURCE, title, _titles(columns), cells, rows, missing, trained_on=names[source])
        )
    return tables


def _official_table(dataset: str, rows: Rows, further: Sequence[Column]) -> Table:
    """Scores on the data's own test domains, which all runs hold out together."""
    seeds = _trial_seeds(rows)
    chosen = {row: _validated(runs, seeds) for row, runs in rows.items()}
    roles = sorted({role for records in chosen.values() for record in records.values() for role in record.roles})
    columns = [*official_columns(roles), *further]
    cells = _cells(columns, {row: {0: records} for row, records in chosen.items()}, seeds)
    title = f"{dataset}, its own test domains, selection by {TITLES['training_domain_validation']}"
    lacking = {row: sorted(set(seeds) - set(records)) for row, records in chosen.items()}
    missing = [f"{row}: trial seeds {absent}" for row, absent in lacking.items() if absent]
    return Table(dataset, OFFICIAL, title, _titles(columns), cells, rows, missing)


def _validated(runs: Sequence[FinishedRun], seeds: Sequence[int]) -> dict[int, Record]:
    """What training-domain validation selects, by trial seed; seeds without a run are left out."""
    records = {seed: [record for run in runs if run.seeds[0] == seed for record in run.records] for seed in seeds}
    return {seed: training_domain_validation(found) for seed, found in records.items() if found}


def _averages(rule: str, tables: Sequence[Table]) -> Table:
    """The average columns of several data sets beside each other."""
    cells = {}
    for row in sorted({row for table in tables for row in table.rows}):
        found = [
            table.rows[row][table.columns.index(AVERAGE)] if row in table.rows else Cell({}, 0) for table in tables
        ]
        cells[row] = [*found, average(found)]
    columns = [*(table.dataset for table in tables), AVERAGE]
    return Table(AVERAGES, rule, f"averages of the domains, selection by {TITLES[rule]}", columns, cells)


def _titles(columns: Sequence[Column]) -> list[str]:
    return [column.title for column in columns]


def _cells(
    columns: Sequence[Column], selected: Mapping[RowKey, Selected], seeds: Sequence[int]
) -> dict[RowKey, list[Cell]]:
    return {row: [column.cell(records, len(seeds)) for column in columns] for row, records in selected.items()}


def _runs(rows: Rows) -> list[FinishedRun]:
    return [run for members in rows.values() for run in members]


def _firsts(rows: Rows) -> list[Record]:
    return [run.records[0] for run in _runs(rows)]


def _trial_seeds(rows: Rows) -> list[int]:
    return sorted({run.seeds[0] for run in _runs(rows)})


def _missing(needed: Sequence[tuple[int, ...]], rows: Rows) -> list[str]:
    """Names the runs that are not there, one phrase per row, held-out domains and draw of hyper-parameters."""
    trial_seeds = _trial_seeds(rows)
    phrases = []
    for row, runs in rows.items():
        there = {(run.test_domains, run.seeds) for run in runs}
        for held_out, draw in product(needed, sorted({run.seeds[1] for run in runs})):
            if lacking := [seed for seed in trial_seeds if (held_out, (seed, draw)) not in there]:
                phrases.append(f"{row}: test domains {list(held_out)}, trial seeds {lacking}, hparams seed {draw}")
    return phrases
