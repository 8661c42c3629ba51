"""Plans of runs: all combinations of data set, row, held-out domains and seeds of a protocol.

A row is a name and a table of options of tools/finetune.py, and so is a planned run.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..cli.arguments import checked, fields_of, merged, read_yaml
from ..data import get_benchmark
from ..data.readers.places import POOLED
from ..data.splits import domain_positions, seed_hash
from ..errors import ArgumentError, ProtocolError
from .options import SPLITTING, Arguments, RunOptions, canonical_names
from .run_identity import same_setting

DomainSets = list[tuple[int, ...]]


def leave_one_domain_out(num_domains: int) -> DomainSets:
    """Holds out each domain once: n runs."""
    return [(domain,) for domain in range(num_domains)]


def leave_one_or_two_domains_out(num_domains: int) -> DomainSets:
    """Holds out each domain and each pair of domains once: n + n(n-1)/2 runs."""
    return leave_one_domain_out(num_domains) + list(combinations(range(num_domains), 2))


def single_source(num_domains: int) -> DomainSets:
    """Trains on each domain once and holds out all others: n runs."""
    everything = range(num_domains)
    return [tuple(domain for domain in everything if domain != source) for source in everything]


# name -> held-out domains of every run, fewest domains
PROTOCOLS: Mapping[str, tuple[Callable[[int], DomainSets], int]] = MappingProxyType(
    {
        "leave_one_domain_out": (leave_one_domain_out, 2),
        "leave_one_domain_out_cv": (leave_one_or_two_domains_out, 3),
        "single_source": (single_source, 2),
    }
)
OFFICIAL = "official"  # one run, which holds out the test domains of the data itself
PER_REGION = "per_region"  # the same, trained on each of n regions alone: n runs
PLANNED = ("dataset", "test_domains", "trial_seed", "hparams_seed", "output", "experiment", "row", "resume")
# The rows of a comparison have the same images, splits, order of images and score
OF_DATA = (
    *SPLITTING,
    "data_dir",
    "columns",
    "metadata_columns",
    "in_chans",
    "bands",
    "skip_unreadable",
    "seed",
    "metric",
)
OF_ALL_ROWS = ("steps", "epochs", "batch_size")  # a comparison is fair if rows do not differ here by accident
TRAINING_PREFIX = "train "  # of the names of training regions, see `data.readers.places`


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a name, and options of tools/finetune.py, with `model` and perhaps `algorithm`."""

    name: str
    options: Arguments
    prevails: bool = False  # its options win over those given for all rows; other rows must not differ from these

    @property
    def algorithm(self) -> str:
        """The training method."""
        return self.options.get("algorithm", "ERM")

    @property
    def label(self) -> str:
        """Stands for the row in the names of runs."""
        name = _safe(self.name)
        return name if "row" in self.options else f"{name}-{_safe(self.algorithm)}"


def read_rows(
    entries: Sequence[str | Mapping[str, Any]],
    base: Arguments = MappingProxyType({}),
    ready: Mapping[str, Arguments] = MappingProxyType({}),
) -> list[Row]:
    """Reads rows from YAML files and tables of the form NAME: {OPTION: VALUE}, and from names of `ready` ones.

    Each row has the options of `base`, unless it has others.

    Raises:
        ArgumentError: A row has no name or no table of options, or an option that the plan decides, or there are two
            rows of one name or with the same options.
    """
    tables: list[Mapping[str, Any]] = []
    for entry in entries:
        if isinstance(entry, str) and entry in ready:
            tables.append({entry: ready[entry]})
        elif isinstance(entry, str) and ready and not Path(entry).is_file():
            raise ArgumentError.of("rows", entry, f"is no file, and none of the rows {', '.join(ready)}")
        else:
            tables.append(read_yaml(entry, "rows") if isinstance(entry, str) else entry)
    rows: dict[str, Row] = {}
    for name, options in (pair for table in tables for pair in table.items()):
        if name in (None, "") or str(name).startswith("-") or not isinstance(options, Mapping):
            remedy = "is no row; write NAME: {model: ..., OPTION: VALUE} with options of finetune"
            raise ArgumentError.of("rows", {name: options}, remedy)
        if decided := [option for option in canonical_names(options) if option in PLANNED + OF_DATA]:
            remedy = f"row {name!r} cannot have it, because all rows of a comparison share it; leave it out there"
            raise ArgumentError.of(decided[0], options[decided[0]], remedy)
        # None takes the option's default in place of what all rows have
        defaults = {option: None for option, value in options.items() if value is None}
        values = {**base, **checked(fields_of(RunOptions), options, f"row {name!r}"), **defaults}
        if same := [row.name for row in rows.values() if same_setting("", {**values, "row": row.name}, row.options)]:
            raise ArgumentError.of("rows", [same[0], str(name)], "are the same row; leave one of them out")
        row = Row(str(name), {**values, "row": str(name)})
        if row.name in rows:
            raise ArgumentError.of("rows", row.name, "names two rows; give each a name of its own")
        rows[row.name] = row
    for option in OF_ALL_ROWS:
        given = {name: row.options.get(option) for name, row in rows.items() if option in row.options}
        if given and len(given) < len(rows):
            without = next(name for name in rows if name not in given)
            remedy = f"row {next(iter(given))!r} has it and row {without!r} does not; give it in each row or for all"
            raise ArgumentError.of(option, next(iter(given.values())), remedy)
    return list(rows.values())


