"""Measures the routing of finished runs of examples/routers/routers.yaml and others.

    python examples/routers/measure.py output/routers/* --output routing.csv

The table has a row for each run, from at most 500 random images of each domain:

- `accuracy` and `permuted`: percent of the held-out domain's images, as trained and with each token routed as another.
- `unused`: percent of experts that are first choice of less than a tenth of an equal share of held-out tokens.
- `entropy`: of a held-out token's routing, over that of equal probabilities.
- `same class`, `other class`: overlap of the experts' shares of first choices, between held-out and training images of
  the same class, and of different ones. 1 is equal shares, 0 no expert in common.
- `same thing`: Cohen's kappa of the first experts of the same patch of the same thing in two domains, if the data have
  the same things in each domain.
- `by class`, `by domain`: normalized mutual information of the first experts with the images' classes and domains.

Routing is averaged over the mixture blocks.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor, nn

from timm_moe_dg.analysis.maps import RoutingMap, routing_maps
from timm_moe_dg.analysis.routing_statistics import routing_invariance
from timm_moe_dg.analysis.run_view import Batch, RunView, open_run, picture_names
from timm_moe_dg.data import Domain
from timm_moe_dg.layers import Router
from timm_moe_dg.layers.reports import RouterOutput

MOST = 500  # images of a domain
Images = dict[int, np.ndarray]  # positions of images by domain


@contextmanager
def rerouted(model: nn.Module, change: Callable[[RouterOutput], RouterOutput]) -> Iterator[None]:
    """Changes what the routers of a model return."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(lambda *parts: change(parts[-1])) for router in routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def permuted(routing: RouterOutput) -> RouterOutput:
    """Gives each token the experts and weights of another one."""
    order = torch.randperm(len(routing.logits))
    indices, weights = routing.expert_indices[order], routing.combine_weights[order]
    return routing._replace(expert_indices=indices, combine_weights=weights)


def batches_of(view: RunView, domain: Domain, positions: np.ndarray) -> Iterator[Batch]:
    """The network's inputs for images of a domain."""
    return view.batches((domain.pixels(position), None) for position in positions)


@torch.inference_mode()
def accuracy(view: RunView, domain: Domain, positions: np.ndarray) -> float:
    """Percent of the images that the network classifies correctly."""
    torch.manual_seed(0)
    predicted = torch.cat([view.model(*batch).argmax(1) for batch in batches_of(view, domain, positions)])
    return 100 * float((predicted.numpy() == np.asarray(domain.targets)[positions]).mean())


def shares(first: Tensor, experts: int) -> Tensor:
    """(B, ...) first experts -> (E,) their shares."""
    return torch.bincount(first.flatten(), minlength=experts) / first.numel()


def overlaps(held_out: Mapping[int, Tensor], training: Mapping[int, Tensor]) -> tuple[float, float]:
    """Mean overlap of the experts' shares (E,), between the same classes and between different ones."""
    pairs = [(a == b, float(torch.minimum(held_out[a], training[b]).sum())) for a in held_out for b in training]
    same, other = ([value for is_same, value in pairs if is_same is wanted] for wanted in (True, False))
    return fmean(same), fmean(other)


def by_class(first: Tensor, targets: np.ndarray, experts: int) -> dict[int, Tensor]:
    """The experts' shares for the images of each class."""
    return {int(label): shares(first[targets == label], experts) for label in np.unique(targets)}


def measure_routing(view: RunView, images: Images, held_out: int) -> dict[str, float]:
    """The columns from `unused` on."""
    domains = view.domains
    images = {index: images[index] for index in images if index == held_out or index not in view.args["test_domains"]}
    maps: dict[int, Mapping[int, RoutingMap]] = {
        index: routing_maps(view.model, batches_of(view, domains[index], positions))
        for index, positions in images.items()
    }
    targets = {index: np.asarray(domains[index].targets)[positions] for index, positions in images.items()}
    names = {index: picture_names(domains[index], view.shares_photographs) for index in images}
    pictures = {
        domains[index].name: [names[index][position] for position in positions]  # type: ignore[index]
        for index, positions in images.items()
        if names[index]
    }
    rows = []
    for block, ours in maps[held_out].items():
        experts = ours.num_experts
        others = [index for index in images if index != held_out]
        training = torch.cat([maps[index][block].first for index in others])
        overlap = overlaps(
            by_class(ours.first, targets[held_out], experts),
            by_class(training, np.concatenate([targets[index] for index in others]), experts),
        )
        row = {
            "unused": 100 * float((shares(ours.first, experts) < 0.1 / experts).double().mean()),
            "entropy": float(ours.entropy.mean()) / math.log(experts),
            **dict(zip(("same class", "other class"), overlap, strict=True)),
        }
        if pictures:
            first = {domains[index].name: maps[index][block].first for index in images}
            angles = {domain.name: domain.angle for domain in domains}
            pairs = routing_invariance(first, pictures, angles, permutations=1)
            row["same thing"] = fmean(pair.kappa for pair in pairs if domains[held_out].name in pair.domains)
        choices = torch.cat([maps[index][block].first.flatten(1) for index in images]).numpy()
        facts = {"by class": targets, "by domain": {index: np.full(len(images[index]), index) for index in images}}
        for name, labels in facts.items():
            of_patches = np.repeat(np.concatenate([labels[index] for index in images]), choices.shape[1])
            row[name] = float(normalized_mutual_info_score(of_patches, choices.flatten()))
        rows.append(row)
    return pd.DataFrame(rows).mean().to_dict()


def measure(folder: Path) -> dict[str, object]:
    """A row of the table."""
    view = open_run(folder, batch_size=256)
    model: nn.Module = view.model
    # Random images of each domain, the same for all runs
    sizes = {index: len(domain) for index, domain in enumerate(view.domains) if len(domain)}
    images = {index: np.random.default_rng(index).permutation(size)[:MOST] for index, size in sizes.items()}
    # Data with test domains of their own have several held-out ones. No training image comes from those that are "ood"
    tested = view.args["test_domains"]
    held_out = next((index for index in tested if view.domains[index].role == "ood"), tested[0])
    domain, positions = view.domains[held_out], images[held_out]
    row: dict[str, object] = {"run": folder.name, "accuracy": accuracy(view, domain, positions)}
    if any(isinstance(module, Router) for module in model.modules()):
        with rerouted(model, permuted):
            row["permuted"] = accuracy(view, domain, positions)
        row |= measure_routing(view, images, held_out)
    return row


def main(words: Sequence[str] | None = None) -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    options = parser.parse_args(words)
    table = pd.DataFrame([measure(folder) for folder in options.runs])
    table.to_csv(options.output, index=False)


if __name__ == "__main__":
    main()
