"""A comparison: rows from the most frequent class to MoGE on one data set, and the answer which one to take."""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import groupby, islice
from math import ceil, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import send_to_device, set_seed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ..analysis.plots import plot_answer
from ..cli.arguments import checked, default_device, fields_of, merged, option
from ..cli.text import one_line, show_line
from ..cli.values import key_value, model_source, non_negative, output_file, weights_file
from ..data import Benchmark, Domain, get_benchmark
from ..data.domains import listed
from ..data.inspection import fingerprint
from ..data.readers.places import POOLED
from ..errors import ArgumentError
from ..finetuning.loop import take_step
from ..finetuning.messages import logging_disabled
from ..finetuning.model import build_model
from ..finetuning.plan import has_frozen_trunk, make_plan, needing_pixels, seen_domains, start_arguments
from ..finetuning.processes import join_processes, leave_processes, process_state_kept
from ..finetuning.resume import ResumePoint
from ..finetuning.run import start
from ..finetuning.trunk_cache import FOLDER as CACHE
from ..metrics import METRICS
from ..models.gmoe import resolve_moe_layers
from ..networks.build import build_network
from ..protocols.evaluation import predict
from ..protocols.options import DATA, Arguments, RunOptions, options_with
from ..protocols.planner import OFFICIAL, PlannedRun, Row, Sweep, describe_plan, plan_runs, read_domains, read_rows
from ..protocols.run_identity import default_network
from ..protocols.selection import training_domain_validation, validation_score
from ..results.answer import ZERO, Answer, answer, scores_of
from ..results.costs import WITHOUT_NETWORK, costs_of
from ..results.runs import FinishedRun, find_runs
from ..storage.run_folder import DONE
from .sweep import (
    FINETUNE,
    ComparisonOptions,
    LaunchOptions,
    cpu_share,
    digests_of,
    duration,
    launch,
    make_job,
    sha256_of,
    slots,
    with_chosen_rates,
)
from .zeros import ZEROS, has_coordinates, write_zero

SOURCE = "vit_small_patch14_dinov2.lvd142m"
# For data of the user, unless words after -- say otherwise: 16 passes over 50 images of a site
SHORT = {"steps": 100, "eval_freq": 25, "batch_size": 8}
PIXELS = {"cpu": 112, "cuda": 224}  # side of the input image
# A classifier alone needs more steps than a network, and each of them costs less
PROBE: dict[str, Any] = {
    "algorithm": "ERM",
    "lr": 1e-2,
    "sched": "cosine",
    "steps": 1000,
    "eval_freq": 100,
    "epochs": None,
}
MEASURED = 4  # steps and batches of the estimate
LONG = 600.0  # seconds, from which the plan says what to lower
DATA_OPTIONS = {*options_with(DATA), "metric"}
_TRUNK = "outputs of frozen blocks are computed once, without augmentation (--freeze {}); --train all trains everything"


# fmt: off
@dataclass(frozen=True, kw_only=True)
class CompareOptions(ComparisonOptions, LaunchOptions):
    """All options of a comparison."""

    dataset: str = option("folder", metavar="NAME",
        help="data set, or folder or place_folder for your own images (default: %(default)s)")
    source: str = option(SOURCE, type=model_source, metavar="NAME",
        help="timm vision transformer that all rows start from (default: %(default)s, whose features suit few images)")
    initial_checkpoint: str | None = option(None, type=weights_file, metavar="FILE",
        help="the source's weights, in place of a download")
    from_scratch: bool = option(False, help="train the source from random weights")
    rows: Sequence[str | Mapping[str, Any]] | None = option(None, nargs="+", metavar="NAME|YAML",
        help="rows by name, and files of own ones, NAME: {model: ..., OPTION: VALUE} (default: all that suit the data)")
    train: str | None = option(None, choices=("upper", "all"),
        help="train the blocks from the first mixture on, or all (default: upper on a CPU, all on a GPU)")
    equal_within: float = option(1.0, type=non_negative, metavar="POINTS",
        help="rows are equal in practice if the interval of their difference lies within (default: %(default)s)")
    format: str = option("text", choices=("text", "markdown", "latex", "csv", "json"),
        help="format of the answer (default: %(default)s)")
    plot: str | None = option(None, metavar="PNG", type=output_file, help="draw the differences")
    options: Mapping[str, Any] = option({}, metavar="KEY=VALUE", nargs="*", type=key_value,
        help="options of finetune for every trained row, as an alternative to words after --")
    output: str = option("output/comparison", metavar="DIR", help="folder of all runs (default: %(default)s)")
    dry_run: bool = option(False, help="print the plan with the time it takes, and stop")
