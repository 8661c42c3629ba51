"""Tables of results: one per data set and selection rule, a row per method and model, a column per domain.

A cell is the mean over trial seeds with its standard error, the population deviation over the root of their number.
What a table lacks is listed, run by run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import nan, sqrt
from statistics import fmean
from types import MappingProxyType

from ..data import BENCHMARKS
from ..errors import RecordError
from ..protocols.planner import OFFICIAL, leave_one_domain_out, leave_one_domain_out_cv, single_source
from ..protocols.records import Record
from ..protocols.selection import SELECTION_RULES, reported_accuracy, training_domain_validation, transfer_accuracy
from .runs import Row, Run, by_row

SINGLE_SOURCE = "single_source"
OFFICIAL_SCORES = MappingProxyType({"accuracy": "accuracy", "worst_accuracy": "worst group", "f1_macro": "F1-macro"})
# rule -> the runs that it needs, as sets of held-out domains
NEEDED: Mapping[str, Callable[[int], list[tuple[int, ...]]]] = MappingProxyType(
    {
        "training_domain_validation": leave_one_domain_out,
        "leave_one_domain_out_cv": leave_one_domain_out_cv,
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
Accuracy = Callable[[Record], float]
Rows = Mapping[Row, Sequence[Run]]


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        values: Accuracy by trial seed, shares; seeds that it lacks are left out.
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
class Table:
    """One table.

    Attributes:
        dataset: The data set, or `AVERAGES`.
        rule: The selection rule, a name in `NEEDED`.
        title: What it shows.
        columns: Names of the domains, and the average's.
        rows: Cells by row, in the order of the columns.
        runs: The runs of each row.
        missing: Runs that it lacks, one phrase each.
        trained_on: The only training domain, in single-source tables.
    """

    dataset: str
    rule: str
    title: str
    columns: Sequence[str]
    rows: Mapping[Row, Sequence[Cell]]
    runs: Rows = field(default_factory=dict)
    missing: Sequence[str] = ()
    trained_on: str | None = None


def make_tables(
    runs: Sequence[Run], rules: Sequence[str] = tuple(NEEDED), report: Accuracy = reported_accuracy
) -> list[Table]:
    """Makes the tables that runs have something for.

    Args:
        runs: Finished runs of any data sets.
        rules: Names in `NEEDED`.
        report: What is reported of the selected record; single-source tables report out-splits in any case.

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
                made += _single_source_tables(dataset, rows)
            elif rule == OFFICIAL:
                made.append(_official_table(dataset, rows))
            else:
                made.append(_table(dataset, rule, rows, report))
        tables += made
        if len(made) > 1 and rule in SELECTION_RULES:
            tables.append(_averages(rule, made))
    return tables


def _has_something(rule: str, rows: Rows) -> bool:
    """Whether some run shows that a rule is meant to be applied."""
    runs = [run for members in rows.values() for run in members]
    held_out = {len(run.test_domains) for run in runs}
    if rule == OFFICIAL or any(run.records[0].roles for run in runs):
        return rule == OFFICIAL and any(run.records[0].roles for run in runs)
    if rule == SINGLE_SOURCE:
        return any(run.num_domains - len(run.test_domains) == 1 for run in runs)
    return held_out >= ({1, 2} if rule == "leave_one_domain_out_cv" else {1})


def _table(dataset: str, rule: str, rows: Rows, report: Accuracy) -> Table:
    number, seeds = _extent(rows)
    cells = {}
    for row, runs in rows.items():
        domains = []
        for domain in range(number):
            found = {seed: _selected(rule, runs, domain, seed) for seed in seeds}
            values = {seed: report(record) for seed, record in found.items() if record is not None}
            domains.append(Cell(values, len(seeds)))
        cells[row] = [*domains, average(domains)]
    title = f"{dataset}, selection by {TITLES[rule]}"
    columns = [*domain_names(dataset, rows), "average"]
    return Table(dataset, rule, title, columns, cells, rows, _missing(NEEDED[rule](number), rows))


def _selected(rule: str, runs: Sequence[Run], domain: int, trial_seed: int) -> Record | None:
    """What a rule selects for a test domain; None if it lacks runs."""
    sizes = (1, 2) if rule == "leave_one_domain_out_cv" else (1,)
    mine = [run for run in runs if run.seeds[0] == trial_seed and domain in run.test_domains]
    try:
        return SELECTION_RULES[rule](
            [record for run in mine if len(run.test_domains) in sizes for record in run.records]
        )
    except RecordError:
        return None


