"""Scores a checkpoint on a benchmark: accuracy, macro-F1 and calibration by domain, the worst domain, the confusions.

A run of finetune.py, on the data and with the splits that it was trained with:

    python tools/evaluate.py --model local-dir:output/RUN/best

Any other checkpoint, with the domains marked that it has not seen:

    python tools/evaluate.py --model hf-hub:ORGANIZATION/NAME --dataset folder --data-dir DATA --test-domains 1

Nothing is trained: the checkpoint's classes must be those of the data, in any order. `--output DIR` writes
metrics.json, per_domain.csv, confusion.csv (rows are the images' classes) and, where matplotlib is installed,
confusion.png. Under accelerate launch the processes share the images.
"""

import argparse
import csv
import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: idle threads must not hold a core that others need

from accelerate import Accelerator

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.analysis.canvas import optional_picture
from timm_moe_dg.analysis.plots import plot_confusion
from timm_moe_dg.cli.arguments import add_model_options, parse_arguments, positive_int, processes
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.cli.escape import csv_cell
from timm_moe_dg.data import (
    BENCHMARKS,
    Domain,
    EvaluationImages,
    drop_unreadable,
    evaluation_loader,
    evaluation_only,
    evaluation_transform,
    get_benchmark,
)
from timm_moe_dg.errors import ArgumentError, ProtocolError
from timm_moe_dg.finetuning.launch import check_world_size
from timm_moe_dg.finetuning.plan import make_splits
from timm_moe_dg.finetuning.progress import role_line
from timm_moe_dg.metrics import confusion_matrix
from timm_moe_dg.networks.build import data_config
from timm_moe_dg.networks.trained import class_positions, load_trained, takes_metadata
from timm_moe_dg.protocols import role_scores
from timm_moe_dg.protocols.assessment import SPLITS, Assessment, Scores, assess, restrict
from timm_moe_dg.protocols.evaluation import Answers, answer
from timm_moe_dg.protocols.options import DATA, DEFAULTS, having
from timm_moe_dg.storage.atomic import all_or_nothing
from timm_moe_dg.storage.json_text import json_text
from timm_moe_dg.storage.run_folder import run_arguments

FILES = ("metrics.json", "per_domain.csv", "confusion.csv", "confusion.png")
OF_THE_RUN = having(DATA)  # as finetune.py has them


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-c", "--config", metavar="YAML", help="file of option values; the command line overrides it")
    add_model_options(parser)
    group = parser.add_argument_group("data (default: those of the run that the model lies in, if it does)")
    add = group.add_argument
    add("--dataset", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}")
    add("--data-dir", metavar="DIR", help="folder of the images, for data sets that do not come with a package")
    seen = "positions of the domains that the model was not trained on; they are marked, and averaged besides"
    add("--test-domains", "--test-envs", type=int, nargs="+", metavar="I", help=seen)
    add("--split", choices=SPLITS, default="all", help="which part of each domain (default: %(default)s)")
    add("--trial-seed", type=int, metavar="N", help="decides the parts (default otherwise: 0)")
    add("--holdout-fraction", type=float, help="share of a domain that is its out part (default otherwise: 0.2)")
    photographs = "split by photograph, as finetune.py does with this option (default otherwise: no)"
    add("--split-by-photograph", action=argparse.BooleanOptionalAction, help=photographs)
    skipped = "leave out, and count, images that cannot be decoded (default otherwise: stop and name the first)"
    add("--skip-unreadable", action=argparse.BooleanOptionalAction, help=skipped)
    mode = "MoGE: which experts answer (default: as in that run, else routed)"
    add("--expert-mode", choices=("routed", "shared"), help=mode)
    add("-b", "--batch-size", type=positive_int, default=64, metavar="N", help="images (default: %(default)s)")
    add(
        "-j",
        "--workers",
        type=processes,
        default=2,
        metavar="N",
        help="loader processes; 0 for none (default: %(default)s)",
    )
    add = parser.add_argument_group("output").add_argument
    add("--output", metavar="DIR", help=f"folder for {', '.join(FILES)} (default: the table on the screen alone)")
    add("--force", action=argparse.BooleanOptionalAction, default=False, help="replace such files in the folder")
    return parser


def settle(args: argparse.Namespace) -> None:
    """Fills in, in place, what was left to the run that the model lies in."""
    run = run_arguments(args.model)
    defaults = {**DEFAULTS, "dataset": None, **run}
    if args.dataset not in (None, run.get("dataset")):  # other data than the run's: its domains mean nothing there
        defaults |= {"data_dir": None, "test_domains": None}
    for name in OF_THE_RUN:
        if vars(args)[name] is None:
            setattr(args, name, defaults.get(name))
    if args.dataset is None:
        raise ArgumentError.of("dataset", None, f"give --dataset, one of {', '.join(BENCHMARKS)}")


def read_domains(args: argparse.Namespace) -> Sequence[Domain]:
    """Reads the data and checks the test domains against it."""
    domains = get_benchmark(args.dataset).read(args.data_dir)
    if args.skip_unreadable:
        domains, _ = drop_unreadable(domains, args.workers)
    if args.test_domains is None:
        args.test_domains = evaluation_only(domains)
    if not set(args.test_domains) <= set(range(len(domains))):
        listing = ", ".join(f"{position} {domain.name}" for position, domain in enumerate(domains))
        raise ProtocolError.of("test_domains", args.test_domains, f"name domains out of: {listing}")
    return domains


