r"""Draws pictures of a run into its folder figures/.

    timm-moe-dg visualize experts output/RUN --class dog
    timm-moe-dg visualize experts output/RUN --images photographs/
    timm-moe-dg visualize attention output/RUN --twin output/DENSE
    timm-moe-dg visualize output/RUN
    timm-moe-dg visualize curves output/RUN output/OTHER
    timm-moe-dg visualize data --dataset rotated_digits

Without a command it draws the curves, and for a MoGE run also domains and
forced experts. The numbers behind the pictures go to JSON files beside them.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from timm_moe_dg.analysis.geography import draw_domains, draw_forced, is_geographic
from timm_moe_dg.analysis.maps import draw_attention, draw_experts
from timm_moe_dg.analysis.plots import plot_examples, plot_learning_curves, plot_runs
from timm_moe_dg.analysis.routing_statistics import UNTRAINED, PermutationTest, draw_attributes, draw_invariance
from timm_moe_dg.analysis.run_view import RunView, check_run, open_run, redraw_routers
from timm_moe_dg.analysis.style import optional_picture
from timm_moe_dg.cli.arguments import add_device_option
from timm_moe_dg.cli.text import one_line
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import non_negative_int, positive_int, run_folder
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.protocols.records import read_records
from timm_moe_dg.results.runs import domain_names

CURVES, CURVES_OF_RUNS = "curves.png", "curves_of_runs.png"
EVERYTHING = "everything"  # the default command


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("visualize.py", __doc__, "COMMAND [options] RUN")
    commands = parser.add_subparsers(prog=parser.prog, dest="command", required=True, metavar="COMMAND")
    for name, (function, options) in COMMANDS.items():
        place = {"data": "", "curves": "RUN [RUN ...]"}.get(name, "RUN")
        words = (function.__doc__ or "").partition(".")[0]
        command = commands.add_parser(name, help=words, description=words, usage=f"%(prog)s [options] {place}")
        if name != "data":
            several: dict[str, Any] = {"nargs": "+"} if name == "curves" else {}
            command.add_argument("run", type=run_folder, metavar="RUN", help="run folder", **several)
        add_options(command, options)
    return parser


def add_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Adds those of the commands' options whose names are given."""

    def add(*spellings: str, **keywords: Any) -> None:
        if spellings[-1].removeprefix("--").replace("-", "_") in names:
            parser.add_argument(*spellings, **keywords)

    add("--dataset", required=True, metavar="NAME", help="a benchmark, as in finetune.py")
    add("--data-dir", metavar="DIR", help="folder of the images, if that of the run was moved")
    add_device_option(add)
    at_a_time = "images at a time (default: %(default)s)"
    add("-b", "--batch-size", type=positive_int, default=64, metavar="N", help=at_a_time)
    add("--images", nargs="+", metavar="FILE", help="files, folders or patterns, instead of the run's data")
    add("--class", dest="target", metavar="NAME", help="class whose images are drawn (default: the first)")
    add("--columns", type=positive_int, default=4, metavar="N", help="images side by side (default: %(default)s)")
    same = "files with the same CLASS/IMAGE show the same photograph in all domains (default: as the run or data say)"
    add("--split-by-photograph", action=argparse.BooleanOptionalAction, help=same)
    block = "index of the transformer block (default: the last one with experts)"
    add("--block", type=non_negative_int, metavar="I", help=block)
    add("--twin", type=run_folder, metavar="RUN", help="run of the dense model, drawn above the other")
    add("--max-images", type=positive_int, metavar="N", help="maximum number of images of each domain (default: all)")
    baseline = "initialize the routers again, as a baseline; the results go to figures/untrained_router/"
    add("--untrained-router", action="store_true", help=baseline)
    null = "random permutations for the p-values (default: %(default)s)"
    add("--permutations", type=positive_int, default=199, metavar="N", help=null)
    add("--cub", type=Path, metavar="DIR", help="folder CUB_200_2011, for runs on its photographs or on CUB-DG")
    add("--role", choices=("id", "ood"), default="id", help="images to analyze (default: %(default)s)")
    picture = "picture to write (default: %(default)s)"
    add("--output", type=Path, default=Path("examples.png"), metavar="FILE", help=picture)


def data(options: argparse.Namespace) -> None:
    """Draws examples of a data set."""
    domains = get_benchmark(options.dataset).read(options.data_dir, evaluating=True)
    plot_examples(domains, options.output, options.columns)


def experts(options: argparse.Namespace) -> None:
    """Draws the first expert of each patch."""
    draw(draw_experts, options, "images", "target", "columns", "block")


def attention(options: argparse.Namespace) -> None:
    """Draws the attention of the class token."""
    options.twin = options.twin and open_run(options.twin, options.device, options.batch_size)
    similarity = draw(draw_attention, options, "images", "target", "columns", "twin")
    for name, value in similarity.items():
        print(f"mean cosine between two heads' maps, {name}: {value:.4f}")


