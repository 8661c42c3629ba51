r"""Averages the weights or the predictions of finished runs.

    timm-moe-dg average output/seed* --output output/soup
    timm-moe-dg average output/seed* --method diwa --output output/diwa
    timm-moe-dg average output/RUN --method wise_ft --output output/wise

The runs share data, splits, held-out domains, model and starting weights. The
result is a run folder: evaluate, report, tables and push take it. wise_ft
averages a run with its start, and writes a run for each --alpha.
"""

import argparse
import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from torch import Tensor, nn

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.cli.arguments import add_device_option
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.cli.parser import ToolParser, tool_parser
from timm_moe_dg.cli.values import non_negative_int, run_folder, share
from timm_moe_dg.data.fingerprint import difference
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.assembly import prepare_network
from timm_moe_dg.finetuning.coverage import cover_training_coordinates
from timm_moe_dg.finetuning.loaders import build_loaders, step_sampler
from timm_moe_dg.finetuning.plan import RunPlan, make_plan
from timm_moe_dg.finetuning.run import score
from timm_moe_dg.networks.build import data_config, save_network
from timm_moe_dg.networks.soups import Ensemble, match_experts, mean_weights, restricted_selection
from timm_moe_dg.networks.trained import load_trained, takes_metadata
from timm_moe_dg.protocols.headline import summary
from timm_moe_dg.protocols.options import ONCE, RunOptions, options_with
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.protocols.run_identity import with_defaults
from timm_moe_dg.protocols.selection import validation_accuracy
from timm_moe_dg.results.runs import FinishedRun, find_runs
from timm_moe_dg.storage.run_folder import RunFolder, run_arguments

METHODS = {
    "uniform": "the mean of all runs' weights",
    "diwa": "the same without runs that lower the validation accuracy",
    "ensemble": "the mean of all runs' logits",
    "wise_ft": "the mean of a run's weights and its starting weights",
}
# Options that averaged runs share
SHARED = ["dataset", "data", "test_domains", "trial_seed", "holdout_fraction", "split_by_photograph", "model"]
SHARED += ["model_kwargs", "num_classes", "img_size", "in_chans", "metadata_columns", "expert_mode"]
SHARED += ["pretrained", "weights_sha256", "algorithm", "averaging"]
logger = logging.getLogger("timm_moe_dg.average")


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("average.py", __doc__, "RUN [RUN ...] --output DIR [options]")
    add = parser.add_argument
    add("runs", type=run_folder, nargs="+", metavar="RUN", help="folders of finished runs")
    add("--output", type=Path, required=True, metavar="DIR", help="run folder to write")
    listing = "; ".join(f"{name}, {words}" for name, words in METHODS.items())
    add("--method", choices=METHODS, default="uniform", help=f"{listing} (default: %(default)s)")
    alphas = "wise_ft: weights of the run, from 0 (its start) to 1 (default: 0 0.25 0.5 0.75 1)"
    add("--alpha", type=share, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="X", help=alphas)
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
    if len({run.args["seed"] for run in runs}) == 1 or args["initial_checkpoint"] or ":" in str(args["model"]):
        return
    remedy = "start all runs from one file with --initial-checkpoint"
    if not args["pretrained"]:
        raise ArgumentError.of("runs", str(runs[-1].folder), f"started from random weights of its own; {remedy}")
    logger.warning(f"new classifiers and routers were random in each run; for better averages, {remedy}")


def plan_result(run: FinishedRun, args: argparse.Namespace, folder: Path) -> RunPlan:
    """Reads and checks the data, and plans the result as a run with the options of another one."""
    recorded = run_arguments(f"local-dir:{run.folder / 'best'}")
    defaults = vars(RunOptions())
    # The training method is not needed, and a run folder may name code for it
    follows = "epochs" if recorded.get("epochs") is None else "steps"  # from the epochs
    reset = ("algorithm", "averaging", follows, *options_with(ONCE))
    options = defaults | {name: value for name, value in recorded.items() if name in defaults and name not in reset}
    options |= {"output": str(folder.parent), "experiment": folder.name, "workers": args.workers}
    options |= {"data_dir": args.data_dir} if args.data_dir else {}
    plan = make_plan(RunOptions(**options))
    if change := difference(recorded["domain_digests"], plan.folder.args["domain_digests"]):
        raise ArgumentError.of(
            "data_dir", plan.options.data_dir, f"other data than the runs': {change}; give --data-dir"
        )
    return plan