def ask(args: argparse.Namespace, domains: Sequence[Domain], accelerator: Accelerator) -> Answers:
    """Loads the network and asks it about every image; all processes take part."""
    splits = make_splits(
        domains,
        [at for at in range(len(domains)) if at not in args.test_domains] if args.split_by_photograph else [],
        trial_seed=args.trial_seed,
        holdout_fraction=args.holdout_fraction,
        split_by_photograph=args.split_by_photograph,
    )
    size = args.img_size or (None if ":" in args.model else get_benchmark(args.dataset).image_size)
    network = load_trained(
        args.model,
        pretrained=args.pretrained,
        initial_checkpoint=args.initial_checkpoint,
        img_size=size,
        model_kwargs=dict(args.model_kwargs),
    )
    positions = class_positions(network, domains[0].classes)
    with_metadata = takes_metadata(network, domains)
    if args.expert_mode:
        if not hasattr(network, "set_expert_mode"):
            raise ArgumentError.of("expert_mode", args.expert_mode, f"{args.model} has no metadata-routed experts")
        network.set_expert_mode(args.expert_mode)
    config = data_config(network, size)
    view = evaluation_transform(config["input_size"][1:], config["mean"], config["std"])
    images = EvaluationImages(domains, restrict(splits, args.split), view, with_metadata)
    on_cpu = accelerator.device.type == "cpu"
    loader = evaluation_loader(images, batch_size=args.batch_size, workers=args.workers, pin_memory=not on_cpu)
    network = network.to(accelerator.device)
    return answer(network, accelerator.prepare(loader), positions, accelerator.gather_for_metrics)


def table(found: Assessment, names: Sequence[str], test_domains: Sequence[int]) -> str:
    """Formats the scores, one row per domain."""
    width = max(len("all images"), *map(len, names))
    lines = [f"{'domain':<{width}}  role  {'images':>7}  accuracy  F1-macro     ECE"]
    for position, (name, scores) in enumerate(zip(names, found.domains, strict=True)):
        lines.append(row(f"{name:<{width}}  {'test' if position in test_domains else '':<4}", scores))
    lines.append(row(f"{'all images':<{width}}  {'':<4}", found.overall))
    lines.append(f"average of domains {found.average:.4f}")
    if test_domains:
        lines.append(f"average of test domains {found.test_average:.4f}")
    worst = found.domains[found.worst]
    return "\n".join([*lines, f"worst domain {names[found.worst]} {worst.accuracy:.4f} ({worst.images} images)"])


def row(label: str, scores: Scores) -> str:
    """Formats one row."""
    return f"{label}  {scores.images:7d}  {scores.accuracy:8.4f}  {scores.f1_macro:8.4f}  {scores.ece:6.4f}"


def write(
    folder: Path, args: argparse.Namespace, answers: Answers, found: Assessment, domains: Sequence[Domain], roles: Any
) -> None:
    """Writes the files, without the picture where it cannot be drawn."""
    names, classes = [domain.name for domain in domains], domains[0].classes
    by_domain = {name: scores._asdict() for name, scores in zip(names, found.domains, strict=True)}
    metrics = {
        **{name: vars(args)[name] for name in ("model", "initial_checkpoint", *OF_THE_RUN, "split", "expert_mode")},
        "domains": by_domain,
        "overall": found.overall._asdict(),
        "average_accuracy": found.average,
        "test_average_accuracy": found.test_average,
        "worst_domain": names[found.worst],
        **({"roles": roles} if roles else {}),
    }
    (folder / "metrics.json").write_text(json_text(metrics, indent=2))
    with (folder / "per_domain.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["domain", "test", *Scores._fields])
        writer.writerows(
            [csv_cell(name), int(i in args.test_domains), *found.domains[i]] for i, name in enumerate(names)
        )
    matrix = confusion_matrix(answers.predicted, answers.target, len(classes))
    with (folder / "confusion.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["class", *map(csv_cell, classes)])
        writer.writerows([csv_cell(name), *counts] for name, counts in zip(classes, matrix.tolist(), strict=True))
    with optional_picture(folder / "confusion.png") as path:
        plot_confusion(matrix, classes, path)


def evaluate(args: argparse.Namespace) -> None:
    """Runs the whole of it."""
    accelerator = Accelerator()
    check_world_size(os.environ, accelerator.num_processes)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("timm_moe_dg").setLevel(logging.INFO if accelerator.is_main_process else logging.WARNING)
    settle(args)
    delivers = args.output and accelerator.is_main_process
    with all_or_nothing(args.output, FILES, overwrite=args.force) if delivers else nullcontext() as folder:
        domains = read_domains(args)
        answers = ask(args, domains, accelerator)
        if accelerator.is_main_process:
            found = assess(answers, len(domains), args.test_domains)
            roles = role_scores(answers, domains) if args.split != "out" else {}
            print(f"{args.model} on {args.dataset}, {args.split} images of each domain")
            print(table(found, [domain.name for domain in domains], args.test_domains))
            print("\n".join(role_line(role, scores).strip() for role, scores in roles.items()), end="\n" * bool(roles))
            if folder:
                write(folder, args, answers, found, domains, roles)
    accelerator.end_training()


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    evaluate(parse_arguments(build_parser(), argv))


if __name__ == "__main__":
    main()
