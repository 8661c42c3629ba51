"""What the selected network does with images that it was not trained on: scores, confusions, mistakes, experts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..analysis.run_view import RunView
from ..data import (
    Domain,
    EvaluationImages,
    Split,
    drop_unreadable,
    evaluation_loader,
    split_domains,
)
from ..errors import DataError
from ..losses import record_routing, router_outputs
from ..metrics import CalibrationBins, calibration_bins, confusion_matrix
from ..networks.trained import class_positions, takes_metadata
from ..protocols.assessment import Assessment, assess
from ..protocols.evaluation import Outputs, collect_outputs
from ..protocols.options import Arguments
from .pictures import Picture, thumbnail

MISTAKES = 12


class Reading(NamedTuple):
    """How a run's network is looked at.

    Attributes:
        data_dir: Where the run's data lies now; None for where it lay.
        device: Where the network runs.
        batch_size: Images at a time.
        workers: Loader processes.
        max_images: Of each domain, at most.
    """

    data_dir: str | None = None
    device: str = "cpu"
    batch_size: int = 64
    workers: int = 0
    max_images: int = 1000


class Mistake(NamedTuple):
    """A wrong answer.

    Attributes:
        picture: The image.
        target: Name of its class.
        predicted: Name of the class that the network is sure of.
        confidence: How sure.
    """

    picture: Picture
    target: str
    predicted: str
    confidence: float


@dataclass(frozen=True)
class NetworkFacts:
    """Answers of a network about the images that count: held-out domains' in-splits, training domains' out-splits.

    Attributes:
        images: What it was asked about.
        total: How many such images there are; more than `images` has where they were limited.
        answers: Its answers, in the same order.
        found: Their scores.
        test_domains: Positions of the held-out domains.
        first_experts: Name of a mixture layer -> (N, E) how many tokens of each image go to each expert first.
    """

    images: EvaluationImages
    total: int
    answers: Outputs
    found: Assessment
    test_domains: Sequence[int]
    first_experts: Mapping[str, Tensor]

    @property
    def domains(self) -> Sequence[Domain]:
        """All domains."""
        return self.images.domains

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.domains[0].classes

    @property
    def held_out(self) -> Tensor:
        """(N,) bool, which images are of held-out domains."""
        return torch.isin(self.answers.group // 2, torch.tensor(list(self.test_domains), dtype=torch.long))

    def confusion(self) -> Tensor:
        """(C, C) counts over the held-out domains, see `metrics.confusion_matrix`."""
        mine = self.held_out
        return confusion_matrix(self.answers.predicted[mine], self.answers.target[mine], len(self.classes))

    def confused(self, most: int = 5) -> list[tuple[str, str, int]]:
        """The most frequent confusions: class of the image, predicted class, number of images."""
        wrong = self.confusion().fill_diagonal_(0)
        order = wrong.flatten().argsort(descending=True, stable=True)[:most].tolist()
        pairs = [divmod(at, len(self.classes)) for at in order]
        return [(self.classes[row], self.classes[at], int(wrong[row, at])) for row, at in pairs if wrong[row, at]]

    def calibration(self) -> dict[str, CalibrationBins]:
        """Bins of confidence of held-out and of training domains; a kind without images is left out."""
        right, held_out = self.answers.predicted == self.answers.target, self.held_out
        kinds = {"tested domains": held_out, "training domains (out-splits)": ~held_out}
        return {
            name: calibration_bins(self.answers.confidence[mine], right[mine])
            for name, mine in kinds.items()
            if mine.any()
        }

    def worst_mistakes(self) -> list[Mistake]:
        """The wrong answers about the worst domain that the network is surest of.

        Raises:
            ImageReadError: An image cannot be decoded.
        """
        wrong = (self.answers.group // 2 == self.found.worst) & (self.answers.predicted != self.answers.target)
        at = wrong.nonzero().flatten()
        surest = at[self.answers.confidence[at].argsort(descending=True, stable=True)][:MISTAKES]
        return [self._mistake(index) for index in surest.tolist()]

    def expert_use(self) -> dict[str, Tensor]:
        """Name of a mixture layer -> (D, E) share of a domain's tokens whose first expert it is; NaN without images."""
        domain = self.answers.group // 2
        members = torch.nn.functional.one_hot(domain, len(self.domains)).double()
        counts = {name: members.T @ each.double() for name, each in self.first_experts.items()}
        return {name: each / each.sum(1, keepdim=True) for name, each in counts.items()}

    def _mistake(self, index: int) -> Mistake:
        target, predicted = (self.classes[int(one[index])] for one in (self.answers.target, self.answers.predicted))
        image = self.domains[self.found.worst].image(int(self.images.positions[index]))
        shown = thumbnail(image.convert("RGB"), f"{target}, taken for {predicted}")
        return Mistake(shown, target, predicted, self.answers.confidence[index].item())


