"""Plans of runs: every combination of data set, algorithm, model, held-out domains and seeds that a protocol asks for.

A run is a table of options of tools/finetune.py with a name; what the combinations share or add is in the same form.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from math import prod
from types import MappingProxyType
from typing import Any

from ..data import evaluation_only, get_benchmark
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


# name -> held-out domains of every run, the count as a formula, fewest domains
PROTOCOLS: Mapping[str, tuple[Callable[[int], DomainSets], str, int]] = MappingProxyType(
    {
        "leave_one_domain_out": (leave_one_domain_out, "{n}", 2),
        "leave_one_domain_out_cv": (leave_one_or_two_domains_out, "{n} + {n}*{m}/2", 3),
        "single_source": (single_source, "{n}", 2),
    }
)
OFFICIAL = "official"  # one run, which holds out what the data itself sets apart
PER_REGION = "per_region"  # the same, trained on each of the regions alone: n runs
PLANNED = ("dataset", "algorithm", "model", "test_domains", "trial_seed", "hparams_seed")  # options of every run
TRAINING_PREFIX = "train "  # how the training domain of a region is called, see `data.readers.places`


@dataclass(frozen=True)
class Choice:
    """One entry of a plan's axis: a name, or a name with options of its own.

    Attributes:
        value: The data set, algorithm or model.
        label: What it is called in the names of runs.
        options: What else a run with it is given.
    """

    value: str
    label: str
    options: Arguments = field(default_factory=dict)

    @classmethod
    def of(cls, axis: str, entry: str | Arguments) -> "Choice":
        """Reads an entry: a name, or a table that has the axis's own key, perhaps a label, and further options.

        Raises:
            ArgumentError: The entry is no table, or lacks the axis's key.
        """
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
    """What is to be combined.

    Attributes:
        datasets: Data sets.
        algorithms: Training methods.
        models: Models; two entries of one model need different labels.
        protocols: Names in `PROTOCOLS`, `OFFICIAL` or `PER_REGION`; runs that several ask for are planned once.
        trial_seeds: Repetitions.
        hparams_seeds: Draws of hyper-parameters; 0 for the defaults.
        domains: Domains of interest: held out, alone and in pairs, or trained on (single source); None for all.
        options: Of every run.
    """

    datasets: Sequence[Choice]
    algorithms: Sequence[Choice]
    models: Sequence[Choice]
    protocols: Sequence[str]
    trial_seeds: Sequence[int] = (0, 1, 2)
    hparams_seeds: Sequence[int] = (0,)
    domains: Sequence[int] | None = None
    options: Arguments = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedRun:
    """One run.

    Attributes:
        name: The experiment's, from everything that tells the plan's runs apart.
        options: Of tools/finetune.py, by name; those that are None are left to it.
    """

    name: str
    options: Arguments


def plan_runs(sweep: Sweep) -> list[PlannedRun]:
    """Lists the runs of a sweep, all of one trial seed before the next, so that tables fill from the first seed on.

    Raises:
        ArgumentError: Two entries of an axis have the same label.
        ProtocolError: A protocol does not exist, or a data set has too few domains for it.
    """
    for axis in (sweep.datasets, sweep.algorithms, sweep.models):
        _check_labels(axis)
    held_out = {dataset.label: held_out_domains(sweep, dataset) for dataset in sweep.datasets}
    return list(_combine(sweep, held_out))


def _combine(sweep: Sweep, held_out: Mapping[str, Sequence[tuple[int, ...] | None]]) -> Iterator[PlannedRun]:
    axes = (sweep.trial_seeds, sweep.hparams_seeds, sweep.datasets, sweep.models, sweep.algorithms)
    for trial_seed, hparams_seed, dataset, model, algorithm in product(*axes):
        for domains in held_out[dataset.label]:
            where = OFFICIAL if domains is None else "test" + "_".join(map(str, domains))
            labels = (dataset.label, model.label, algorithm.label, where)
            yield PlannedRun(
                name="-".join([*map(_safe, labels), f"trial{trial_seed}", f"hparams{hparams_seed}"]),
                options={
                    **_merged(sweep.options, dataset.options, algorithm.options, model.options),
                    "dataset": dataset.value,
                    "algorithm": algorithm.value,
                    "model": model.value,
                    "test_domains": None if domains is None else list(domains),
                    "trial_seed": trial_seed,
                    "hparams_seed": hparams_seed,
                },
            )


def held_out_domains(sweep: Sweep, dataset: Choice) -> list[tuple[int, ...] | None]:
    """Returns the held-out domains of every run on a data set, each set once; None leaves them to the data.

    Raises:
        ProtocolError: A protocol does not exist, or the data set has too few domains for it.
    """
    found: list[tuple[int, ...] | None] = []
    for protocol in sweep.protocols:
        if protocol == OFFICIAL:
            found.append(None)
            continue
        if protocol == PER_REGION:
            found += _one_region_each(sweep, dataset)
            continue
        if protocol not in PROTOCOLS:
            known = ", ".join([*PROTOCOLS, OFFICIAL, PER_REGION])
            raise ProtocolError.of("protocols", protocol, f"choose from {known}")
        hold_out, _, fewest = PROTOCOLS[protocol]
        number = number_of_domains(sweep, dataset)
        if number < fewest:
            raise ProtocolError.of("protocols", protocol, f"{dataset.label} has {number} domains; it takes {fewest}")
        counts = _of_interest(sweep.domains, protocol, number)
        found += [held_out for held_out in hold_out(number) if counts(held_out)]
    return list(dict.fromkeys(found))


def _one_region_each(sweep: Sweep, dataset: Choice) -> DomainSets:
    """What runs hold out that are trained on one region of data with test domains of its own."""
    names = _domain_names(dataset.value, _merged(sweep.options, dataset.options).get("data_dir"))
    regions = [at for at, name in enumerate(names) if name.startswith(TRAINING_PREFIX)]
    if len(regions) < 2 or len(regions) == len(names):
        remedy = f"{dataset.label} has {len(regions)} training regions beside test domains; it takes 2"
        raise ProtocolError.of("protocols", PER_REGION, f"{remedy}, as geo_digits and FMoW_regions have")
    if unknown := [at for at in sweep.domains or () if at not in regions]:
        raise ProtocolError.of("domains", unknown, f"the regions are {regions}")
    sources = regions if sweep.domains is None else sweep.domains
    return [tuple(at for at in range(len(names)) if at != source) for source in sources]


@cache
def _domain_names(dataset: str, data_dir: str | None) -> tuple[str, ...]:
    return tuple(domain.name for domain in get_benchmark(dataset).read(data_dir))


def number_of_domains(sweep: Sweep, dataset: Choice) -> int:
    """Returns the number of domains: what the benchmark's row says, else what the data folder holds.

    Raises:
        ProtocolError: The data sets some domains apart for testing.
    """
    benchmark = get_benchmark(dataset.value)
    if benchmark.domains:
        return len(benchmark.domains)
    return _count_domains(dataset.value, _merged(sweep.options, dataset.options).get("data_dir"))


@cache
def _count_domains(dataset: str, data_dir: str | None) -> int:
    domains = get_benchmark(dataset).read(data_dir)
    if evaluation_only(domains):
        raise ProtocolError.of("dataset", dataset, f"sets its test domains apart itself; use the protocol {OFFICIAL!r}")
    return len(domains)


def describe_plan(sweep: Sweep) -> str:
    """Says how many runs a sweep has and how the number comes about, one line per data set."""
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
        counted = ", ".join(_formula(sweep, dataset, protocol) for protocol in sweep.protocols)
        lines.append(f"{dataset.label}: {counted}; {choices} sets of test domains x {times} = {runs} runs")
        total += runs
    return "\n".join([*lines, f"{total} runs in all"])


def _formula(sweep: Sweep, dataset: Choice, protocol: str) -> str:
    if protocol == OFFICIAL:
        return f"{protocol} 1"
    if protocol == PER_REGION:
        return f"{protocol} {len(_one_region_each(sweep, dataset))}"
    hold_out, formula, _ = PROTOCOLS[protocol]
    number = number_of_domains(sweep, dataset)
    counted = formula.format(n=number, m=number - 1)
    total = f" = {len(hold_out(number))}" if "+" in counted else ""
    only = "" if sweep.domains is None else f", of which those of domains {list(sweep.domains)}"
    return f"{protocol} {counted}{total}{only}"


def _of_interest(domains: Sequence[int] | None, protocol: str, number: int) -> Callable[[tuple[int, ...]], bool]:
    if domains is None:
        return lambda held_out: True
    unknown = [domain for domain in domains if not 0 <= domain < number]
    if unknown:
        raise ProtocolError.of("domains", list(domains), f"there are domains 0 to {number - 1}")
    if protocol == "single_source":
        return lambda held_out: any(domain not in held_out for domain in domains)
    return lambda held_out: any(domain in held_out for domain in domains)


def _merged(*tables: Arguments) -> Arguments:
    """Joins tables of options; the last wins, except that tables within them, such as model_kwargs, are joined too."""
    joined: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(joined.get(key), Mapping)
            joined[key] = _merged(joined[key], value) if both else value
    return joined


def _check_labels(choices: Sequence[Choice]) -> None:
    labels = [_safe(choice.label) for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise ArgumentError.of("label", label, "names two entries of the plan; give each a `label` of its own")


def _safe(label: str) -> str:
    return re.sub(r"[^\w.+]+", "_", label)
