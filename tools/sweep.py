r"""Runs a protocol: every held-out domain with every model, method and seed.

    timm-moe-dg sweep --datasets rotated_digits --output output/digits \
        --models gmoe_tiny_patch16 deit_tiny_patch16_224 -- --steps 300
    timm-moe-dg sweep --recipe gmoe_small --datasets PACS --data-dir DATA
    timm-moe-dg sweep -c digits --dry-run

Words after -- are options of finetune for every run. The same command again
skips finished runs and resumes the others. Files for --recipe hold options of
finetune, files for -c those of sweep. Both take the name of a recipe that
comes with the package.
On Slurm, --launcher slurm submits the runs as one array:

    timm-moe-dg sweep ... --launcher slurm --slurm slurm_partition=gpu
"""

import argparse
import ast
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any

from timm_moe_dg.cli.arguments import available_cpus, option_words, parse_arguments, read_yaml
from timm_moe_dg.cli.tool import OPTION, ToolParser, command, program, tool, tool_parser
from timm_moe_dg.cli.values import key_value, position_or_name, positive_int
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.inspection import FILES, Fingerprint, difference, fingerprint
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.jobs import STATES, Job, run_jobs, submit_jobs, tail
from timm_moe_dg.protocols.options import run_parser
from timm_moe_dg.protocols.planner import (
    OFFICIAL,
    PER_REGION,
    PLANNED,
    PROTOCOLS,
    Choice,
    PlannedRun,
    Sweep,
    describe_plan,
    plan_runs,
)
from timm_moe_dg.protocols.run_identity import (
    check_weights_files,
    differences,
    read_arguments,
    read_repeatable,
    sha256,
    weights_files,
)

