"""Plans of runs: all combinations of data set, algorithm, model, held-out domains and seeds of a protocol.

A planned run is a name and a table of options of tools/finetune.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from math import prod
from types import MappingProxyType
from typing import Any

from ..data import get_benchmark
from ..data.readers.places import POOLED
from ..data.splits import domain_positions
from ..errors import ArgumentError, ProtocolError
from .options import Arguments

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
PLANNED = ("dataset", "algorithm", "model", "test_domains", "trial_seed", "hparams_seed")  # options of every run
TRAINING_PREFIX = "train "  # of the names of training regions, see `data.readers.places`


@dataclass(frozen=True)
class Choice:
    """One entry of a plan's axis: a data set, algorithm or model, possibly with further options."""

    value: str
    label: str  # stands for the value in the names of runs
    options: Arguments = field(default_factory=dict)

    @classmethod
    def of(cls, axis: str, entry: str | Arguments) -> "Choice":
        """Reads a name, or a table with a name under the key `axis`, perhaps a label, and further options."""
        if isinstance(entry, str):
            return cls(entry, entry)
        if not isinstance(entry, Mapping):
            raise ArgumentError.of(f"{axis}s", entry, f"is neither a name nor a table; give {{{axis}: NAME}}")
        options = dict(entry)
        if axis not in options:
            raise ArgumentError.of(f"{axis}s", options, f"lacks {axis!r}; give {{{axis}: NAME, OPTION: VALUE}}")
        value = str(options.pop(axis))
        return cls(value, str(options.pop("label", value)), options)


@dataclass(frozen=True)
class Sweep:
    """The axes of a plan, all of whose combinations are runs."""

    datasets: Sequence[Choice]
    algorithms: Sequence[Choice]
    models: Sequence[Choice]  # two entries of one model need different labels
    protocols: Sequence[str]  # in `PROTOCOLS`, `OFFICIAL` or `PER_REGION`; runs of several are planned once
    trial_seeds: Sequence[int] = (0, 1, 2)
    hparams_seeds: Sequence[int] = (0,)
    domains: Sequence[int | str] | None = None  # the only ones to hold out, or to train on for single_source
    options: Arguments = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedRun:
    """One run."""

    name: str  # differs for all runs of the plan
    options: Arguments  # of tools/finetune.py by name; None for its default


def plan_runs(sweep: Sweep) -> list[PlannedRun]:
    """Lists the runs of a sweep, all of one trial seed before the next, so that a table is complete early."""
    for axis in (sweep.datasets, sweep.algorithms, sweep.models):
        names = [_safe(choice.label) for choice in axis]
        if repeated := [name for name in names if names.count(name) > 1]:
            remedy = "names two entries of the plan; give each a `label` of its own"
            raise ArgumentError.of("label", repeated[0], remedy)
    for name in ("trial_seeds", "hparams_seeds"):
        if len(seeds := vars(sweep)[name]) > len(set(seeds)):
            raise ArgumentError.of(name, list(seeds), "has a seed twice, which would be one run; leave one out")
    for dataset in sweep.datasets:
        get_benchmark(dataset.value).check_data_dir(_place(sweep, dataset)[0])
    held_out = {dataset.label: held_out_domains(sweep, dataset) for dataset in sweep.datasets}
    axes = (sweep.trial_seeds, sweep.hparams_seeds, sweep.datasets, sweep.models, sweep.algorithms)
    runs = []
    for trial_seed, hparams_seed, dataset, model, algorithm in product(*axes):
        for domains in held_out[dataset.label]:
            # The name has everything that differs between the plan's runs
            where = OFFICIAL if domains is None else "test" + "_".join(map(str, domains))
            labels = (dataset.label, model.label, algorithm.label, where)
            name = "-".join([*map(_safe, labels), f"trial{trial_seed}", f"hparams{hparams_seed}"])
            options = {
                **_merged(sweep.options, dataset.options, algorithm.options, model.options),
                "dataset": dataset.value,
                "algorithm": algorithm.value,
                "model": model.value,
                "test_domains": None if domains is None else list(domains),
                "trial_seed": trial_seed,
                "hparams_seed": hparams_seed,
            }
            runs.append(PlannedRun(name, options))
    return runs


def held_out_domains(sweep: Sweep, dataset: Choice) -> list[tuple[int, ...] | None]:
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
                remedy = f"{dataset.label} has {len(names)} domains; it takes {fewest}"
                raise ProtocolError.of("protocols", protocol, remedy)
            domain_sets += _of_interest(hold_out(len(names)), sweep.domains, protocol, names)
        else:
            names = ", ".join([*PROTOCOLS, OFFICIAL, PER_REGION])
            raise ProtocolError.of("protocols", protocol, f"choose from {names}")
    return list(dict.fromkeys(domain_sets))