@dataclass(frozen=True)
class Sweep:
    """The axes of a plan, all of whose combinations are runs."""

    datasets: Sequence[str]
    rows: Sequence[Row]
    protocols: Sequence[str]  # in `PROTOCOLS`, `OFFICIAL` or `PER_REGION`; runs of several are planned once
    trial_seeds: Sequence[int] = (0, 1, 2)
    hparams_seeds: Sequence[int] = (0,)
    domains: Sequence[int | str] | None = None  # the only ones to hold out, or to train on for single_source
    options: Arguments = field(default_factory=dict)  # of all rows, which may have others
    given: Arguments = field(default_factory=dict)  # of all rows, which must not have others


@dataclass(frozen=True)
class PlannedRun:
    """One run."""

    name: str  # differs for all runs of the plan
    options: Arguments  # of tools/finetune.py by name; None for its default


def plan_runs(sweep: Sweep) -> list[PlannedRun]:
    """Lists the runs of a sweep, all of one trial seed before the next, so that a table is complete early."""
    for name in ("trial_seeds", "hparams_seeds"):
        if len(seeds := vars(sweep)[name]) > len(set(seeds)):
            raise ArgumentError.of(name, list(seeds), "has a seed twice, which would be one run; leave one out")
    labels = [row.label for row in sweep.rows]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise ArgumentError.of("rows", repeated[0], "names two rows; give each a name of its own")
    for option in sweep.given:
        if option in PLANNED:
            raise ArgumentError.of(option, sweep.given[option], "is decided by the sweep; see sweep --help")
    for row in sweep.rows:
        if not row.prevails:
            _check_given(row, row.options, sweep.given)
    for dataset in sweep.datasets:
        get_benchmark(dataset).check_data_dir(_place(sweep)[0])
    held_out = {dataset: held_out_domains(sweep, dataset) for dataset in sweep.datasets}
    axes = (sweep.trial_seeds, sweep.hparams_seeds, sweep.datasets, sweep.rows)
    runs = []
    for trial_seed, hparams_seed, dataset, row in product(*axes):
        for domains in held_out[dataset]:
            # The name has everything that differs between the plan's runs
            where = OFFICIAL if domains is None else "test" + "_".join(map(str, domains))
            name = f"{_safe(dataset)}-{row.label}-{where}-trial{trial_seed}-hparams{hparams_seed}"
            options = {
                "algorithm": row.algorithm,
                **merged(sweep.options, row.options, sweep.given, row.options if row.prevails else {}),
                "dataset": dataset,
                "test_domains": None if domains is None else list(domains),
                "trial_seed": trial_seed,
                "hparams_seed": hparams_seed,
            }
            if "row" in row.options:  # the same images in the same order, whatever the method
                identity = (dataset, RunOptions.algorithm, options["test_domains"], hparams_seed, trial_seed)
                options = {"seed": seed_hash(*identity), **options}
            runs.append(PlannedRun(name, options))
    return runs


def _check_given(row: Row, options: Arguments, given: Arguments) -> None:
    """Refuses options for all rows that a row has otherwise, also inside tables such as model_kwargs."""
    for name in options.keys() & given.keys():
        if isinstance(options[name], Mapping) and isinstance(given[name], Mapping):
            _check_given(row, options[name], given[name])
        elif not same_setting(name, options[name], given[name]):
            remedy = f"row {row.name!r} has {name}={options[name]!r}; leave it out of one of them"
            raise ArgumentError.of(name, given[name], remedy)


