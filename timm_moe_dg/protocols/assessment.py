"""Assessment of a trained network: accuracy, F1 and calibration by domain and overall."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import Split
from ..errors import ArgumentError
from ..metrics import accuracy, class_scores, expected_calibration_error
from .evaluation import Outputs

SPLITS = ("all", "in", "out")


class Scores(NamedTuple):
    """Scores over some images; NaN if there are none."""

    images: int  # number of images
    accuracy: float
    f1_macro: float
    ece: float  # expected calibration error, 15 bins
    balanced_accuracy: float  # this and the next three: see `metrics.class_scores`
    sensitivity: float  # of the second of two classes
    specificity: float
    auc: float


class Assessment(NamedTuple):
    """Scores of a network on a benchmark."""

    domains: tuple[Scores, ...]  # in the benchmark's order
    overall: Scores  # of all images of the counted domains
    average: float  # mean accuracy over the counted domains that have images
    test_average: float  # mean accuracy over the test domains that have images; NaN without any
    worst: tuple[int, ...]  # positions of the counted domains with the lowest accuracy, of which several may be equal


def restrict(splits: Sequence[Split], part: str) -> list[Split]:
    """Empties the in-splits or the out-splits of all domains. `part` is "in" or "out" to keep these alone, or "all"."""
    if part not in SPLITS:
        raise ArgumentError.of("split", part, f"choose from {', '.join(SPLITS)}")
    inside, outside = (slice(None) if part in ("all", name) else slice(0) for name in ("in", "out"))
    restricted = [Split(split.inside[inside], split.outside[outside]) for split in splits]
    if not any(len(split.inside) + len(split.outside) for split in restricted):
        raise ArgumentError.of("split", part, "holds no image of any domain")
    return restricted


def assess(
    outputs: Outputs, num_domains: int, test_domains: Sequence[int] = (), counted: Sequence[int] | None = None
) -> Assessment:
    """Scores a network by domain and overall.

    `counted` domains enter the overall scores, and None counts all. `num_domains` includes empty ones.
    """
    domain = outputs.group // 2
    positions = list(range(num_domains) if counted is None else counted)
    domains = tuple(_scores(outputs, domain == position) for position in range(num_domains))
    accuracies = torch.tensor([scores.accuracy for scores in domains], dtype=torch.float64)
    if accuracies[positions].isnan().all():
        raise ArgumentError.of("domains", positions, "none of them has an image in this split")
    lowest = accuracies[positions].nan_to_num(torch.inf).min()
    return Assessment(
        domains=domains,
        overall=_scores(outputs, torch.isin(domain, torch.tensor(positions))),
        average=accuracies[positions].nanmean().item(),
        test_average=accuracies[list(test_domains)].nanmean().item(),
        worst=tuple(position for position in positions if accuracies[position] == lowest),
    )


def _scores(outputs: Outputs, mask: Tensor) -> Scores:
    predicted, target, confidence = outputs.predicted[mask], outputs.target[mask], outputs.confidence[mask]
    ece = expected_calibration_error(confidence, predicted == target)
    by_name = {"accuracy": accuracy(predicted, target).item(), "ece": ece.item()}
    return Scores(images=int(mask.sum()), **by_name, **class_scores(predicted, target, outputs.positive[mask]))
