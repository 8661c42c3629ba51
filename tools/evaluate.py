r"""Scores a model by domain: accuracy, macro-F1, calibration and confusions.

    timm-moe-dg evaluate --model output/RUN
    timm-moe-dg evaluate --model hf-hub:OWNER/NAME --dataset folder \
        --data-dir DATA --test-domains sketch

The first command scores a run on its own data and splits. The overall scores
are those of the held-out domains. With --output, tables and pictures are
written to a folder.
"""

import argparse
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
from accelerate import Accelerator

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.analysis.evaluated import Evaluated
from timm_moe_dg.analysis.evaluation_files import FILES, save_features, score_table, write_files
from timm_moe_dg.analysis.evaluation_projection import METHODS
from timm_moe_dg.cli.arguments import add_loader_options, add_model_options, model_keywords, parse_arguments
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.cli.escape import one_line
from timm_moe_dg.cli.parser import ToolParser, tool_parser
from timm_moe_dg.cli.values import position_or_name, positive_int
from timm_moe_dg.data import (
    BENCHMARKS,
    Domain,
    EvaluationImages,
    Split,
    drop_unreadable,
    evaluation_loader,
    evaluation_only,
    evaluation_transform,
    get_benchmark,
)
from timm_moe_dg.data.fingerprint import fingerprint, with_readable
from timm_moe_dg.data.splits import domain_positions
from timm_moe_dg.errors import ArgumentError, ProtocolError
from timm_moe_dg.export.engine import add_engine_option, make_engine
from timm_moe_dg.finetuning.launch import check_world_size
from timm_moe_dg.finetuning.plan import make_splits
from timm_moe_dg.finetuning.progress import role_line
from timm_moe_dg.networks.build import check_channels, data_config
from timm_moe_dg.networks.trained import class_positions, load_trained, takes_metadata
from timm_moe_dg.protocols.assessment import SPLITS, restrict
from timm_moe_dg.protocols.domain_roles import Recognized, recognize, unseen_domains
from timm_moe_dg.protocols.evaluation import collect_outputs
from timm_moe_dg.protocols.options import DATA, DEFAULTS, options_with
from timm_moe_dg.storage.atomic import all_or_nothing
from timm_moe_dg.storage.run_folder import run_arguments

# What --help shows; --help-all shows every option
MAIN = ["model", "pretrained", "initial_checkpoint", "model_kwargs", "dataset", "data_dir", "test_domains"]
MAIN += ["domains", "split", "batch_size", "workers", "output", "save_features", "force"]
HELD_OUT, ALL = "held-out", "all"
RUN_OPTIONS = options_with(DATA)  # options of finetune.py; their default is the run's value
MODEL_OPTIONS = ("expert_mode", "coverage_radius")


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("evaluate.py", __doc__, "--model NAME [options]", main=MAIN, config=True)
    add_model_options(parser)
    group = parser.add_argument_group("data (default for the model of a run: as in that run)")
    add = group.add_argument
    add("--dataset", metavar="NAME", help="data set; finetune --list-datasets names all")
    add("--data-dir", metavar="DIR", help="folder of the images")
    columns = "MoGE: numeric columns of metadata.csv that the model reads, beside coordinates"
    add("--metadata-columns", nargs="+", metavar="COLUMN", help=columns)
    add("--in-chans", type=positive_int, metavar="N", help="number of bands (default otherwise: 3)")
    unseen = "domains that the model was not trained on, by name or position"
    add("--test-domains", "--test-envs", type=position_or_name, nargs="+", metavar="DOMAIN", help=unseen)
    counted = "domains of the overall scores: names, held-out, or all (default: held-out, if known)"
    add("--domains", type=position_or_name, nargs="+", metavar="DOMAIN", help=counted)
    add("--split", choices=SPLITS, default="all", help="part of each domain to score (default: %(default)s)")
    add("--trial-seed", type=int, metavar="N", help="repetition, which decides the splits (default otherwise: 0)")
    share = "share of each domain's images for validation (default otherwise: 0.2)"
    add("--holdout-fraction", type=float, metavar="X", help=share)
    photographs = "keep all versions of a photograph in the same split (default otherwise: off)"
    add("--split-by-photograph", action=argparse.BooleanOptionalAction, help=photographs)
    skipped = "leave out damaged images (default otherwise: stop at the first)"
    add("--skip-unreadable", action=argparse.BooleanOptionalAction, help=skipped)
    add_loader_options(group)
    add_engine_option(parser.add_argument_group("computation"))
    add = parser.add_argument_group("output").add_argument
    add("--output", metavar="DIR", help="folder for tables and pictures (default: print the table only)")
    add("--save-features", type=Path, metavar="FILE", help="NPZ file for the classifier's inputs")
    add("--projection", choices=METHODS, default="pca", help="method of projection.png (default: %(default)s)")
    add("--force", action=argparse.BooleanOptionalAction, default=False, help="replace existing files")
    return parser