# fmt: on


def compare(options: CompareOptions, given: Arguments, imports: Sequence[str] = ()) -> Answer | None:
    """Runs a comparison and returns its answer, or None if runs are left.

    Args:
        options: Those of the comparison.
        given: Options of finetune for every trained row.
        imports: Names of modules that the runs import.

    Raises:
        ArgumentError: The data, the source or a row cannot be compared.
    """
    read_domains.cache_clear()  # files may have changed since a call in this process
    digests_of.cache_clear()
    sha256_of.cache_clear()
    given = merged(checked(fields_of(RunOptions), options.options, "finetune"), given)
    if len(options.protocols) > 1 or options.protocols[0].endswith("_cv"):
        remedy = "has runs of different kinds, which cannot be compared; give one, such as leave_one_domain_out"
        raise ArgumentError.of("protocols", list(options.protocols), remedy)
    if options.from_scratch and options.initial_checkpoint:
        raise ArgumentError.of("initial_checkpoint", options.initial_checkpoint, "leave it out, or --from-scratch")
    benchmark, data_dir = get_benchmark(options.dataset), given.get("data_dir", options.data_dir)
    benchmark.check_data_dir(data_dir)
    domains = benchmark.read(data_dir, columns=dict(given.get("columns") or {}))
    if OFFICIAL in options.protocols and [domain.group for domain in domains if domain.role == "train"] == [POOLED]:
        remedy = f"no region is surely unseen by one pool of training images; try {options.dataset}_regions"
        raise ArgumentError.of("protocols", list(options.protocols), remedy)
    network = source_network(options.source)
    for_all = starting_options(options, given, benchmark, network)
    zeros, trained = rows_of(options, given, benchmark, domains, network)
    plan = Sweep([options.dataset], trained, options.protocols, options.trial_seeds, domains=options.domains)
    plan = replace(plan, options={**for_all, "data_dir": data_dir}, given=given)
    show_line(describe_plan(plan))
    for line in remarks(options, domains):
        show_line(line)
    for row in trained:
        if row.prevails and (kept := given.keys() & row.options.keys()):
            show_line(f"{row.name} keeps its own {', '.join(sorted(kept))}")
    if "cache_trunk" in for_all:
        show_line(_TRUNK.format(merged(for_all, given)["freeze"]))
    runs = plan_runs(plan)
    left = [run for run in runs if not Path(options.output, run.name, DONE).exists()]
    if left and not options.status:
        show_line(estimate(options, left, sum(map(len, domains))))
    if options.dry_run:
        return None
    names = write_zeros(options, plan, zeros)
    chosen = with_chosen_rates(options, options.output, plan, options.rates, imports)
    is_complete = chosen is not None and launch(options, options.output, chosen, imports)
    if options.status:
        return None
    if chosen is None or not is_complete:
        show_line("runs are left; the same command goes on")
        return None
    names |= {run.name for run in runs}
    finished = find_runs([Path(options.output, name) for name in sorted(names)])[0]
    names_in_order = dict.fromkeys([*zeros, ZERO, *(row.name for row in trained)])
    order = {name: number for number, name in enumerate(names_in_order)}
    # Runs on other numbers of processes have rows of their own, which come last
    scores = scores_of(finished).sort_values("row", key=lambda column: column.map(order), kind="stable")
    metric = METRICS[finished[0].metric]
    result = answer(scores, costs_of(finished), equal_within=options.equal_within / 100, metric=metric)
    if options.plot and len(result.pairs):
        plot_answer(result, scores, Path(options.plot))
    elif options.plot:
        show_line(f"plot={options.plot}: not drawn, because one row has no differences")
    facts = {"dataset": options.dataset, "domains": list(result.domains), "trial_seeds": list(options.trial_seeds)}
    rows = {row.name: dict(row.options) for row in chosen.rows}
    verdict = [*result.verdict, *still_improving(finished)]
    return replace(result, verdict=verdict, plan={**facts, "runs": len(names), "rows": rows})


