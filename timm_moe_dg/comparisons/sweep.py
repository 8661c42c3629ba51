"""Sweeps: the plan of a comparison as jobs, which run here one after the other, at the same time, or on Slurm."""

import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf, isnan
from pathlib import Path
from statistics import fmean
from textwrap import indent
from typing import TYPE_CHECKING, Any, TypeVar

from ..cli.arguments import (
    available_cpus,
    checked,
    declared,
    fields_of,
    from_parsed,
    given_options,
    merged,
    option,
    option_words,
    parse_arguments,
    read_yaml,
)
from ..cli.text import show_line
from ..cli.tool import OPTION, TOOLS, ToolParser, command
from ..cli.values import key_value, position_or_name, positive, positive_int
from ..data import get_benchmark
from ..data.inspection import FILES, Fingerprint, difference, fingerprint
from ..errors import ArgumentError, ProcessLostError
from ..protocols.options import DEFAULTS, Arguments, RunOptions, run_parser
from ..protocols.planner import (
    OFFICIAL,
    PER_REGION,
    PROTOCOLS,
    PlannedRun,
    Row,
    Sweep,
    describe_plan,
    plan_runs,
    read_rows,
)
from ..protocols.run_identity import (
    check_weights_files,
    differences,
    read_arguments,
    read_repeatable,
    sha256,
    weights_files,
)
from ..protocols.selection import training_domain_validation, validation_score
from ..results.runs import find_runs
from .jobs import STATES, Job, run_jobs, submit_jobs, tail

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Chosen = TypeVar("Chosen", bound="DataclassInstance")  # options of a command
Result = TypeVar("Result")
FINETUNE = TOOLS / "finetune.py"


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """The rows of a comparison, and what they share."""

    data_dir: str | None = option(None, metavar="DIR", help="folder of the images")
    domains: Sequence[int | str] | None = option(None, type=position_or_name, nargs="+", metavar="DOMAIN",
        help="only these domains, by name or position (default: all)")
    trial_seeds: Sequence[int] = option((0, 1, 2), type=int, nargs="+", metavar="N",
        help="repetitions (default: 0 1 2)")
    protocols: Sequence[str] = option(("leave_one_domain_out",), "--protocol", nargs="+", metavar="NAME",
        choices=(*PROTOCOLS, OFFICIAL, PER_REGION),
        help=f"what to hold out, of {', '.join([*PROTOCOLS, OFFICIAL, PER_REGION])} (default: leave_one_domain_out)")
    rates: Sequence[float] | None = option(None, type=positive, nargs="+", metavar="LR",
        help="learning rates, of which validation on another seed chooses that of each row without one")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ComparisonOptions):
    """The plan of a sweep."""

    recipe: str | None = option(None, metavar="YAML",
        help="file or name of options of finetune for every run, such as gmoe_small")
    datasets: Sequence[str] | None = option(None, nargs="+", metavar="NAME",
        help="data sets; required, unless the recipe names one")
    rows: Sequence[str | Mapping[str, Any]] | None = option(None, nargs="+", metavar="YAML",
        help="files of rows to compare, NAME: {model: ..., OPTION: VALUE}, in place of --models and --algorithms")
    algorithms: Sequence[str] | None = option(None, nargs="+", metavar="NAME",
        help="training methods (default: the recipe's, or ERM)")
    models: Sequence[str] | None = option(None, nargs="+", metavar="NAME",
        help="timm models (default: the recipe's, or gmoe_small_patch16)")
    hparams_seeds: Sequence[int] = option((0,), type=int, nargs="+", metavar="N",
        help="random draws of hyper-parameters; 0 takes the defaults (default: 0)")
    options: Mapping[str, Any] = option({}, type=key_value, nargs="*", metavar="KEY=VALUE",
        help="options of finetune for every run, as an alternative to words after --")
    output: str = option("output/sweep", metavar="DIR", help="folder of all runs (default: %(default)s)")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Where and how the runs start."""

    launcher: str = option("local", choices=("local", "slurm"), help="where the runs start (default: %(default)s)")
    jobs: int = option(1, type=positive_int, help="runs at a time on this machine (default: %(default)s)")
    gpus: Sequence[str] | None = option(None, nargs="+", metavar="I",
        help="GPUs, with one run at a time on each, instead of --jobs")
    run_with: str = option("", metavar="COMMAND",
        help="program that starts finetune, such as 'accelerate launch --num_processes 2' (default: this Python)")
    slurm: Mapping[str, Any] = option({}, type=key_value, nargs="*", metavar="KEY=VALUE",
        help="parameters of submitit's AutoExecutor")
    dry_run: bool = option(False, help="print the commands of the remaining runs, and stop")
    status: bool = option(False, help="print which runs are finished, running, failed or missing, and stop")
# fmt: on


@dataclass(frozen=True, kw_only=True)
class SweepOptions(PlanOptions, LaunchOptions):
    """All options of a sweep."""


def run_command(
    parser: ToolParser,
    table: type[Chosen],
    argv: Sequence[str],
    run: Callable[[Chosen, Arguments, Sequence[str]], Result],
) -> Result:
    """Runs a command whose words after -- are options of finetune for every run.

    Args:
        parser: That of the command.
        table: Dataclass of the command's options.
        argv: The command line.
        run: Function of the command's options, the options of finetune and the modules that the user names.
    """
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the runs are asked to save a checkpoint
    args = parse_arguments(parser, words[:split])
    given, imports = options_for_all(words[split + 1 :])
    try:
        return run(from_parsed(table, vars(args)), given, [*getattr(args, "imports", ()), *imports])
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on") from None
    except ProcessLostError as error:
        raise SystemExit(f"{parser.prog}: {error}") from None


def options_for_all(words: Sequence[str]) -> tuple[Arguments, list[str]]:
    """Returns the options of finetune in the words after --, and the modules that they import."""
    parser = run_parser()
    args = parser.parse_args(words)
    given = given_options(parser, args, read=read_repeatable)
    given.pop("config", None)
    return given, getattr(args, "imports", [])


def read_sweep(options: SweepOptions, given: Arguments) -> Sweep:
    """Returns the axes of a plan. `given` are options of finetune for all rows."""
    recipe = dict(read_yaml(options.recipe, "recipe")) if options.recipe else {}
    if recipe.keys() & (declared(PlanOptions).keys() - {"data_dir"}):
        raise ArgumentError.of("recipe", options.recipe, "is a plan; give it as --config")
    for_all = checked(fields_of(RunOptions), merged(recipe, options.options), "finetune")
    if options.data_dir:
        for_all["data_dir"] = options.data_dir
    dataset, model = for_all.pop("dataset", None), for_all.pop("model", RunOptions.model)
    algorithm = for_all.pop("algorithm", RunOptions.algorithm)
    if not (options.datasets or dataset):
        raise ArgumentError.of("datasets", None, "give --datasets NAME, such as rotated_digits")
    if options.rows:
        for name in ("models", "algorithms"):
            if vars(options)[name]:
                raise ArgumentError.of(name, vars(options)[name], "rows name their own; leave it out, or --rows")
        rows = read_rows(options.rows, {"model": model, "algorithm": algorithm})
    else:
        names = {name: name for name in options.models or ()} or {Path(options.recipe or model).stem: model}
        pairs = product(names.items(), options.algorithms or [algorithm])
        rows = [Row(name, {"model": value, "algorithm": method}) for (name, value), method in pairs]
    return Sweep(
        datasets=options.datasets or [dataset],
        rows=rows,
        protocols=options.protocols,
        trial_seeds=options.trial_seeds,
        hparams_seeds=options.hparams_seeds,
        domains=options.domains,
        options=for_all,
        given=given,
    )


def make_job(options: LaunchOptions, output: str, run: PlannedRun, imports: Sequence[str]) -> Job:
    """Turns a planned run into a command, and checks that a run in its folder has the same options."""
    if Path(output).exists() and not Path(output).is_dir():
        raise ArgumentError.of("output", output, "is a file; give the folder of all runs")
    values = {**cpu_share(options), **run.options, "output": output, "experiment": run.name}
    folder = Path(output, run.name)
    if (folder / "args.yaml").exists():
        planned, recorded = {**DEFAULTS, **values}, read_arguments(folder / "args.yaml", "output")
        if differing := differences(planned, recorded, get_benchmark(values["dataset"])):
            remedy = f"holds a run with other options ({'; '.join(differing)}); give another --output"
            raise ArgumentError.of("output", str(folder), remedy)
        check_files(planned, recorded)
    start = shlex.split(options.run_with) or [sys.executable]
    further = [word for name in imports for word in (OPTION, name)]
    further += [word for entry in values.items() for word in option_words(*entry)]
    words = (*start, str(FINETUNE), *further, "--resume", "auto")
    return Job(run.name, words, folder, Path(output, "logs", f"{run.name}.log"))


def cpu_share(options: LaunchOptions) -> Arguments:
    """Returns the option of finetune by which runs at the same time share the CPU."""
    return {"cpu_threads": max(1, available_cpus() // options.jobs)} if options.jobs > 1 else {}


def check_files(planned: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Checks that data and initial weights are those of a recorded run."""
    if recorded.get("weights_sha256"):
        files = weights_files(planned)
        check_weights_files(recorded, {**planned, "weights_sha256": sha256_of(*files) if files else None})
    if digests := recorded.get("domain_digests"):
        columns = tuple(dict(planned.get("columns") or {}).items())
        bands = tuple(recorded.get("bands") or ()) or planned["in_chans"]
        place = (planned["dataset"], planned["data_dir"])
        now = digests_of(*place, tuple(planned["metadata_columns"] or ()), bands, columns)
        if change := difference(digests, now, FILES):
            remedy = f"holds a run on other data: {change}; give another --output"
            raise ArgumentError.of("output", str(Path(planned["output"], planned["experiment"])), remedy)