def held_out_domains(sweep: Sweep, dataset: str) -> list[tuple[int, ...] | None]:
    """Returns the held-out domains of every run on a data set, without repetitions; None for the data's own."""
    domain_sets: list[tuple[int, ...] | None] = []
    for protocol in sweep.protocols:
        if protocol == OFFICIAL:
            if sweep.domains is not None:
                remedy = f"the protocol {OFFICIAL!r} has the test domains of the data; leave it out"
                raise ProtocolError.of("domains", list(sweep.domains), remedy)
            domain_sets.append(None)
        elif protocol == PER_REGION:
            domain_sets += _all_but_one_region(sweep, dataset)
        elif protocol in PROTOCOLS:
            hold_out, fewest = PROTOCOLS[protocol]
            names = domain_names(sweep, dataset)
            if len(names) < fewest:
                remedy = "give each site a folder of its own, or name sites by --columns group=COLUMN"
                raise ProtocolError.of(
                    "protocols", protocol, f"takes {fewest} domains, {dataset} has {len(names)}; {remedy}"
                )
            domain_sets += _of_interest(hold_out(len(names)), sweep.domains, protocol, names)
        else:
            names = ", ".join([*PROTOCOLS, OFFICIAL, PER_REGION])
            raise ProtocolError.of("protocols", protocol, f"choose from {names}")
    return list(dict.fromkeys(domain_sets))


def _all_but_one_region(sweep: Sweep, dataset: str) -> DomainSets:
    """Returns the held-out domains of the runs that train on one region alone."""
    names = [name for name, _, _ in read_domains(dataset, *_place(sweep))]
    regions = [position for position, name in enumerate(names) if name.startswith(TRAINING_PREFIX)]
    if len(regions) < 2 or len(regions) == len(names):
        remedy = f"{dataset} has {len(regions)} training regions beside test domains; it takes 2"
        raise ProtocolError.of("protocols", PER_REGION, f"{remedy}, as geo_digits and FMoW_regions have")
    sources = regions if sweep.domains is None else domain_positions(sweep.domains, names, "domains")
    if unknown := [position for position in sources if position not in regions]:
        raise ProtocolError.of("domains", unknown, f"the regions are {regions}")
    return [tuple(position for position in range(len(names)) if position != source) for source in sources]


def domain_names(sweep: Sweep, dataset: str) -> Sequence[str]:
    """Returns the names of the domains that can be held out, from the benchmark's row or from the data folder.

    In data with test domains of its own, these are the groups of the training domains.
    """
    benchmark = get_benchmark(dataset)
    if benchmark.domains:
        return benchmark.domains
    names, groups, is_reserved = zip(*read_domains(dataset, *_place(sweep)), strict=True)
    if not any(is_reserved):
        return names
    training = [group for group, reserved in zip(groups, is_reserved, strict=True) if not reserved]
    if training == [POOLED]:
        remedy = f"has one training domain beside its test domains; use the protocol {OFFICIAL!r}"
        raise ProtocolError.of("dataset", dataset, remedy)
    return training


def _place(sweep: Sweep) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """Folder of the images, and names of its table's columns."""
    options = merged(sweep.options, sweep.given)
    return options.get("data_dir"), tuple(dict(options.get("columns") or {}).items())


@cache  # reading lists every image
def read_domains(
    dataset: str, data_dir: str | None, columns: tuple[tuple[str, str], ...]
) -> list[tuple[str, str, bool]]:
    """Returns name and group of each domain, training domains first, and whether the data reserves it for testing."""
    domains = get_benchmark(dataset).read(data_dir, columns=dict(columns))
    return [(domain.name, domain.group, domain.role != "train") for domain in domains]


def describe_plan(sweep: Sweep) -> str:
    """Describes how many runs a sweep has, and why, with one line per data set."""
    axes = {"trial seed": sweep.trial_seeds, "hparams seed": sweep.hparams_seeds, "row": sweep.rows}
    times = " x ".join(f"{len(entries)} {axis}{'s' * (len(entries) != 1)}" for axis, entries in axes.items())
    lines, total = [], 0
    for dataset in sweep.datasets:
        choices = len(held_out_domains(sweep, dataset))
        runs = choices * prod(map(len, axes.values()))
        counts = {name: len(held_out_domains(replace(sweep, protocols=[name]), dataset)) for name in sweep.protocols}
        counted = ", ".join(f"{protocol} {count}" for protocol, count in counts.items())
        counted += "" if sweep.domains is None else f", of domains {list(sweep.domains)} alone"
        lines.append(f"{dataset}: {counted}; {choices} sets of test domains x {times} = {runs} runs")
        total += runs
    return "\n".join([*lines, f"{total} runs in all"])


def _of_interest(
    sets: DomainSets, domains: Sequence[int | str] | None, protocol: str, names: Sequence[str]
) -> DomainSets:
    """Selects the runs that hold out one of the domains, or that train on one of them for single_source."""
    if domains is None:
        return sets
    positions = domain_positions(domains, names, "domains")
    trained_on = protocol == "single_source"
    return [held_out for held_out in sets if any((position in held_out) != trained_on for position in positions)]


def _safe(label: str) -> str:
    return re.sub(r"[^\w.+]+", "_", label)