def fill_in(args: argparse.Namespace) -> None:
    """Fills in options that were not given, from the run that the model belongs to."""
    run = run_arguments(args.model)
    # Positions of the run's domains mean nothing in other data; `read_domains` finds these domains
    defaults = {**DEFAULTS, "dataset": None, **run, "test_domains": None}
    if args.dataset not in (None, run.get("dataset")):
        defaults |= {"data_dir": None}
    for name in RUN_OPTIONS:
        if vars(args)[name] is None:
            setattr(args, name, defaults.get(name))
    if args.dataset is None:
        raise ArgumentError.of("dataset", None, f"give --dataset, one of {', '.join(BENCHMARKS)}")


def read_domains(args: argparse.Namespace) -> tuple[Sequence[Domain], list[Recognized] | None]:
    """Reads the data, and finds the run's domains in it; in `args`, positions of domains replace their names."""
    run = run_arguments(args.model)
    domains = get_benchmark(args.dataset).read(args.data_dir, args.metadata_columns or (), args.in_chans)
    digests = fingerprint(domains) if run.get("domain_digests") else []
    if args.skip_unreadable:
        domains, _ = drop_unreadable(domains, args.workers)
        digests = with_readable(digests, domains) if digests else []
    known = recognize(run, domains, digests)
    if args.test_domains is not None:
        args.test_domains = find(args, "test_domains", domains)
        if trained := [domains[index].name for index in args.test_domains if known and known[index].trained]:
            raise ArgumentError.of("test_domains", trained, "the run trained on these; use --domains to score them")
    elif known:
        args.test_domains = [index for index, domain in enumerate(known) if not domain.trained]
    else:
        args.test_domains = evaluation_only(domains)
    if args.domains == [ALL] or (args.domains is None and not args.test_domains):
        args.domains = list(range(len(domains)))
    elif args.domains in (None, [HELD_OUT]):
        args.domains = unseen_domains(domains, args.test_domains, roles(domains, known)) or args.test_domains
    else:
        args.domains = find(args, "domains", domains)
    if not args.domains:
        raise ArgumentError.of("domains", HELD_OUT, "no domain is marked as held out; name some with --test-domains")
    return domains, known


def find(args: argparse.Namespace, option: str, domains: Sequence[Domain]) -> list[int]:
    """Positions of the domains that an option names, without repetition."""
    names = [domain.name for domain in domains]
    positions = domain_positions(vars(args)[option], names, option)
    if not set(positions) <= set(range(len(domains))):
        listing = ", ".join(f"{position} {name}" for position, name in enumerate(names))
        raise ProtocolError.of(option, vars(args)[option], f"name domains out of: {listing}")
    return list(dict.fromkeys(positions))