def attributes(options: argparse.Namespace) -> None:
    """Measures how experts depend on parts and attributes."""
    associations = draw(draw_attributes, options, "cub", "block", "max_images", "permutations")
    for name, association in associations.items():
        nmi = f"NMI {association.nmi.value:.4f} (p {association.nmi.p:.4g})"
        print(f"{name}: {nmi}, Cramer's V {association.cramers_v:.4f}")


def invariance(options: argparse.Namespace) -> None:
    """Measures whether patches keep their expert in other domains."""
    pairs, all_pairs = draw(draw_invariance, options, "block", "max_images", "permutations")
    for pair in pairs:
        others = f"kappa {pair.kappa:.4f}, other pictures {pair.other_pictures:.4f}"
        print(f"{one_line(' / '.join(pair.domains))}: {format_test(pair.agreement)}, {others}")
    print(f"all pairs: {format_test(all_pairs)}")


def format_test(test: PermutationTest) -> str:
    """Formats an agreement with the mean of its null distribution."""
    return f"agreement {test.value:.4f}, permuted {test.null.mean():.4f} (p {test.p:.4g})"


def domains(options: argparse.Namespace) -> None:
    """Draws the discovered domains of a MoGE model."""
    numbers = draw(draw_domains, options, "role")
    print(f"agreement of discovered domains with groups (NMI) {numbers['nmi']:.3f}")


def forced(options: argparse.Namespace) -> None:
    """Draws the accuracy of each expert of a MoGE model on each discovered domain."""
    draw(draw_forced, options, "role")


def curves(options: argparse.Namespace) -> None:
    """Draws losses and accuracies over training, or the held-out accuracy of several runs."""
    if len(options.runs) > 1:
        names = [run.name for run in options.runs]
        labels = names if len(set(names)) == len(names) else [str(run) for run in options.runs]
        runs = {label: read_records(run / "results.jsonl") for label, run in zip(labels, options.runs, strict=True)}
        plot_runs(runs, figures_folder(options) / CURVES_OF_RUNS)
        return
    records = read_records(options.run / "results.jsonl")
    plot_learning_curves(records, domain_names(records), figures_folder(options) / CURVES)


def everything(options: argparse.Namespace) -> None:
    """Draws the curves, and for a MoGE run domains and forced experts; writes the numbers even without matplotlib."""
    with optional_picture(figures_folder(options) / CURVES):
        curves(options)
    if is_geographic(open_view(options), options.role):
        domains(options)
        forced(options)


def open_view(options: argparse.Namespace) -> RunView:
    """Opens the run."""
    names = ("device", "batch_size", "split_by_photograph", "data_dir")
    view = open_run(options.run, **{name: vars(options)[name] for name in names if name in options})
    if vars(options).get("untrained_router"):
        redraw_routers(view.model)
    return view


def figures_folder(options: argparse.Namespace) -> Path:
    """Creates and returns the folder of the run's pictures."""
    # Only the statistics have this option, which would otherwise replace the trained routers' results
    folder = options.run / "figures" / (UNTRAINED if vars(options).get("untrained_router") else "")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def draw(function: Callable[..., Any], options: argparse.Namespace, *names: str) -> Any:
    """Calls a function with the run, the folder of its pictures and some of the options by name."""
    return function(open_view(options), figures_folder(options), **{name: vars(options)[name] for name in names})


NETWORK = ("data_dir", "device", "batch_size")
PICTURES = (*NETWORK, "images", "class", "columns")
STATISTICS = (*NETWORK, "block", "max_images", "untrained_router", "permutations")
GEOGRAPHY = (*NETWORK, "role")
# The function of each command, and its options
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], None], Sequence[str]]] = {
    "experts": (experts, (*PICTURES, "split_by_photograph", "block")),
    "attention": (attention, (*PICTURES, "twin")),
    "attributes": (attributes, (*STATISTICS, "cub")),
    "invariance": (invariance, (*STATISTICS, "split_by_photograph")),
    "domains": (domains, GEOGRAPHY),
    "forced": (forced, GEOGRAPHY),
    "curves": (curves, ()),
    "data": (data, ("dataset", "data_dir", "columns", "output")),
    EVERYTHING: (everything, GEOGRAPHY),
}


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    words = list(argv)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        words = [EVERYTHING, *words]
    options = build_parser().parse_args(words)
    if options.command != "data":
        options.runs = options.run if isinstance(options.run, list) else [options.run]
        options.run = options.runs[0]  # whose folder gets the pictures
        for run in options.runs:
            check_run(run)
    COMMANDS[options.command][0](options)
    written = [options.output] if options.command == "data" else sorted(figures_folder(options).iterdir())
    print(f"written: {', '.join(str(path) for path in written if path.is_file())}")


if __name__ == "__main__":
    main()