# What --help shows; --help-all shows every option
MAIN = ["config", "recipe", "datasets", "data_dir", "algorithms", "models", "protocols", "domains", "trial_seeds"]
MAIN += ["output", "launcher", "jobs", "dry_run", "status"]
FINETUNE = Path(__file__).with_name("finetune.py")


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("sweep.py", __doc__, "[options] [-- options of finetune]", main=MAIN, config=True)
    group = parser.add_argument_group("plan")
    add = group.add_argument
    recipe = "file or name of options of finetune for every run, such as gmoe_small"
    add("--recipe", metavar="YAML", help=recipe)
    add("--datasets", type=entry, nargs="+", metavar="NAME", help="data sets; required, unless the recipe names one")
    add("--data-dir", metavar="DIR", help="folder of the images, for every data set")
    add("--algorithms", type=entry, nargs="+", metavar="NAME", help="training methods (default: the recipe's, or ERM)")
    models = "timm models (default: the recipe's, or gmoe_small_patch16)"
    add("--models", type=entry, nargs="+", metavar="NAME", help=models)
    choices = [*PROTOCOLS, OFFICIAL, PER_REGION]
    held_out = f"what to hold out, of {', '.join(choices)} (default: leave_one_domain_out)"
    names, default = ("--protocols", "--protocol"), ["leave_one_domain_out"]
    add(*names, nargs="+", choices=choices, metavar="NAME", default=default, help=held_out)
    only = "only these domains, by name or position (default: all)"
    add("--domains", type=position_or_name, nargs="+", metavar="DOMAIN", help=only)
    add("--trial-seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="repetitions (default: 0 1 2)")
    seeds = "random draws of hyper-parameters; 0 takes the defaults (default: 0)"
    add("--hparams-seeds", type=int, nargs="+", default=[0], metavar="N", help=seeds)
    options = "options of finetune for every run, as an alternative to words after --"
    add("--options", type=key_value, nargs="*", default=[], metavar="KEY=VALUE", help=options)
    add("--output", default="output/sweep", metavar="DIR", help="folder of all runs (default: %(default)s)")
    _add_launch_options(parser.add_argument_group("launch"))
    return parser


def _add_launch_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--launcher", choices=("local", "slurm"), default="local", help="where the runs start (default: %(default)s)")
    jobs = "runs at a time on this machine (default: %(default)s)"
    add("--jobs", type=positive_int, default=1, metavar="N", help=jobs)
    add("--gpus", nargs="+", metavar="I", help="GPUs, with one run at a time on each, instead of --jobs")
    prefix = "program that starts finetune, such as 'accelerate launch --num_processes 2' (default: this Python)"
    add("--run-with", type=shlex.split, default=[sys.executable], metavar="COMMAND", help=prefix)
    parameters = "parameters of submitit's AutoExecutor"
    add("--slurm", type=key_value, nargs="*", default=[], metavar="KEY=VALUE", help=parameters)
    add("--dry-run", action="store_true", help="print the commands of the remaining runs, and stop")
    add("--status", action="store_true", help="print which runs are finished, running, failed or missing, and stop")


def entry(text: str) -> str | dict[str, Any]:
    """Reads a name, or a table such as {'model': NAME, 'model_kwargs': {...}}."""
    if not text.startswith("{"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a name nor a table ({error})") from error


def read_sweep(args: argparse.Namespace) -> Sweep:
    """Returns the axes of the plan from the command line."""
    recipe = dict(read_yaml(args.recipe, "recipe")) if args.recipe else {}
    if not recipe.keys().isdisjoint(("datasets", "models", "algorithms", "protocols", "trial_seeds", "options")):
        raise ArgumentError.of("recipe", args.recipe, "is a plan; give it as --config")
    model = recipe.pop("model", "gmoe_small_patch16")
    defaults = {
        "dataset": recipe.pop("dataset", None),
        "algorithm": recipe.pop("algorithm", "ERM"),
        "model": {"model": model, "label": Path(args.recipe).stem} if args.recipe else model,
    }
    if not (args.datasets or defaults["dataset"]):
        raise ArgumentError.of("datasets", None, "give --datasets NAME, such as rotated_digits")
    axes = {
        f"{axis}s": [Choice.of(axis, value) for value in vars(args)[f"{axis}s"] or [defaults[axis]]]
        for axis in defaults
    }
    return Sweep(
        **axes,
        protocols=args.protocols,
        trial_seeds=args.trial_seeds,
        hparams_seeds=args.hparams_seeds,
        domains=args.domains,
        options={**recipe, **dict(args.options), **({"data_dir": args.data_dir} if args.data_dir else {})},
    )


def make_job(args: argparse.Namespace, run: PlannedRun, words: Sequence[str], parser: ToolParser) -> Job:
    """Turns a planned run into a command, and checks that a run in its folder has the same options."""
    options = {**run.options, "output": args.output, "experiment": run.name}
    imports = [word for name in getattr(args, "imports", ()) for word in (OPTION, name)]
    words = [*imports, *(word for entry in options.items() for word in option_words(*entry)), *words]
    parsed = vars(parse_arguments(parser, words, read=read_repeatable))
    for name in (*PLANNED, "output", "experiment"):
        if parsed[name] != options[name]:
            raise ArgumentError.of(name, parsed[name], "is decided by the sweep; see sweep --help")
    folder = Path(args.output, run.name)
    if (folder / "args.yaml").exists():
        recorded = read_arguments(folder / "args.yaml", "output")
        if differing := differences(parsed, recorded, get_benchmark(options["dataset"])):
            remedy = f"holds a run with other options ({'; '.join(differing)}); give another --output"
            raise ArgumentError.of("output", str(folder), remedy)
        check_files(parsed, recorded)
    share = ["--cpu-threads", str(max(1, available_cpus() // args.jobs))] if args.jobs > 1 else []
    words = (*args.run_with, str(FINETUNE), *share, *words, "--resume", "auto")
    return Job(run.name, words, folder, Path(args.output, "logs", f"{run.name}.log"))


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


def slots(args: argparse.Namespace) -> list[dict[str, str]]:
    """Returns the environment variables of each local run that goes on at the same time."""
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in args.gpus] if args.gpus else [{}] * args.jobs


def show_status(jobs: Sequence[Job]) -> None:
    """Prints the runs by state."""
    states = [job.state() for job in jobs]
    print(", ".join(f"{states.count(state)} {state}" for state in STATES))
    for state in STATES[1:]:
        for job, job_state in zip(jobs, states, strict=True):
            if job_state == state:
                progress = f"  {job.progress()}" if state == "running" else ""
                print(f"{state:<10} {job.name}{progress}" + (f"  (log: {job.log})" if job.log.exists() else ""))


def run_locally(jobs: Sequence[Job], environments: Sequence[Mapping[str, str]]) -> list[Job]:
    """Runs jobs, prints how each ended, and returns those that failed."""
    failed = []
    for number, (job, status, seconds) in enumerate(run_jobs(jobs, environments), start=1):
        state = job.state() + (" already, left alone" if status is None else "")
        print(f"[{number}/{len(jobs)}] {state} {job.name} ({seconds:.0f} s)", flush=True)
        if status is not None and state != "finished":
            failed.append(job)
            print(f"  exit status {status}; the end of {job.log}:\n{tail(job.log)}", flush=True)
    return failed


def sweep(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Prints the plan, and runs it or prints the commands or the status."""
    if Path(args.output).exists() and not Path(args.output).is_dir():
        raise ArgumentError.of("output", args.output, "is a file; give the folder of all runs")
    plan = read_sweep(args)
    runs = plan_runs(plan)
    print(indent(describe_plan(plan), "# " if args.dry_run else ""))
    parser = run_parser()
    jobs = [make_job(args, run, words, parser) for run in runs]
    todo = [job for job in jobs if job.state() not in ("finished", "running")]
    if args.status:
        show_status(jobs)
    elif args.dry_run:
        print("\n".join(shlex.join(job.command) for job in todo))
    elif args.launcher == "slurm":
        for job, handle in submit_jobs(todo, Path(args.output, "slurm"), dict(args.slurm)) if todo else ():
            print(f"{handle.job_id} {job.name}")
    else:
        print(f"{len(jobs) - len(todo)} are finished or running, {len(todo)} to do", flush=True)
        failed = run_locally(todo, slots(args))
        if failed:
            names = ", ".join(job.name for job in failed)
            raise SystemExit(f"{program('sweep.py')}: {len(failed)} of {len(todo)} runs failed: {names}")
        print(f"report: {command('report')} {shlex.quote(args.output)}")


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the runs are asked to save a checkpoint
    try:
        sweep(parse_arguments(build_parser(), words[:split]), words[split + 1 :])
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on") from None


if __name__ == "__main__":
    main()