def predict(
    args: argparse.Namespace, domains: Sequence[Domain], known: Sequence[Recognized] | None, accelerator: Accelerator
) -> Evaluated:
    """Loads the network and predicts every image; all processes take part."""
    train_domains = [index for index in range(len(domains)) if index not in args.test_domains]
    splits = make_splits(
        domains,
        train_domains if args.split_by_photograph else [],
        trial_seed=args.trial_seed,
        holdout_fraction=args.holdout_fraction,
        split_by_photograph=args.split_by_photograph,
        # A split depends on the domain's position in the run's data
        positions=[index if d.position is None else d.position for index, d in enumerate(known)] if known else None,
    )
    for index, domain in enumerate(known or ()):
        if domain.trained and domain.changed:  # which of its images were trained on cannot be told
            splits[index] = Split(np.arange(len(domains[index])), np.arange(0))
    size = args.img_size or (None if ":" in args.model else get_benchmark(args.dataset).image_size)
    network = load_trained(args.model, **{**model_keywords(args), "img_size": size})
    check_channels(network, args.in_chans)
    positions = class_positions(network, domains[0].classes)
    with_metadata = takes_metadata(network, domains, args.metadata_columns)
    config = data_config(network, size)
    view = evaluation_transform(config["input_size"][1:], config["mean"], config["std"])
    images = EvaluationImages(domains, restrict(splits, args.split), view, with_metadata=with_metadata)
    on_cpu = accelerator.device.type == "cpu"
    loader = evaluation_loader(images, batch_size=args.batch_size, workers=args.workers, pin_memory=not on_cpu)
    features = bool(args.output or args.save_features)
    engine = make_engine(args, network.to(accelerator.device), config["input_size"], features)
    answers = collect_outputs(engine, accelerator.prepare(loader), positions, accelerator.gather_for_metrics)
    name = run_arguments(args.model).get("model", args.model)
    engine_name = "onnxruntime" if args.engine else "torch"
    return Evaluated(name, images, answers, args.test_domains, args.domains, engine_name, roles(domains, known))


def roles(domains: Sequence[Domain], known: Sequence[Recognized] | None) -> list[str]:
    """Describes the part of each domain in training as the run says; empty if it says nothing."""
    return [] if known is None else [part.role(domain) for domain, part in zip(domains, known, strict=True)]


@contextmanager
def outputs(args: argparse.Namespace) -> Iterator[tuple[Path | None, Path | None]]:
    """Yields a folder for results and a file for features, or None; both are complete at the end or do not exist."""
    file = args.save_features
    with ExitStack() as stack:
        folder = stack.enter_context(all_or_nothing(args.output, FILES, overwrite=args.force)) if args.output else None
        parent = file and stack.enter_context(all_or_nothing(file.parent, [file.name], overwrite=args.force))
        yield folder, parent and parent / file.name


def report(args: argparse.Namespace, evaluated: Evaluated, folder: Path | None, features: Path | None) -> None:
    """Prints the table and writes the requested files."""
    heading = f"{args.model} on {args.dataset}, {args.split} images of each domain, by {evaluated.engine}"
    print(one_line(heading))
    print(score_table(evaluated))
    for role, scores in evaluated.roles.items() if args.split != "out" else ():
        print(role_line(role, scores).strip())
    if folder:
        settings = ("model", "initial_checkpoint", *RUN_OPTIONS, "split", *MODEL_OPTIONS)
        write_files(evaluated, folder, {name: vars(args)[name] for name in settings}, args.projection)
        print(f"written to {args.output}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    if features:
        save_features(evaluated, features)


@tool
def main(argv: Sequence[str]) -> None:
    """Scores the checkpoint, on all processes."""
    args = parse_arguments(build_parser(), argv)
    accelerator = Accelerator()
    check_world_size(os.environ, accelerator.num_processes)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("timm_moe_dg").setLevel(logging.INFO if accelerator.is_main_process else logging.WARNING)
    fill_in(args)
    if args.save_features and args.save_features.suffix != ".npz":
        raise ArgumentError.of("save_features", str(args.save_features), "give a file that ends in .npz")
    with outputs(args) if accelerator.is_main_process else nullcontext((None, None)) as places:
        domains, known = read_domains(args)
        evaluated = predict(args, domains, known, accelerator)
        if accelerator.is_main_process:
            report(args, evaluated, *places)
    accelerator.end_training()


if __name__ == "__main__":
    main()