class _FirstExperts(nn.Module):
    """A network that counts, image by image, which expert tokens go to first."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.counts: dict[str, list[Tensor]] = {}

    def forward(self, images: Tensor, *metadata: Tensor) -> Tensor:
        logits = self.network(images, *metadata)
        for name, routing in router_outputs(self.network).items():
            first = nn.functional.one_hot(routing.expert_indices[:, 0], routing.logits.shape[-1])
            routed = first if routing.routed is None else first * routing.routed[:, None]
            self.counts.setdefault(name, []).append(routed.view(len(images), -1, routed.shape[-1]).sum(1).cpu())
        return logits


def ask(view: RunView, reading: Reading) -> NetworkFacts:
    """Asks the selected network of a run about images that it was not trained on.

    Of each domain at most `reading.max_images` are drawn at random, the same ones each time.

    Args:
        view: The run.
        reading: How.

    Raises:
        ArgumentError: The network's classes are not those of the data.
        DataError: The data cannot be read, or holds none of these images.
    """
    domains, test_domains = view.domains(reading.data_dir), list(view.args["test_domains"])
    if view.args.get("skip_unreadable"):
        domains, _ = drop_unreadable(domains, reading.workers)
    kept = _relevant(view.args, domains, test_domains)
    total = sum(map(_size, kept))
    if not total:
        raise DataError(f"dataset={view.args['dataset']!r}: holds no image that the network was not trained on")
    limited = [_limited(split, reading.max_images) for split in kept]
    images = EvaluationImages(domains, limited, view.transform, takes_metadata(view.model, domains, view.columns))
    network, positions = _FirstExperts(view.model), class_positions(view.model, domains[0].classes)
    with record_routing(view.model):
        answers = collect_outputs(network, _batches(view, images, reading.workers), positions)
    found = assess(answers, len(domains), test_domains)
    counts = {name: torch.cat(each) for name, each in network.counts.items()}
    return NetworkFacts(images, total, answers, found, test_domains, counts)


def _relevant(args: Arguments, domains: Sequence[Domain], test_domains: Sequence[int]) -> list[Split]:
    """Leaves of each split the part whose accuracy is reported, or selected by; training saw neither."""
    how = {"trial_seed": args["trial_seed"], "holdout_fraction": args.get("holdout_fraction", 0.2)}
    splits = split_domains(domains, [], **how)
    return [
        Split(split.inside, split.outside[:0]) if at in test_domains else Split(split.inside[:0], split.outside)
        for at, split in enumerate(splits)
    ]


def _size(split: Split) -> int:
    return len(split.inside) + len(split.outside)


def _limited(split: Split, most: int) -> Split:
    return Split(_drawn(split.inside, most), _drawn(split.outside, most))


def _drawn(positions: np.ndarray, most: int) -> np.ndarray:
    if len(positions) <= most:
        return positions
    return positions[np.sort(np.random.default_rng(0).permutation(len(positions))[:most])]


def _batches(view: RunView, images: EvaluationImages, workers: int) -> Iterator[list[Tensor]]:
    for batch in evaluation_loader(images, batch_size=view.batch_size, workers=workers):
        yield [part.to(view.device) for part in batch]