def still_improving(runs: Sequence[FinishedRun]) -> list[str]:
    """Names the rows of which most runs have their best validation at the last of three or more evaluations."""
    at_end: dict[str, list[bool]] = {}
    for run in runs:
        last = run.records[-1]
        if len(run.records) > 2 and not last.averaged and run.row_name != "probe":
            best = training_domain_validation(run.records)
            at_end.setdefault(run.row_name, []).append(best.step == last.step and isfinite(validation_score(best)))
    if names := [name for name, ends in at_end.items() if fmean(ends) > 0.5]:
        remedy = "more steps may change the answer: -- --steps N, in another --output"
        return [f"Validation was best at the last step of most runs of {', '.join(names)}: {remedy}."]
    return []


def _keeps_trunk(options: Arguments) -> bool:
    """Whether the outputs of frozen blocks can be kept, as far as options say."""
    return has_frozen_trunk(options.get("freeze", "trunk")) and not needing_pixels(options)


def rows_of(
    options: CompareOptions,
    given: Arguments,
    benchmark: Benchmark,
    domains: Sequence[Domain],
    network: nn.Module | None,
) -> tuple[list[str], list[Row]]:
    """Returns the rows without a network, and the trained ones: those that the data allow, or that were asked for."""
    source = {"backbone": options.source}
    ready: dict[str, Arguments] = {}
    if not options.from_scratch:
        ready["probe"] = {"freeze": "backbone", "lr": PROBE["lr"]}
    ready |= {"dense": {"model": options.source}, "gmoe": {"model": "gmoe", "model_kwargs": source}}
    zeros = ["most_frequent"]
    if any(map(has_coordinates, domains)):
        zeros.append("places")
        if type(network) is VisionTransformer:
            ready |= {name: {"model": name, "model_kwargs": source} for name in ("erm_le", "moge")}
    entries = options.rows or [*zeros, *ready]
    zeros = [entry for entry in entries if isinstance(entry, str) and entry in ZEROS]
    rows = read_rows([entry for entry in entries if entry not in zeros], {"model": options.source}, ready)
    trained = []
    for row in rows:
        if row.name in ZEROS:
            raise ArgumentError.of("rows", row.name, "is the name of a row without a network; give another")
        further: dict[str, Any] = {} if _keeps_trunk(row.options) else {"cache_trunk": None}
        start = dict(row.options.get("model_kwargs") or {}).get("backbone", row.options["model"])
        if start != options.source and not options.from_scratch:
            further |= {"initial_checkpoint": None, "pretrained": True}  # the weights of its own network
        if is_probe := row.name == "probe" and "probe" in entries:
            of_others = given.get("steps") or (benchmark.steps if benchmark.is_published else SHORT["steps"])
            further |= {**PROBE, "steps": max(PROBE["steps"], of_others)}
        trained.append(replace(row, options={**further, **row.options}, prevails=is_probe))
    return zeros, trained


def source_network(name: str) -> nn.Module | None:
    """Builds a source without weights; None for an unknown name."""
    if ":" not in name:
        return default_network(name)
    with logging_disabled(logging.WARNING), torch.device("meta"):
        return build_network(name, None)


def starting_options(
    options: CompareOptions, given: Arguments, benchmark: Benchmark, network: nn.Module | None
) -> dict[str, Any]:
    """Returns the options of finetune that all trained rows begin with, unless they or words after -- have others."""
    blocks, embedding = getattr(network, "blocks", None), getattr(network, "patch_embed", None)
    if blocks is None or embedding is None:
        remedy = f"is no vision transformer of timm; choose one such as {SOURCE} or deit_small_patch16_224"
        raise ArgumentError.of("source", options.source, remedy)
    patch, device = embedding.patch_size[0], default_device()
    # A calibration takes longer than the few steps
    values: dict[str, Any] = {"calibrate": False}
    values["img_size"] = ceil((benchmark.image_size or PIXELS[device]) / patch) * patch
    if not benchmark.is_published:
        decided = {*dict(given.get("hparams") or {}), *(("steps",) if given.get("epochs") else ())}
        values |= {name: value for name, value in SHORT.items() if name not in decided}
    if options.initial_checkpoint:
        values["initial_checkpoint"] = options.initial_checkpoint
    elif not options.from_scratch:
        values["pretrained"] = True
    train = options.train or ("upper" if device == "cpu" and not options.from_scratch else "all")
    first = min(resolve_moe_layers("last_two", len(blocks)))
    if train == "upper" and first:
        values["freeze"] = f"trunk:{first}"
        values |= {"cache_trunk": "float16"} if _keeps_trunk(given) else {}
    return values


