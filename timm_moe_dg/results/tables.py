"""Result tables: one per data set and selection rule, with a row per method and model.

A cell is the mean over trial seeds with its standard error. Missing runs are listed below the table.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType

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
    Cell,
    Column,
    Selected,
    Value,
    average,
    group_columns,
    held_out_columns,
    official_columns,
    single_source_columns,
)

SINGLE_SOURCE = "single_source"
VALIDATION = "training_domain_validation"
# rule -> held-out domains of the runs that the rule needs
NEEDED: Mapping[str, Callable[[int], list[tuple[int, ...]]]] = MappingProxyType(
    {
        "training_domain_validation": leave_one_domain_out,
        "leave_one_domain_out_cv": leave_one_or_two_domains_out,
        "oracle": leave_one_domain_out,
        SINGLE_SOURCE: single_source,
        OFFICIAL: lambda num_domains: [],
        **dict.fromkeys((*OOD_RULES, PER_REGION), lambda num_domains: []),
    }
)
TITLES: Mapping[str, str] = MappingProxyType(
    {
        "training_domain_validation": "training-domain validation",
        "leave_one_domain_out_cv": "leave-one-domain-out cross-validation",
        "oracle": "test-domain validation (oracle)",
        SINGLE_SOURCE: "single source",
        OFFICIAL: "the data's own test domains",
        "ood_worst_group": "the worst group of the ood validation split",
        "ood_f1_macro": "F1-macro on the ood validation split",
        PER_REGION: "a model per region, each on its own",
    }
)
_ALSO_MISSING = {
    PER_REGION: ", or a region's model",
    **dict.fromkeys(OOD_RULES, ", or their scores on the ood validation split"),
}
_ORACLE = " (oracle: the split has held-out groups of the test)"
OFFICIAL_RULES = (OFFICIAL, *OOD_RULES, PER_REGION)  # rules for the data's own test domains
AVERAGES = "averages"  # in place of a data set's name: the table over several data sets
Rows = Mapping[RowKey, Sequence[FinishedRun]]


@dataclass(frozen=True)
class Table:
    """One table."""

    dataset: str  # the data set, or `AVERAGES`
    rule: str  # a name in `NEEDED`
    title: str  # data set and rule in words
    columns: Sequence[str]  # titles
    rows: Mapping[RowKey, Sequence[Cell]]  # cells in the order of the columns
    runs: Rows = field(default_factory=dict)  # of each row
    missing: Sequence[str] = ()  # a phrase for each group of missing runs
    trained_on: str | None = None  # the only training domain, in single-source tables
    groups: Sequence[str] = ()  # titles of the columns with accuracies of groups

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
    # A final model, which was trained on all domains, has no test accuracy.
    runs = [run for run in runs if run.test_domains]
    rows_by_dataset = {
        dataset: by_row([run for run in runs if run.dataset == dataset])
        for dataset in sorted({run.dataset for run in runs})
    }
    tables = []
    for rule in rules:
        made = []
        for dataset, rows in rows_by_dataset.items():
            if not _applies(rule, rows):
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


def _applies(rule: str, rows: Rows) -> bool:
    """Whether any run has results for a rule."""
    runs = _runs(rows)
    held_out = {len(run.test_domains) for run in runs}
    if rule == PER_REGION:
        return any(map(trained_region, runs))
    if rule in OOD_RULES:
        return any(has_ood_validation(record, OOD_RULES[rule]) for run in runs for record in run.records)
    # Data with its own test domains has no held-out table, because its runs hold out all of these at once.
    if rule == OFFICIAL or any(run.records[0].roles for run in runs):
        return rule == OFFICIAL and any(run.records[0].roles and not trained_region(run) for run in runs)
    if rule == SINGLE_SOURCE:
        return any(run.num_domains - len(run.test_domains) == 1 for run in runs)
    return held_out >= ({1, 2} if rule == "leave_one_domain_out_cv" else {1})


def _held_out_table(dataset: str, rule: str, rows: Rows, report: Value, further: Sequence[Column]) -> Table:
    """A column per held-out domain, each from the runs that hold it out, and their mean."""
    names, seeds = domain_names(_first_records(rows)), _trial_seeds(rows)
    # Cross-validation also needs the runs that hold out another domain beside the test domain.
    sizes = (1, 2) if rule == "leave_one_domain_out_cv" else (1,)
    selected = {
        row: {
            domain: _selected(
                rule, [run for run in runs if domain in run.test_domains and len(run.test_domains) in sizes], seeds
            )
            for domain in range(len(names))
        }
        for row, runs in rows.items()
    }
    columns = [*held_out_columns(names, report), *further]
    title = f"{dataset}, selection by {TITLES[rule]}"
    missing = _missing(NEEDED[rule](len(names)), rows)
    return Table(dataset, rule, title, _titles(columns), _cells(columns, selected, seeds), rows, missing)


def _selected(rule: str, runs: Sequence[FinishedRun], seeds: Sequence[int]) -> dict[int, Record]:
    """Applies a rule to the runs of each trial seed."""
    select = joined_regions if rule == PER_REGION else lambda chosen: SELECTION_RULES[rule](_records(chosen))
    selected = {}
    for seed in seeds:
        # A seed without the runs or scores that the rule needs is left out. The table lists it as missing.
        with suppress(RecordError):
            selected[seed] = select([run for run in runs if run.seeds[0] == seed])
    return selected


def _single_source_tables(dataset: str, rows: Rows, further: Sequence[Column]) -> list[Table]:
    """One table per training domain."""
    names, seeds = domain_names(_first_records(rows)), _trial_seeds(rows)
    tables = []
    for source, held_out in enumerate(single_source(len(names))):
        if all(run.test_domains != held_out for run in _runs(rows)):
            continue
        of_source = {row: [run for run in runs if run.test_domains == held_out] for row, runs in rows.items()}
        selected = {row: {source: _selected(VALIDATION, runs, seeds)} for row, runs in of_source.items()}
        columns = [*single_source_columns(names, source), *further]
        title = f"{dataset}, trained on {names[source]} alone and selected on its out-split, accuracy on out-splits"
        cells, missing = _cells(columns, selected, seeds), _missing([held_out], rows)
        tables.append(
            Table(dataset, SINGLE_SOURCE, title, _titles(columns), cells, rows, missing, trained_on=names[source])
        )
    return tables


def _official_table(dataset: str, rule: str, rows: Rows, further: Sequence[Column], by_group: bool = False) -> Table:
    """Scores on the data's own test domains. Every run holds out all of them."""
    seeds = _trial_seeds(rows)
    # Runs of one region and runs of all regions never share a table.
    of_rule = {
        row: [run for run in runs if bool(trained_region(run)) == (rule == PER_REGION)] for row, runs in rows.items()
    }
    rows = {row: runs for row, runs in of_rule.items() if runs}
    selected = {row: _selected(VALIDATION if rule == OFFICIAL else rule, runs, seeds) for row, runs in rows.items()}
    records = [record for by_seed in selected.values() for record in by_seed.values()]
    groups = group_columns(records) if by_group else []
    columns = [*official_columns(records), *groups, *further]
    cells = _cells(columns, {row: {0: by_seed} for row, by_seed in selected.items()}, seeds)
    missing_seeds = {row: sorted(set(seeds) - set(by_seed)) for row, by_seed in selected.items()}
    also = _ALSO_MISSING.get(rule, "")
    missing = [f"{row}: trial seeds {absent}{also}" for row, absent in missing_seeds.items() if absent]
    selection = rule_title(rule if rule in OOD_RULES else VALIDATION, _first_records(rows))
    how = TITLES[rule] if rule == PER_REGION else f"selection by {selection}"
    title = f"{dataset}, its own test domains, {how}"
    return Table(dataset, rule, title, _titles(columns), cells, rows, missing, groups=_titles(groups))


