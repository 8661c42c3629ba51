r"""Averages the weights or the predictions of finished runs.

    timm-moe-dg average output/seed* --output output/soup
    timm-moe-dg average output/seed* --method diwa --output output/diwa
    timm-moe-dg average output/RUN --method wise_ft --output output/wise
    timm-moe-dg average output/RUN --method experts --output output/plain

The runs share data, splits, held-out domains, model and starting weights.
wise_ft averages a run with its start, and writes a run for each --alpha.
experts makes a plain timm network of a mixture. timm loads DIR/best without
this package. Each result is a run folder: evaluate, predict, tables, report,
visualize, export and push take it. An ensemble has several networks: evaluate,
predict and tables take it, and other tools one of its networks, DIR/best/0.

The same command completes an average that was interrupted.
"""

import argparse
import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from accelerate.utils import set_seed
from timm.models import get_model_args
from torch import Tensor, nn

from timm_moe_dg.cli.arguments import add_device_option
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import non_negative_int, run_folder, share
from timm_moe_dg.data import EvaluationImages, Split, evaluation_loader
from timm_moe_dg.data.inspection import difference
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.model import prepare_network
from timm_moe_dg.finetuning.plan import RunPlan, make_plan
from timm_moe_dg.finetuning.run import score
from timm_moe_dg.finetuning.training_data import build_loaders, cover_training_coordinates, step_sampler
from timm_moe_dg.networks.averages import (
    Ensemble,
    evaluation_view,
    match_experts,
    mean_weights,
    merge_experts,
    restricted_selection,
)
from timm_moe_dg.networks.build import data_config, refuse_ensemble, save_network, sha256
from timm_moe_dg.networks.trained import label_names, load_trained, takes_metadata
from timm_moe_dg.protocols.options import SPLITTING, Arguments, DataOptions, ModelOptions, RunOptions
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.protocols.run_identity import check_weights_files, read_arguments, with_defaults
from timm_moe_dg.protocols.selection import summary, validation_score
from timm_moe_dg.results.runs import FinishedRun, find_runs
from timm_moe_dg.storage.run_folder import ARGUMENTS, DONE, RunFolder, run_arguments

METHODS = {
    "uniform": "the mean of all runs' weights",
    "diwa": "the same without runs that lower the validation accuracy",
    "ensemble": "the mean of all runs' probabilities",
    "wise_ft": "the mean of a run's weights and its starting weights",
    "experts": "the mean of a mixture's experts",
}
ALPHAS = [0.0, 0.25, 0.5, 0.75, 1.0]  # of wise_ft
# Methods of one run
ONE_RUN = {"wise_ft": "averages one run with its start", "experts": "merges the experts of one run"}
# Options that averaged runs share
SHARED = ["dataset", "data", "test_domains", "in_chans", "bands", "metadata_columns", *SPLITTING]
SHARED += ["model", "model_kwargs", "router", "num_classes", "img_size", "expert_mode"]
SHARED += ["pretrained", "weights_sha256", "algorithm", "averaging", "average_method", "metric", "reported_split"]
# Options that decide about data and starting weights. Others may need code or packages that are not here
PLANNED = {field.name for table in (DataOptions, ModelOptions) for field in fields(table)}
PLANNED |= {"seed", "eval_train", "metric"}
# Entries of args.yaml by which an interrupted average is recognized
SAME = ("average_method", "average_sha256", "data")
logger = logging.getLogger("timm_moe_dg.average")


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("average.py", __doc__, "RUN [RUN ...] --output DIR [options]")
    add = parser.add_argument
    add("runs", type=run_folder, nargs="+", metavar="RUN", help="folders of finished runs")
    add("--output", type=Path, required=True, metavar="DIR", help="run folder to write")
    listing = "; ".join(f"{name}, {words}" for name, words in METHODS.items())
    add("--method", choices=METHODS, default="uniform", help=f"{listing} (default: %(default)s)")
    alphas = "wise_ft: weights of the run, from 0 (its start) to 1 (default: 0 0.25 0.5 0.75 1); experts: one number, "
    alphas += "from 0 (all experts count alike, the default) to 1 (each by its use on the training domains)"
    add("--alpha", type=share, nargs="+", metavar="X", help=alphas)
    place = "experts: make MoGE the network of this place (default: its shared expert)"
    add("--at", type=float, nargs=2, metavar=("LON", "LAT"), help=place)
    matched = "order experts like the most similar ones of the first run before averaging (default: off)"
    add("--match-experts", action=argparse.BooleanOptionalAction, default=False, help=matched)
    add("--data-dir", metavar="DIR", help="folder of the runs' images, if it was moved")
    add("-j", "--workers", type=non_negative_int, default=2, metavar="N", help="processes that load images")
    add_device_option(add)
    return parser