@cache
def digests_of(
    dataset: str,
    data_dir: str | None,
    metadata_columns: tuple[str, ...],
    bands: tuple[str, ...] | int,
    columns: tuple[tuple[str, str], ...],
) -> Fingerprint:
    """Computes the fingerprint of a data set once for all runs."""
    return fingerprint(get_benchmark(dataset).read(data_dir, metadata_columns, bands, columns=dict(columns)))


sha256_of = cache(sha256)  # the weights of many runs


def slots(options: LaunchOptions) -> list[dict[str, str]]:
    """Returns the environment variables of each local run that goes on at the same time."""
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in options.gpus] if options.gpus else [{}] * options.jobs


def show_status(jobs: Sequence[Job]) -> None:
    """Prints the runs by state."""
    states = [job.state() for job in jobs]
    show_line(", ".join(f"{states.count(state)} {state}" for state in STATES))
    for state in STATES[1:]:
        for job, job_state in zip(jobs, states, strict=True):
            if job_state == state:
                progress = f"  {job.progress()}" if state == "running" else ""
                show_line(f"{state:<10} {job.name}{progress}" + (f"  (log: {job.log})" if job.log.exists() else ""))


def run_locally(jobs: Sequence[Job], environments: Sequence[Mapping[str, str]]) -> list[Job]:
    """Runs jobs, prints how each ended and how long the rest may take, and returns those that failed."""
    failed, begun = [], time.monotonic()
    for number, (job, status, seconds) in enumerate(run_jobs(jobs, environments), start=1):
        state = job.state() + (" already, left alone" if status is None else "")
        rest = duration((time.monotonic() - begun) / number * (len(jobs) - number))
        left = f", {rest} left" if number < len(jobs) else ""
        show_line(f"[{number}/{len(jobs)}] {state} {job.name} ({seconds:.0f} s{left})")
        if status is not None and state != "finished":
            failed.append(job)
            show_line(f"  exit status {status}; the end of {job.log}:\n{tail(job.log)}")
    return failed