def _averages(rule: str, tables: Sequence[Table]) -> Table:
    """The average columns of the tables of several data sets side by side."""
    cells = {}
    for row in sorted({row for table in tables for row in table.rows}):
        averages = [
            table.rows[row][table.columns.index(AVERAGE)] if row in table.rows else Cell({}, 0) for table in tables
        ]
        cells[row] = [*averages, average(averages)]
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


def _records(runs: Sequence[FinishedRun]) -> list[Record]:
    return [record for run in runs for record in run.records]


def _first_records(rows: Rows) -> list[Record]:
    return [run.records[0] for run in _runs(rows)]


def _trial_seeds(rows: Rows) -> list[int]:
    return sorted({run.seeds[0] for run in _runs(rows)})


def _missing(needed: Sequence[tuple[int, ...]], rows: Rows) -> list[str]:
    """Names the missing runs, one phrase per row, held-out domains and hyper-parameter seed.

    Domains that no run of the table holds out were not planned.
    """
    trial_seeds, begun = _trial_seeds(rows), {run.test_domains for run in _runs(rows)}
    phrases = []
    for row, runs in rows.items():
        finished = {(run.test_domains, run.seeds) for run in runs}
        for held_out, hparams_seed in product(
            filter(begun.__contains__, needed), sorted({run.seeds[1] for run in runs})
        ):
            if absent := [seed for seed in trial_seeds if (held_out, (seed, hparams_seed)) not in finished]:
                phrases.append(
                    f"{row}: test domains {list(held_out)}, trial seeds {absent}, hparams seed {hparams_seed}"
                )
    return phrases