def read_runs(folders: Sequence[Path]) -> list[FinishedRun]:
    """Reads finished runs, and checks that they can be averaged."""
    runs, unfinished = find_runs(folders)
    if unfinished or not runs:
        where = unfinished[0] if unfinished else folders[0]
        raise ArgumentError.of("runs", str(where), "holds no finished run; finish it, or leave it out")
    for run in runs:
        refuse_ensemble(run.folder / "best")
    first, *others = ((run.folder, with_defaults(run.args)) for run in runs)
    for folder, args in others:
        for name in SHARED:
            if args.get(name) != first[1].get(name):
                remedy = f"has {name}={args.get(name)!r:.80}, and {first[0]} has {first[1].get(name)!r:.80}"
                raise ArgumentError.of("runs", str(folder), f"{remedy}; average runs that share it")
    return runs


def check_starts(runs: Sequence[FinishedRun]) -> None:
    """Refuses runs from random weights of their own, and warns if only classifiers and routers started apart."""
    args = with_defaults(runs[0].args)
    if len({run.args.get("seed") for run in runs}) == 1 or args["initial_checkpoint"]:
        return
    remedy = "start all runs from one file with --initial-checkpoint"
    if not args["pretrained"]:
        raise ArgumentError.of("runs", str(runs[-1].folder), f"started from random weights of its own; {remedy}")
    if ":" not in str(args["model"]):
        logger.warning(f"new classifiers and routers were random in each run; for better averages, {remedy}")


def plan_data(run: FinishedRun, args: argparse.Namespace) -> RunPlan:
    """Reads and checks the data of a run, and plans a run that starts from the same weights."""
    recorded = run_arguments(f"local-dir:{run.folder / 'best'}")
    options = vars(RunOptions()) | {name: value for name, value in recorded.items() if name in PLANNED}
    options |= {"output": str(args.output), "workers": args.workers}
    options |= {"data_dir": args.data_dir} if args.data_dir else {}
    plan = make_plan(RunOptions(**options))
    if change := difference(recorded["domain_digests"], plan.folder.args["domain_digests"]):
        raise ArgumentError.of(
            "data_dir", plan.options.data_dir, f"other data than the runs': {change}; give --data-dir"
        )
    if args.method == "wise_ft":
        check_weights_files(recorded, plan.folder.args)
    return plan


def open_folder(path: Path, args: Arguments) -> RunFolder | None:
    """Opens the folder of an average, a new one or one that an interrupted call left; None if that is finished."""
    if not (path / ARGUMENTS).is_file():
        return RunFolder(path, args)
    recorded = read_arguments(path / ARGUMENTS, "output")
    if any(recorded.get(name) != args[name] for name in SAME):
        return RunFolder(path, args)  # raises
    return None if (path / DONE).exists() else RunFolder(path, args, resume=True)