def _single_source_tables(dataset: str, rows: Rows) -> list[Table]:
    """One table per source: its own out-split, those of the others, and their mean."""
    number, seeds = _extent(rows)
    names = domain_names(dataset, rows)
    tables = []
    for source, held_out in enumerate(single_source(number)):
        cells = {}
        for row, runs in rows.items():
            mine = [run for run in runs if run.test_domains == held_out]
            records = _validated(mine, seeds)
            shown = [
                Cell({seed: record.out_acc[domain] for seed, record in records.items()}, len(seeds))
                for domain in (source, *held_out)
            ]
            ood = Cell({seed: transfer_accuracy(record) for seed, record in records.items()}, len(seeds))
            cells[row] = [*shown, ood]
        title = f"{dataset}, trained on {names[source]} alone and selected on its out-split, accuracy on out-splits"
        columns = [f"{names[source]} (IID)", *(names[domain] for domain in held_out), "average OOD"]
        tables.append(
            Table(dataset, SINGLE_SOURCE, title, columns, cells, rows, _missing([held_out], rows), names[source])
        )
    return tables


def _official_table(dataset: str, rows: Rows) -> Table:
    """Scores over the domains that the data sets apart for "id" and "ood" evaluation; see `role_scores`."""
    _, seeds = _extent(rows)
    chosen = {row: _validated(runs, seeds) for row, runs in rows.items()}
    roles = sorted({role for records in chosen.values() for record in records.values() for role in record.roles})
    cells = {
        row: [
            Cell({seed: record.roles[role][score] for seed, record in records.items()}, len(seeds))
            for role, score in product(roles, OFFICIAL_SCORES)
        ]
        for row, records in chosen.items()
    }
    columns = [f"{role} {name}" for role, name in product(roles, OFFICIAL_SCORES.values())]
    title = f"{dataset}, its own test domains, selection by {TITLES['training_domain_validation']}"
    lacking = [
        f"{row}: trial seeds {sorted(set(seeds) - set(records))}"
        for row, records in chosen.items()
        if set(seeds) - set(records)
    ]
    return Table(dataset, OFFICIAL, title, columns, cells, rows, lacking)


def _validated(runs: Sequence[Run], seeds: Sequence[int]) -> dict[int, Record]:
    """What training-domain validation selects, by trial seed; seeds without a run are left out."""
    records = {seed: [record for run in runs if run.seeds[0] == seed for record in run.records] for seed in seeds}
    return {seed: training_domain_validation(found) for seed, found in records.items() if found}


def _averages(rule: str, tables: Sequence[Table]) -> Table:
    """The average columns of several data sets beside each other."""
    cells = {}
    for row in sorted({row for table in tables for row in table.rows}):
        found = [table.rows[row][-1] if row in table.rows else Cell({}, 0) for table in tables]
        cells[row] = [*found, average(found)]
    columns = [*(table.dataset for table in tables), "average"]
    return Table(AVERAGES, rule, f"averages of the domains, selection by {TITLES[rule]}", columns, cells)


def average(cells: Sequence[Cell]) -> Cell:
    """Averages cells of a row within each trial seed; seeds that a cell lacks are left out."""
    seeds = [seed for seed in cells[0].values if all(seed in cell.values for cell in cells)]
    values = {seed: fmean(cell.values[seed] for cell in cells) for seed in seeds}
    return Cell(values, max(cell.expected for cell in cells))


def domain_names(dataset: str, rows: Rows) -> list[str]:
    """Returns the benchmark's names of its domains, those that the runs agree on, or their positions."""
    number, _ = _extent(rows)
    recorded = {tuple(run.args.get("domains") or ()) for members in rows.values() for run in members}
    known = BENCHMARKS[dataset].domains if dataset in BENCHMARKS else ()
    names = known or (recorded.pop() if len(recorded) == 1 else ())
    return list(names) if len(names) == number else [f"domain {position}" for position in range(number)]


def _extent(rows: Rows) -> tuple[int, list[int]]:
    runs = [run for members in rows.values() for run in members]
    return max(run.num_domains for run in runs), sorted({run.seeds[0] for run in runs})


def _missing(needed: Sequence[tuple[int, ...]], rows: Rows) -> list[str]:
    """Names the runs that are not there, one phrase per row, held-out domains and draw of hyper-parameters."""
    _, trial_seeds = _extent(rows)
    phrases = []
    for row, runs in rows.items():
        there = {(run.test_domains, run.seeds) for run in runs}
        for held_out, draw in product(needed, sorted({run.seeds[1] for run in runs})):
            if lacking := [seed for seed in trial_seeds if (held_out, (seed, draw)) not in there]:
                phrases.append(f"{row}: test domains {list(held_out)}, trial seeds {lacking}, hparams seed {draw}")
    return phrases