def duration(seconds: float) -> str:
    """Formats a time in words, such as 5 min or 2.5 h."""
    if seconds < 5400:
        return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def show_plan(options: LaunchOptions, plan: Sweep) -> None:
    """Prints how many runs a plan has, and why."""
    show_line(indent(describe_plan(plan), "# " if options.dry_run else ""))


def launch(options: LaunchOptions, output: str, plan: Sweep, imports: Sequence[str] = ()) -> bool:
    """Runs a plan, or prints its commands or its status. Returns whether all of its runs are finished."""
    jobs = [make_job(options, output, run, imports) for run in plan_runs(plan)]
    todo = [job for job in jobs if job.state() not in ("finished", "running")]
    if options.status:
        show_status(jobs)
    elif options.dry_run:
        show_line("\n".join(shlex.join(job.command) for job in todo))
    elif options.launcher == "slurm":
        for job, handle in submit_jobs(todo, Path(output, "slurm"), dict(options.slurm)) if todo else ():
            show_line(f"{handle.job_id} {job.name}")
    else:
        show_line(f"{len(jobs) - len(todo)} are finished or running, {len(todo)} to do")
        if failed := run_locally(todo, slots(options)):
            names = ", ".join(job.name for job in failed)
            raise ProcessLostError(f"{len(failed)} of {len(todo)} runs failed: {names}")
    return all(job.is_finished for job in jobs)