def common(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entries that are the same in all tables. Others are not those of an average."""
    return {name: value for name, value in tables[0].items() if all(table.get(name) == value for table in tables)}


class Averages:
    """Averages of runs' networks, scored on the runs' data and written as run folders."""

    def __init__(self, runs: Sequence[FinishedRun], plan: RunPlan, args: argparse.Namespace) -> None:
        self.runs, self.plan, self.device = runs, plan, args.device
        self.networks = [load_trained(f"local-dir:{run.folder / 'best'}") for run in runs]
        self.weights = [network.state_dict() for network in self.networks]
        if args.match_experts:
            self.weights = [match_experts(self.networks[0], self.weights[0], weights) for weights in self.weights]
        self.config = data_config(self.networks[0])
        with_metadata = takes_metadata(self.networks[0], plan.domains, plan.options.metadata_columns)
        self.images = build_loaders(plan, self.config, step_sampler(plan), with_metadata=with_metadata)[1]

    def filled(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Returns a network with these weights."""
        network = copy.deepcopy(self.networks[0])
        network.load_state_dict(weights)
        return network

    def mean(self, members: Sequence[int]) -> nn.Module:
        """Returns a network with the mean of some runs' weights."""
        return self.filled(mean_weights([self.weights[member] for member in members]))

    def measure(self, network: nn.Module, members: Sequence[int], method: str) -> Record:
        """Evaluates a network on the runs' splits."""
        batches = ([column.to(self.device) for column in batch] for batch in self.images)
        scores = score(network.to(self.device), batches, self.plan.domains)
        runs = [self.runs[member] for member in members]
        last = runs[0].records[-1]
        args = {**common([run.args for run in runs]), "hparams_seed": last.args["hparams_seed"]}
        args |= {"average_method": method, "average_of": [run.folder.name for run in runs]}
        hparams = common([run.records[-1].hparams for run in runs])
        empty: dict[str, Any] = {"losses": {}, "step_time": 0.0, "mem_gb": 0.0}
        return replace(last, **empty, args=args, hparams=hparams, averaged=True, **scores)

    def write(self, network: nn.Module, record: Record, name: str) -> None:
        """Writes a run folder and prints its scores."""
        plan = self.plan.named(name)
        place = {"output": plan.options.output, "experiment": name}
        record = replace(record, args={**record.args, **place})
        names = (*plan.folder.args, "average_method", "average_of")
        args = {key: record.args[key] for key in names if key in record.args}
        folder = RunFolder(plan.folder.path, {**args, "domain_digests": plan.folder.args["domain_digests"]})
        folder.add(record, partial(self.save, network))
        folder.finish()
        print(f"{folder.path}: {summary(record)}")

    def save(self, network: nn.Module, folder: Path) -> None:
        """Saves a network, or the members of an ensemble in numbered folders."""
        for number, member in enumerate(network.networks if isinstance(network, Ensemble) else [network]):
            place = folder / str(number) if isinstance(network, Ensemble) else folder
            save_network(member, place, self.plan.classes, self.config)


def select(averages: Averages) -> list[int]:
    """Selects the runs of a DiWA average."""

    def validation(members: Sequence[int]) -> float:
        return validation_accuracy(averages.measure(averages.mean(members), members, "diwa"))

    ranked = sorted(range(len(averages.runs)), key=lambda member: -validation([member]))
    return restricted_selection(ranked, validation)


def start_of(plan: RunPlan) -> Mapping[str, Tensor]:
    """Returns the starting weights of a run."""
    set_seed(plan.options.seed)
    network = prepare_network(plan)
    cover_training_coordinates(network, plan)
    return network.state_dict()


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    runs = read_runs(args.runs)
    everything = list(range(len(runs)))
    wise = args.method == "wise_ft"
    if wise and len(runs) > 1:
        raise ArgumentError.of("runs", [str(run.folder) for run in runs], "wise_ft averages one run with its start")
    if args.method in ("uniform", "diwa"):
        check_starts(runs)
    output, name = (args.output, f"alpha_{args.alpha[0]:g}") if wise else (args.output.parent, args.output.name)
    averages = Averages(runs, plan_result(runs[0], args, output / name), args)
    method = f"{args.method} --match-experts" if args.match_experts else args.method
    if wise:
        start = start_of(averages.plan)
        for alpha in args.alpha:
            network = averages.filled(mean_weights([start, averages.weights[0]], [1 - alpha, alpha]))
            record = averages.measure(network, everything, f"{method} --alpha {alpha:g}")
            averages.write(network, record, f"alpha_{alpha:g}")
        return
    members = select(averages) if args.method == "diwa" else everything
    network = Ensemble(averages.networks) if args.method == "ensemble" else averages.mean(members)
    averages.write(network, averages.measure(network, members, method), name)


if __name__ == "__main__":
    main()
