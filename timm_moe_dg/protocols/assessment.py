"""Assessment of a trained network: how often it is right, domain by domain, and how well it knows when it is."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data import Split
from ..errors import ArgumentError
from ..metrics import accuracy, expected_calibration_error, f1_macro
from .evaluation import Answers

SPLITS = ("all", "in", "out")


class Scores(NamedTuple):
    """Scores over some images; NaN where there are none.

    Attributes:
        images: How many.
        accuracy: Share of right predictions.
        f1_macro: See `metrics.f1_macro`.
        ece: See `metrics.expected_calibration_error`, 15 bins.
    """

    images: int
    accuracy: float
    f1_macro: float
    ece: float


class Assessment(NamedTuple):
    """Scores of a network on a benchmark.

    Attributes:
        domains: Of each domain, in the benchmark's order.
        overall: Of all images of the domains that count together.
        average: Mean accuracy over the domains that count and have images.
        test_average: Likewise over the test domains; NaN without any.
        worst: Position of that with the lowest accuracy among those that count, the first of equals.
    """

    domains: tuple[Scores, ...]
    overall: Scores
    average: float
    test_average: float
    worst: int


def restrict(splits: Sequence[Split], part: str) -> list[Split]:
    """Leaves of each split what is asked for: one of `SPLITS`.

    Raises:
        ArgumentError: None of them, or nothing is left of any domain.
    """
    if part not in SPLITS:
        raise ArgumentError.of("split", part, f"choose from {', '.join(SPLITS)}")
    inside, outside = (slice(None) if part in ("all", own) else slice(0) for own in ("in", "out"))
    kept = [Split(split.inside[inside], split.outside[outside]) for split in splits]
    if not any(len(split.inside) + len(split.outside) for split in kept):
        raise ArgumentError.of("split", part, "holds no image of any domain")
    return kept


def assess(
    answers: Answers, num_domains: int, test_domains: Sequence[int] = (), counted: Sequence[int] | None = None
) -> Assessment:
    """Scores answers by domain and altogether.

    Args:
        answers: Of one network.
        num_domains: How many domains there are, empty ones counted.
        test_domains: Positions of those that the network was not trained on.
        counted: Positions of those that overall scores are of; None for all.

    Raises:
        ArgumentError: No domain that counts has an image.
    """
    domain = answers.group // 2
    positions = list(range(num_domains) if counted is None else counted)
    domains = tuple(_scores(answers, domain == position) for position in range(num_domains))
    values = np.array([scores.accuracy for scores in domains])
    if np.isnan(values[positions]).all():
        raise ArgumentError.of("domains", positions, "none of them has an image in this split")
    return Assessment(
        domains=domains,
        overall=_scores(answers, torch.isin(domain, torch.tensor(positions))),
        average=_mean(values[positions]),
        test_average=_mean(values[list(test_domains)]),
        worst=positions[int(np.nanargmin(values[positions]))],
    )


def _scores(answers: Answers, mine: Tensor) -> Scores:
    predicted, target, confidence = answers.predicted[mine], answers.target[mine], answers.confidence[mine]
    ece = expected_calibration_error(confidence, predicted == target)
    return Scores(int(mine.sum()), accuracy(predicted, target).item(), f1_macro(predicted, target).item(), ece.item())


def _mean(values: np.ndarray) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else float("nan")
