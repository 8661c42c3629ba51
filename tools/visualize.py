"""Draws what a run does with its images: experts, attention, parts, domains, curves.

    python tools/visualize.py experts output/RUN --class dog            # the expert of each patch, in all domains
    python tools/visualize.py experts output/RUN --images photographs/
    python tools/visualize.py attention output/RUN --twin output/DENSE  # where the class token looks, head by head
    python tools/visualize.py attributes output/RUN --cub CUB_200_2011  # experts against parts and attributes
    python tools/visualize.py invariance output/RUN                     # same patch, other domain: same expert?
    python tools/visualize.py domains output/RUN                        # a MoGE run's discovered domains as a map
    python tools/visualize.py forced output/RUN                         # its experts, each forced on everything
    python tools/visualize.py curves output/RUN                         # losses and accuracies over training

Without a word in front, `visualize.py output/RUN` draws the curves, and of a MoGE run domains and forced experts.
Pictures go into the run's folder `figures/` with the numbers behind them as JSON: experts.json, attention.json,
attributes.json, invariance.json; those of domains and forced experts together in analysis.json.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.analysis.curves import plot_learning_curves
from timm_moe_dg.analysis.geography_report import draw_domains, draw_forced, is_geographic
from timm_moe_dg.analysis.routing.association import PermutationTest
from timm_moe_dg.analysis.routing.map_report import draw_attention, draw_experts
from timm_moe_dg.analysis.routing.statistics_report import draw_attributes, draw_invariance
from timm_moe_dg.analysis.run_view import RunView, check_run, open_run, redraw_routers
from timm_moe_dg.analysis.style import optional_picture
from timm_moe_dg.cli.arguments import (
    fraction_to_1,
    key_value,
    non_negative_int,
    parse_words,
    positive_int,
    usable_device,
)
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.protocols import read_records
from timm_moe_dg.results.runs import domain_names

CURVES = "curves.png"
EVERYTHING = "everything"  # the command for which no word is needed


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(
        prog="visualize.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_options, _) in COMMANDS.items():
        command = commands.add_parser(name)
        command.add_argument("run", type=Path, metavar="RUN", help="output folder of finetune.py")
        add_options(command)
    return parser


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Adds where the data lies and how the network runs."""
    add = parser.add_argument
    add("--data-dir", metavar="DIR", help="where the run's data lies now (default: where it lay)")
    add("--device", type=usable_device, default="cpu", help="where the model runs (default: %(default)s)")
    add("-b", "--batch-size", type=positive_int, default=64, metavar="N", help="images (default: %(default)s)")


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    """Adds which images are drawn."""
    add_network_options(parser)
    add = parser.add_argument
    add("--images", nargs="+", metavar="FILE", help="files, folders or patterns, instead of the run's data")
    add("--class", dest="target", metavar="NAME", help="class whose images are drawn (default: the first)")
    add("--columns", type=positive_int, default=4, metavar="N", help="images side by side (default: %(default)s)")


def add_expert_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `experts`."""
    add_picture_options(parser)
    add_block_option(parser)


def add_block_option(parser: argparse.ArgumentParser) -> None:
    """Adds which mixture block is looked at."""
    parser.add_argument(
        "--block", type=non_negative_int, metavar="I", help="block to look at (default: last with experts)"
    )


def add_attention_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `attention`."""
    add_picture_options(parser)
    add = parser.add_argument
    add("--twin", type=Path, metavar="RUN", help="run of the dense model, drawn above this one")
    add(
        "--mass",
        type=fraction_to_1,
        metavar="Q",
        help="show the fewest patches that hold this share of a head's attention",
    )


def add_statistics_options(parser: argparse.ArgumentParser) -> None:
    """Adds how many images and permutations the numbers come from."""
    add_network_options(parser)
    add_block_option(parser)
    add = parser.add_argument
    add("--max-images", type=positive_int, metavar="N", help="images of each domain, at most (default: all)")
    redrawn = "draw the routers anew, as before training, and write to figures/untrained_router/: a baseline"
    add("--untrained-router", action="store_true", help=redrawn)
    add("--permutations", type=positive_int, default=199, metavar="N", help="draws of the null (default: %(default)s)")


def add_attribute_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `attributes`."""
    add_statistics_options(parser)
    parser.add_argument("--cub", type=Path, metavar="DIR", help="CUB_200_2011, for runs on its photographs or CUB-DG")


def add_invariance_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `invariance`."""
    add_statistics_options(parser)
    turned = "degrees by which a domain's pictures are turned counter-clockwise (default: the data set's, else 0)"
    parser.add_argument("--angles", type=key_value, nargs="*", default=[], metavar="DOMAIN=DEGREES", help=turned)