def with_chosen_rates(
    options: LaunchOptions, output: str, plan: Sweep, rates: Sequence[float] | None, imports: Sequence[str] = ()
) -> Sweep | None:
    """Returns a plan with the learning rate of each row that training-domain validation chooses.

    Without rates to try, the plan stays as it is.
    Runs with each rate go into another folder, with a trial seed that the plan does not have. Rows that state a rate
    keep it. The result is None while these runs are not finished.
    """
    open_rows = [row for row in plan.rows if row.options.get("lr") is None]
    tried = {f"{row.label}_lr{rate:g}": (row, rate) for row, rate in product(open_rows, rates or ())}
    if not tried:
        return plan
    rows = [Row(name, {**row.options, "lr": rate, "row": name}) for name, (row, rate) in tried.items()]
    trial = replace(plan, rows=rows, trial_seeds=[max(plan.trial_seeds) + 1])
    show_plan(options, trial)
    folder = f"{Path(output)}-rates"
    if not launch(options, folder, trial, imports):
        return None
    scores: dict[str, list[float]] = {name: [] for name in tried}
    for run in find_runs([f"{folder}/{run.name}" for run in plan_runs(trial)])[0]:
        score = validation_score(training_domain_validation(run.records))
        scores[run.args["row"]].append(-inf if isnan(score) else score)
    for row in open_rows:
        if all(fmean(scores[name]) == -inf for name, (of, _) in tried.items() if of is row):
            raise ArgumentError.of("rates", rates, f"{row.label} has no validation images to choose by; leave them out")
    chosen: dict[str, float] = {}
    # The best last, and of equal ones the lowest rate
    for name in sorted(scores, key=lambda name: (fmean(scores[name]), -tried[name][1])):
        row, rate = tried[name]
        chosen[row.label] = rate
    show_line("learning rates by validation: " + ", ".join(f"{name} {rate:g}" for name, rate in chosen.items()))
    rates_of = {name: {"lr": rate} for name, rate in chosen.items()}
    chosen_rows = [replace(row, options={**row.options, **rates_of.get(row.label, {})}) for row in plan.rows]
    return replace(plan, rows=chosen_rows)


def sweep(options: SweepOptions, given: Arguments, imports: Sequence[str] = ()) -> None:
    """Prints the plan, and runs it or prints the commands or the status."""
    plan = with_chosen_rates(options, options.output, read_sweep(options, given), options.rates, imports)
    if plan is None:
        return
    show_plan(options, plan)
    if launch(options, options.output, plan, imports) and not (options.status or options.dry_run):
        show_line(f"report: {command('report')} {shlex.quote(options.output)}")