def common(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entries that are the same in all tables. Others are not those of an average."""
    return {name: value for name, value in tables[0].items() if all(table.get(name) == value for table in tables)}


class Averages:
    """Averages of runs' networks, scored on the runs' data and written as run folders."""

    def __init__(self, runs: Sequence[FinishedRun], plan: RunPlan, args: argparse.Namespace) -> None:
        self.runs, self.plan, self.device = runs, plan, args.device
        sources = [f"local-dir:{run.folder / 'best'}" for run in runs]
        self.networks = [load_trained(source) for source in sources]
        self.merged: dict[str, Any] = {}  # arguments of a run that has no mixture any more
        if args.method == "experts":
            self.networks = [merged(self.networks[0].to(self.device), plan, args).cpu()]
            name, kwargs = self.networks[0].pretrained_cfg["architecture"], get_model_args(self.networks[0])
            kwargs = {key: value for key, value in kwargs.items() if key in plan.options.model_kwargs}
            self.merged = {"model": name, "model_kwargs": kwargs}
            self.merged |= dict.fromkeys(("router", "metadata_columns", "coverage_radius"))
        self.weights = [network.state_dict() for network in self.networks]
        if args.match_experts:
            self.weights = [match_experts(self.networks[0], self.weights[0], weights) for weights in self.weights]
        self.configs = [data_config(network) for network in self.networks]
        self.ensemble = Ensemble(self.networks) if args.method == "ensemble" else None
        if self.ensemble is None:
            self._check_equal()
        with_metadata = takes_metadata(self.networks[0], plan.domains, plan.options.metadata_columns)
        self.images = build_loaders(plan, self.configs[0], step_sampler(plan), with_metadata=with_metadata)[1]
        if self.ensemble and any(config != self.configs[0] for config in self.configs):
            if plan.options.val_augment:
                remedy = "is defined for networks of one preprocessing; average runs without it"
                raise ArgumentError.of("val_augment", True, remedy)
            cast(EvaluationImages, self.images.dataset).transform = self.ensemble.view
        self.sha256 = [sha256(run.folder / "best" / "model.safetensors") for run in runs]

    def _check_equal(self) -> None:
        """Refuses to average weights that were trained on other inputs, or for classes in another order."""
        facts = [{**config, "classes": label_names(n)} for config, n in zip(self.configs, self.networks, strict=True)]
        for run, table in zip(self.runs, facts, strict=True):
            for name, value in table.items():
                if value != facts[0][name]:
                    remedy = f"has {name}={value!r:.80}, and {self.runs[0].folder} has {facts[0][name]!r:.80}"
                    raise ArgumentError.of("runs", str(run.folder), f"{remedy}; --method ensemble averages such runs")

    def filled(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Returns a network with these weights."""
        network = copy.deepcopy(self.networks[0])
        network.load_state_dict(weights)
        return network

    def mean(self, members: Sequence[int]) -> nn.Module:
        """Returns a network with the mean of some runs' weights."""
        return self.filled(mean_weights([self.weights[member] for member in members]))

    def arguments(self, members: Sequence[int], method: str, path: Path) -> dict[str, Any]:
        """Returns the arguments of an average of some runs, as its args.yaml holds them."""
        args = common([self.runs[member].args for member in members])
        args |= {"average_method": method, "average_of": [self.runs[member].folder.name for member in members]}
        names = (*self.plan.folder.args, "average_method", "average_of")
        args = {name: args[name] for name in names if name in args} | self.merged
        # All candidates, so that another selection of the same ones is not taken for another average
        measured = {"average_sha256": self.sha256, "domain_digests": self.plan.folder.args["domain_digests"]}
        return {**args, **measured, "output": str(path.parent), "experiment": path.name}

    def measure(self, network: nn.Module, members: Sequence[int]) -> Record:
        """Evaluates a network on the runs' splits."""
        batches = ([column.to(self.device) for column in batch] for batch in self.images)
        scores = score(network.to(self.device), batches, self.plan.domains, self.plan.options.metric)
        last = self.runs[members[0]].records[-1]
        args = {**common([self.runs[member].args for member in members]), "hparams_seed": last.args["hparams_seed"]}
        args |= self.merged
        hparams = common([self.runs[member].records[-1].hparams for member in members])
        empty: dict[str, Any] = {"losses": {}, "step_time": 0.0, "mem_gb": 0.0}
        return replace(last, **empty, args=args, hparams=hparams, averaged=True, **scores)

    def write(self, network: nn.Module, record: Record, folder: RunFolder) -> None:
        """Writes a run folder and prints its scores."""
        added = {name: folder.args[name] for name in ("average_method", "average_of", "output", "experiment")}
        folder.add(replace(record, args={**record.args, **added}), partial(self.save, network))
        folder.finish()
        print(f"{folder.path}: {summary(record)}")

    def save(self, network: nn.Module, folder: Path) -> None:
        """Saves a network, or the members of an ensemble in numbered folders."""
        if not isinstance(network, Ensemble):
            save_network(network, folder, self.plan.classes, self.configs[0])
            return
        for number, (member, config) in enumerate(zip(network.networks, self.configs, strict=True)):
            save_network(member, folder / str(number), label_names(member) or self.plan.classes, config)


def merged(network: nn.Module, plan: RunPlan, args: argparse.Namespace) -> nn.Module:
    """Returns the plain network of a mixture. Experts are weighted by their use on the images that trained them."""
    splits = [Split(plan.splits[domain].inside, plan.splits[domain].inside[:0]) for domain in plan.training]
    domains = [plan.domains[domain] for domain in plan.training]
    images = EvaluationImages(domains, splits, evaluation_view(network))
    batches = evaluation_loader(images, batch_size=plan.options.validation_batch_size, workers=args.workers)
    on_device = (batch[0].to(args.device) for batch in batches)
    place = None if args.at is None else tuple(args.at)
    return merge_experts(network, on_device, alpha=args.alpha and args.alpha[0], lonlat=place)


def select(averages: Averages) -> list[int]:
    """Selects the runs of a DiWA average."""
    plan, everything = averages.plan, range(len(averages.runs))
    sizes = {domain: len(plan.splits[domain].outside) for domain in plan.training}
    if not any(sizes.values()):
        raise ArgumentError.of("method", "diwa", "no training domain has validation images; take uniform")

    def correct(members: Sequence[int]) -> float:
        record = averages.measure(averages.mean(members), members)
        scores = record.scores_on("out")
        # Rounded, so that the order of a sum decides no tie. Accuracies give whole numbers of images.
        return sum(round(scores[domain] * size, 6) for domain, size in sizes.items() if size)

    alone = [validation_score(averages.measure(averages.mean([member]), [member])) for member in everything]
    return restricted_selection(alone, correct)


def write_average(averages: Averages, path: Path, method: str) -> None:
    """Writes the average of all runs, or of those that DiWA selects."""
    members = list(range(len(averages.runs)))
    folder = open_folder(path, averages.arguments(members, method, path))
    if folder is None:
        print(f"{path}: finished before")
        return
    if method.startswith("diwa"):
        members = select(averages)
        folder.args = averages.arguments(members, method, path)
    network = averages.ensemble or averages.mean(members)
    averages.write(network, averages.measure(network, members), folder)


def write_between(averages: Averages, output: Path, method: str, alphas: Sequence[float]) -> None:
    """Writes the averages of a run and its start."""
    paths = {alpha: output / f"alpha_{alpha:g}" for alpha in alphas}
    methods = {alpha: f"{method} --alpha {alpha:g}" for alpha in alphas}
    # All are checked before the first is written
    folders = {alpha: open_folder(path, averages.arguments([0], methods[alpha], path)) for alpha, path in paths.items()}
    set_seed(averages.plan.options.seed)
    start = prepare_network(averages.plan)
    cover_training_coordinates(start, averages.plan)
    for alpha, folder in folders.items():
        if folder is None:
            print(f"{paths[alpha]}: finished before")
            continue
        network = averages.filled(mean_weights([start.state_dict(), averages.weights[0]], [1 - alpha, alpha]))
        averages.write(network, averages.measure(network, [0]), folder)


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    runs = read_runs(args.runs)
    if args.method in ONE_RUN and len(runs) > 1:
        raise ArgumentError.of("runs", [str(run.folder) for run in runs], f"{args.method} {ONE_RUN[args.method]}")
    if args.at and args.method != "experts":
        raise ArgumentError.of("at", args.at, "is the place of --method experts; leave it out")
    if args.alpha and (args.method not in ONE_RUN or (args.method == "experts" and len(args.alpha) > 1)):
        raise ArgumentError.of("alpha", args.alpha, "is one number of --method experts, or numbers of wise_ft")
    if args.method in ("uniform", "diwa"):
        check_starts(runs)
    averages = Averages(runs, plan_data(runs[0], args), args)
    method = f"{args.method} --match-experts" if args.match_experts else args.method
    if args.method == "experts":
        words = {"--alpha": args.alpha, "--at": args.at}
        method = " ".join([method, *(f"{name} {' '.join(f'{x:g}' for x in x_)}" for name, x_ in words.items() if x_)])
    if args.method == "wise_ft":
        write_between(averages, args.output, method, args.alpha or ALPHAS)
    else:
        write_average(averages, args.output, method)


if __name__ == "__main__":
    main()