def add_geography_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `domains` and `forced`."""
    add_network_options(parser)
    add = parser.add_argument
    add("--role", choices=("id", "ood"), default="id", help="images to analyze (default: %(default)s)")
    add("--map-step", type=float, default=2.0, help="degrees per map cell (default: %(default)s)")


def experts(options: argparse.Namespace) -> None:
    """Draws which expert each patch goes to first."""
    draw_experts(
        opened(options), figures(options), **chosen(options, "data_dir", "images", "target", "columns", "block")
    )


def attention(options: argparse.Namespace) -> None:
    """Draws where the class token looks."""
    view = opened(options)
    twin = options.twin and open_run(options.twin, options.device, options.batch_size)
    names = ("data_dir", "images", "target", "columns", "mass")
    similar = draw_attention(view, twin, figures(options), **chosen(options, *names))
    for name, value in similar.items():
        print(f"mean cosine between two heads' maps, {name}: {value:.4f}")


def attributes(options: argparse.Namespace) -> None:
    """Ties experts to parts and attributes."""
    names = ("data_dir", "cub", "block", "max_images", "permutations")
    for name, found in draw_attributes(opened(options), figures(options), **chosen(options, *names)).items():
        print(f"{name}: NMI {found.nmi.value:.4f} (p {found.nmi.p:.4g}), Cramer's V {found.cramers_v:.4f}")


def invariance(options: argparse.Namespace) -> None:
    """Measures whether patches keep their expert from domain to domain."""
    names = ("data_dir", "block", "max_images", "permutations", "angles")
    found, everything = draw_invariance(opened(options), figures(options), **chosen(options, *names))
    for pair in found:
        others = f"kappa {pair.kappa:.4f}, other pictures {pair.other_pictures:.4f}"
        print(f"{' / '.join(pair.domains)}: {against_null(pair.agreement)}, {others}")
    print(f"all pairs: {against_null(everything)}")


def against_null(test: PermutationTest) -> str:
    """Formats an agreement beside its null."""
    return f"agreement {test.value:.4f}, permuted {test.null.mean():.4f} (p {test.p:.4g})"


def domains(options: argparse.Namespace) -> None:
    """Draws the domains that a MoGE model discovered."""
    found = draw_domains(opened(options), figures(options), **chosen(options, "data_dir", "role", "map_step"))
    print(f"agreement of discovered domains with groups (NMI) {found['nmi']:.3f}")


def forced(options: argparse.Namespace) -> None:
    """Draws how good each expert of a MoGE model is for each discovered domain."""
    draw_forced(opened(options), figures(options), **chosen(options, "data_dir", "role"))


def curves(options: argparse.Namespace) -> None:
    """Draws losses and accuracies over training."""
    records = read_records(options.run / "results.jsonl")
    plot_learning_curves(records, domain_names(records), figures(options) / CURVES)


def everything(options: argparse.Namespace) -> None:
    """Draws what a run has without being asked for anything; numbers also where pictures cannot be drawn."""
    with optional_picture(figures(options) / CURVES):
        curves(options)
    if is_geographic(opened(options), options.data_dir, options.role):
        domains(options)
        forced(options)


def opened(options: argparse.Namespace) -> RunView:
    """The run, ready to be asked."""
    view = open_run(options.run, options.device, options.batch_size)
    if untrained(options):
        redraw_routers(view.model)
    return view


def untrained(options: argparse.Namespace) -> bool:
    """Whether the routers are to be as before training."""
    return bool(vars(options).get("untrained_router"))


def figures(options: argparse.Namespace) -> Path:
    """The folder of the run's pictures."""
    folder = options.run / "figures" / ("untrained_router" if untrained(options) else "")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Some of the options by name."""
    return {name: vars(options)[name] for name in names}


Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]]
COMMANDS: dict[str, Command] = {
    "experts": (add_expert_options, experts),
    "attention": (add_attention_options, attention),
    "attributes": (add_attribute_options, attributes),
    "invariance": (add_invariance_options, invariance),
    "domains": (add_geography_options, domains),
    "forced": (add_geography_options, forced),
    "curves": (lambda parser: None, curves),
    EVERYTHING: (add_geography_options, everything),
}


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    words = list(argv)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        words = [EVERYTHING, *words]
    options = parse_words(build_parser(), words)
    check_run(options.run)
    COMMANDS[options.command][1](options)
    print(f"written: {', '.join(str(path) for path in sorted(figures(options).iterdir()) if path.is_file())}")


if __name__ == "__main__":
    main()