def _all_but_one_region(sweep: Sweep, dataset: Choice) -> DomainSets:
    """Returns the held-out domains of the runs that train on one region alone."""
    names = [name for name, _, _ in _read_domains(dataset.value, *_place(sweep, dataset))]
    regions = [position for position, name in enumerate(names) if name.startswith(TRAINING_PREFIX)]
    if len(regions) < 2 or len(regions) == len(names):
        remedy = f"{dataset.label} has {len(regions)} training regions beside test domains; it takes 2"
        raise ProtocolError.of("protocols", PER_REGION, f"{remedy}, as geo_digits and FMoW_regions have")
    sources = regions if sweep.domains is None else domain_positions(sweep.domains, names, "domains")
    if unknown := [position for position in sources if position not in regions]:
        raise ProtocolError.of("domains", unknown, f"the regions are {regions}")
    return [tuple(position for position in range(len(names)) if position != source) for source in sources]


def domain_names(sweep: Sweep, dataset: Choice) -> Sequence[str]:
    """Returns the names of the domains that can be held out, from the benchmark's row or from the data folder.

    In data with test domains of its own, these are the groups of the training domains.
    """
    benchmark = get_benchmark(dataset.value)
    if benchmark.domains:
        return benchmark.domains
    names, groups, is_reserved = zip(*_read_domains(dataset.value, *_place(sweep, dataset)), strict=True)
    if not any(is_reserved):
        return names
    training = [group for group, reserved in zip(groups, is_reserved, strict=True) if not reserved]
    if training == [POOLED]:
        remedy = f"has one training domain beside its test domains; use the protocol {OFFICIAL!r}"
        raise ProtocolError.of("dataset", dataset.value, remedy)
    return training


def _place(sweep: Sweep, dataset: Choice) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """Folder of the images, and names of its table's columns."""
    options = _merged(sweep.options, dataset.options)
    return options.get("data_dir"), tuple(dict(options.get("columns") or {}).items())


@cache  # reading lists every image
def _read_domains(
    dataset: str, data_dir: str | None, columns: tuple[tuple[str, str], ...]
) -> list[tuple[str, str, bool]]:
    """Returns name and group of each domain, training domains first, and whether the data reserves it for testing."""
    domains = get_benchmark(dataset).read(data_dir, columns=dict(columns))
    return [(domain.name, domain.group, domain.role != "train") for domain in domains]


def describe_plan(sweep: Sweep) -> str:
    """Describes how many runs a sweep has, and why, with one line per data set."""
    axes = {
        "trial seed": sweep.trial_seeds,
        "hparams seed": sweep.hparams_seeds,
        "model": sweep.models,
        "algorithm": sweep.algorithms,
    }
    times = " x ".join(f"{len(entries)} {axis}{'s' * (len(entries) != 1)}" for axis, entries in axes.items())
    lines, total = [], 0
    for dataset in sweep.datasets:
        choices = len(held_out_domains(sweep, dataset))
        runs = choices * prod(map(len, axes.values()))
        counts = {name: len(held_out_domains(replace(sweep, protocols=[name]), dataset)) for name in sweep.protocols}
        counted = ", ".join(f"{protocol} {count}" for protocol, count in counts.items())
        counted += "" if sweep.domains is None else f", of domains {list(sweep.domains)} alone"
        lines.append(f"{dataset.label}: {counted}; {choices} sets of test domains x {times} = {runs} runs")
        total += runs
    return "\n".join([*lines, f"{total} runs in all"])


def _of_interest(
    sets: DomainSets, domains: Sequence[int | str] | None, protocol: str, names: Sequence[str]
) -> DomainSets:
    """Selects the runs that hold out one of the domains, or that train on one of them for single_source."""
    if domains is None:
        return sets
    positions = domain_positions(domains, names, "domains")
    if any(not 0 <= position < len(names) for position in positions):
        listing = ", ".join(f"{position} {name}" for position, name in enumerate(names))
        raise ProtocolError.of("domains", list(domains), f"name domains out of: {listing}")
    trained_on = protocol == "single_source"
    return [held_out for held_out in sets if any((position in held_out) != trained_on for position in positions)]


def _merged(*tables: Arguments) -> Arguments:
    """Merges tables of options, the later ones over the earlier; tables inside them, such as model_kwargs, as well."""
    joined: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(joined.get(key), Mapping)
            joined[key] = _merged(joined[key], value) if both else value
    return joined


def _safe(label: str) -> str:
    return re.sub(r"[^\w.+]+", "_", label)