def remarks(options: CompareOptions, domains: Sequence[Domain]) -> Iterator[str]:
    """Names domains that the source was trained on, and classes that one domain alone has."""
    values = RunOptions(model=options.source, initial_checkpoint=options.initial_checkpoint)
    start = start_arguments({**vars(values), "pretrained": not options.from_scratch})
    # Images are read for sources with a run alone
    if start and (seen := [domains[index].name for index in seen_domains(start, domains, fingerprint(domains))]):
        yield one_line(f"the source was trained on {listed(seen)}: scores there are too good for a new site")
    present = {domain.name: {domain.classes[target] for target in np.unique(domain.targets)} for domain in domains}
    for name, classes in present.items():
        others = set().union(*(each for other, each in present.items() if other != name))
        if alone := sorted(classes - others):
            yield one_line(f"only {name} has images of {listed(alone)}: a run that holds it out cannot learn them")


def write_zeros(options: CompareOptions, plan: Sweep, zeros: Sequence[str]) -> set[str]:
    """Writes the runs of rows without a network, and returns their names."""
    rows = [Row(name, {"model": WITHOUT_NETWORK, "algorithm": name, "row": name}) for name in zeros]
    shared = {name: plan.given[name] for name in plan.given if name in DATA_OPTIONS}
    runs = plan_runs(replace(plan, rows=rows, options={"data_dir": plan.options["data_dir"]}, given=shared))
    for run in runs:
        job = make_job(options, options.output, run, ())
        if not job.is_finished and not options.status:
            values = {**run.options, "algorithm": RunOptions.algorithm}
            write_zero(run.options["algorithm"], RunOptions(**values, output=options.output, experiment=run.name))
    return {run.name for run in runs}


def estimate(options: CompareOptions, runs: Sequence[PlannedRun], images: int) -> str:
    """Says how long runs on a number of images take, from a few steps of each row."""
    begun = time.monotonic()
    subprocess.run([sys.executable, FINETUNE, "--help"], check=True, stdout=subprocess.DEVNULL)
    imports, seconds = time.monotonic() - begun, dict[str, float]()
    uncached = set() if Path(options.output, CACHE).exists() else {run.options.get("freeze") for run in runs}
    for row, members in groupby(sorted(runs, key=_row), key=_row):
        of_row = list(members)
        number = len(of_row)
        if of_row[0].options.get("lr") is None:
            number += len(options.rates or ()) * len({str(run.options["test_domains"]) for run in of_row})
        values = RunOptions(**{**cpu_share(options), **of_row[0].options, "output": options.output}, dry_run=True)
        with logging_disabled(logging.WARNING):  # the runs repeat all messages
            seconds[row] = number * (imports + measure(values)[0]) / len(slots(options))
            if values.cache_trunk and values.freeze in uncached:
                uncached.remove(values.freeze)
                computing = images * measure(replace(values, cache_trunk=None))[1]
                seconds["frozen blocks"] = seconds.get("frozen blocks", 0) + computing * (1 + bool(options.rates))
    parts = ", ".join(f"{row} {duration(value)}" for row, value in seconds.items())
    total = sum(seconds.values())
    remedy = "; for less, fewer --trial-seeds or --rows, or -- --steps N --img-size PIXELS"
    return f"about {duration(total)}: {parts}{remedy if total > LONG else ''}"


def _row(run: PlannedRun) -> str:
    return str(run.options["row"])


def measure(options: RunOptions) -> tuple[float, float]:
    """Measures the start of a run, and a few steps and batches of its evaluation.

    Returns the seconds of the whole run, and those of evaluating an image.
    """
    with process_state_kept(options.output):
        begun = time.monotonic()
        plan = make_plan(options)
        accelerator = join_processes(plan.options)
        try:
            set_seed(plan.options.seed)
            run = start(plan, accelerator, build_model(plan, accelerator), ResumePoint({}, None, 0))
            ends = [time.monotonic()]
            for step, minibatches in enumerate(islice(run.batches, MEASURED)):
                take_step(run, step, send_to_device(minibatches, accelerator.device))["loss"].item()
                ends.append(time.monotonic())
            evaluated = predict(run.model.network, islice(run.evaluation, MEASURED))
            end = time.monotonic()
        finally:
            leave_processes(accelerator, keep_group=False)
    filled, seconds_of_step = plan.options, (ends[-1] - ends[1]) / max(1, len(ends) - 2)
    of_image = (end - ends[-1]) / len(evaluated.target)
    evaluated_images = (filled.steps // filled.eval_freq + 1) * len(cast(Sized, run.evaluation.dataset))
    return ends[0] - begun + filled.steps * seconds_of_step + evaluated_images * of_image, of_image
