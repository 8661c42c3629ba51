"""Draws what a MoGE run found: its discovered domains as a map, expert usage, forced experts, training curves.

    python tools/visualize.py output/RUN

Into the run's folder `figures/` go map.png (metadata that are coordinates only), routing.png, forced_experts.png,
curves.png, and analysis.json with the numbers behind them: agreement of discovered domains with the groups as
normalized mutual information, routing shares, the matrix. A run of another model gets curves.png alone.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.analysis import domain_map, domains_at, expert_usage, forced_expert_matrix
from timm_moe_dg.analysis.canvas import optional_picture
from timm_moe_dg.analysis.curves import draw_learning_curves
from timm_moe_dg.analysis.expert_plots import plot_domain_map, plot_expert_matrix, plot_expert_usage
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.data import (
    EvaluationImages,
    PlacesDomain,
    Split,
    evaluation_loader,
    evaluation_transform,
    get_benchmark,
)
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.metrics import normalized_mutual_information
from timm_moe_dg.networks.build import data_config
from timm_moe_dg.protocols import read_records
from timm_moe_dg.protocols.formats import read_arguments
from timm_moe_dg.results.runs import domain_names


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(
        prog="visualize.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="output folder of finetune.py")
    parser.add_argument("--role", choices=("id", "ood"), default="id", help="images to analyze (default: %(default)s)")
    parser.add_argument("--map-step", type=float, default=2.0, help="degrees per map cell (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where the model runs (default: %(default)s)")
    parser.add_argument("-b", "--batch-size", type=int, default=64, metavar="N", help="images (default: %(default)s)")
    return parser


def visualize(options: argparse.Namespace) -> None:
    """Draws everything that the run has."""
    run = Path(options.run)
    if not (run / "args.yaml").is_file() or not (run / "results.jsonl").is_file():
        raise ArgumentError.of("run", str(run), "holds no args.yaml with results.jsonl; give a folder of finetune.py")
    figures = run / "figures"
    figures.mkdir(exist_ok=True)
    records = read_records(run / "results.jsonl")
    draw_learning_curves(records, domain_names(records), figures, "curves.png")
    args = dict(read_arguments(run / "args.yaml", "run"))
    model = timm.create_model(f"local-dir:{run / 'best'}", pretrained=True).to(options.device).eval()
    domains = [
        domain for domain in get_benchmark(args["dataset"]).read(args["data_dir"]) if is_analyzed(domain, options.role)
    ]
    if domains and hasattr(model, "set_expert_mode"):
        findings = analyze(model, domains, args, options, figures)
        (figures / "analysis.json").write_text(json.dumps(findings, indent=2) + "\n")
        print(f"agreement of discovered domains with groups (NMI) {findings['nmi']:.3f}")
    print(f"written: {', '.join(str(path) for path in sorted(figures.iterdir()))}")


def is_analyzed(domain: Any, role: str) -> bool:
    """Whether a domain has metadata and the role asked for."""
    return isinstance(domain, PlacesDomain) and domain.role == role


def analyze(
    model: nn.Module, domains: Sequence[PlacesDomain], args: dict[str, Any], options: argparse.Namespace, figures: Path
) -> dict[str, Any]:
    """Draws the pictures of a MoGE model and returns their numbers."""
    places = {domain.group: inside(domain) for domain in domains}
    metadata = torch.cat(list(places.values()))
    groups = torch.repeat_interleave(torch.tensor([len(rows) for rows in places.values()]))
    found = domains_at(model, metadata)
    if metadata.is_floating_point():
        with optional_picture(figures / "map.png") as path:
            plot_domain_map(domain_map(model, options.map_step), path, places)
    usage = expert_usage(model, metadata)
    with optional_picture(figures / "routing.png") as path:
        plot_expert_usage(usage, path)
    matrix = forced_expert_matrix(model, batches_of(model, domains, args, options))
    with optional_picture(figures / "forced_experts.png") as path:
        plot_expert_matrix(matrix, path)
    counts = torch.zeros(len(places), usage.frequency.shape[1] + 1, dtype=torch.long)
    counts.index_put_((groups, found), torch.ones_like(found), accumulate=True)  # the last column: unknown places
    return {
        "role": options.role,
        "groups": list(places),
        "nmi": normalized_mutual_information(found, groups).item(),
        "images_by_group_and_domain": counts.tolist(),
        "expert_usage": {name: value.tolist() for name, value in usage._asdict().items() if torch.is_tensor(value)},
        "forced_experts": {name: value.tolist() for name, value in matrix._asdict().items()},
    }


def inside(domain: PlacesDomain) -> Tensor:
    """The metadata of a domain's test images."""
    return torch.as_tensor(domain.metadata[domain.split.inside])


def batches_of(
    model: nn.Module, domains: Sequence[PlacesDomain], args: dict[str, Any], options: argparse.Namespace
) -> Any:
    """Yields the domains' test images with their metadata, on the device."""
    config = data_config(model, args["img_size"])
    view = evaluation_transform(config["input_size"][1:], config["mean"], config["std"])
    splits = [Split(domain.split.inside, domain.split.outside[:0]) for domain in domains]
    images = EvaluationImages(domains, splits, view, with_metadata=True)
    for batch in evaluation_loader(images, batch_size=options.batch_size, workers=0):
        yield tuple(part.to(options.device) for part in batch)


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    visualize(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
