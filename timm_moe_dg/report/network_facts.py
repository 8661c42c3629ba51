"""Predictions of a run's selected network on images that it was not trained on, for the run's report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..analysis.evaluated import Evaluated
from ..analysis.run_view import RunView
from ..cli.values import LOCAL
from ..data import Domain, EvaluationImages, Split
from ..data.splits import make_splits
from ..errors import DataError
from ..layers.reports import count_first_choices
from ..losses import record_routing, router_outputs
from ..metrics import CalibrationBins, calibration_bins
from ..networks.calibration import find_calibration
from ..networks.trained import match_classes, takes_metadata
from ..protocols.evaluation import Assessment, assess, collect_outputs, unseen_domains
from ..protocols.options import Arguments
from .pictures import Picture, thumbnail

MISTAKES = 12


class ReportSettings(NamedTuple):
    """How the network of a run is evaluated for its report."""

    data_dir: str | None = None  # None for the folder that the run used
    device: str = "cpu"
    batch_size: int = 64
    workers: int = 0  # loader processes
    max_images: int = 1000  # largest number for each domain


class Mistake(NamedTuple):
    """A wrong prediction, with the names of the two classes and the probability of the predicted one."""

    picture: Picture
    target: str
    predicted: str
    confidence: float


@dataclass(frozen=True, kw_only=True)
class NetworkFacts(Evaluated):
    """Predictions on the in-splits of held-out domains, and on the out-splits of the others.

    The held-out domains are the counted ones, or all domains if none was held out.
    """

    total: int  # number of such images; `images` has fewer if their number was limited
    first_experts: Mapping[str, Tensor]  # mixture layer -> (N, E) number of tokens of each image by first expert

    @cached_property
    def assessment(self) -> Assessment:
        """The scores."""
        # Held-out domains with images, first those that are not "id", or else all domains
        with_images = set((self.outputs.group // 2).tolist())
        choices = (unseen_domains(self.domains, self.test_domains), self.test_domains, range(len(self.domains)))
        present = ([position for position in choice if position in with_images] for choice in choices)
        return assess(self.outputs, len(self.domains), self.test_domains, next(filter(None, present)))

    def confused(self, most: int = 5) -> list[tuple[str, str, int]]:
        """The most frequent confusions: class of the image, predicted class, number of images."""
        wrong = self.confusion.fill_diagonal_(0)
        order = wrong.flatten().argsort(descending=True, stable=True)[:most].tolist()
        pairs = [divmod(index, len(self.classes)) for index in order]
        return [(self.classes[row], self.classes[col], int(wrong[row, col])) for row, col in pairs if wrong[row, col]]

    def calibration(self) -> dict[str, CalibrationBins]:
        """Confidence bins of held-out and of training domains. A kind without images is left out."""
        correct = self.outputs.predicted == self.outputs.target
        held_out = torch.isin(self.outputs.group // 2, torch.tensor(list(self.test_domains), dtype=torch.long))
        # Training domains have their out-splits here, so both kinds consist of images that training never used.
        kinds = {"tested domains": held_out, "training domains (out-splits)": ~held_out}
        return {
            name: calibration_bins(self.outputs.confidence[mask], correct[mask])
            for name, mask in kinds.items()
            if mask.any()
        }

    def worst_mistakes(self) -> list[Mistake]:
        """The wrong predictions with the highest confidence in the worst domain, or in all of equal accuracy."""
        in_worst = torch.isin(self.outputs.group // 2, torch.tensor(self.assessment.worst))
        wrong = (in_worst & (self.outputs.predicted != self.outputs.target)).nonzero().flatten()
        order = self.outputs.confidence[wrong].argsort(descending=True, stable=True)[:MISTAKES]
        return [self._mistake(index) for index in wrong[order].tolist()]

    def expert_use(self) -> dict[str, Tensor]:
        """Name of a mixture layer -> (D, E) share of a domain's tokens by first expert, NaN without images."""
        domain = self.outputs.group // 2
        members = torch.nn.functional.one_hot(domain, len(self.domains)).double()
        counts = {name: members.T @ tokens.double() for name, tokens in self.first_experts.items()}
        return {name: tokens / tokens.sum(1, keepdim=True) for name, tokens in counts.items()}

    def _mistake(self, index: int) -> Mistake:
        target, predicted = (self.classes[int(t[index])] for t in (self.outputs.target, self.outputs.predicted))
        domain = self.domains[int(self.outputs.group[index]) // 2]
        image = domain.image(int(self.images.positions[index]))
        picture = thumbnail(image.convert("RGB"), f"{target}, predicted as {predicted}")
        return Mistake(picture, target, predicted, self.outputs.confidence[index].item())


class _FirstExperts(nn.Module):
    """Wraps a network and counts the first experts of each image's tokens."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.counts: dict[str, list[Tensor]] = {}

    def forward(self, images: Tensor, *metadata: Tensor) -> Tensor:
        logits = self.network(images, *metadata)
        for name, routing in router_outputs(self.network).items():
            # Token counts are kept instead of indices: their size does not grow with the number of tokens.
            self.counts.setdefault(name, []).append(count_first_choices(routing, len(images)).cpu())
        return logits


def evaluate_network(view: RunView, settings: ReportSettings) -> NetworkFacts:
    """Evaluates the selected network of a run on images that it was not trained on."""
    domains, test_domains = view.domains, list(view.args["test_domains"])
    args = {**view.args, **({"data_dir": view.data_dir} if view.data_dir else {})}
    splits = _untrained_splits(args, domains, test_domains)
    total = sum(len(split.inside) + len(split.outside) for split in splits)
    if not total:
        raise DataError(f"dataset={view.args['dataset']!r}: has no image that the network was not trained on")
    most = settings.max_images
    limited = [Split(_subsample(split.inside, most), _subsample(split.outside, most)) for split in splits]
    domains, parts, positions = match_classes(view.model, domains, limited)
    with_metadata = takes_metadata(view.model, domains, view.columns)
    images = EvaluationImages(domains, parts, view.transform, with_metadata=with_metadata)
    network, calibration = _FirstExperts(view.model), find_calibration(f"{LOCAL}{view.folder / 'best'}", view.model)
    temperature = calibration.temperature if calibration else 1.0
    with record_routing(view.model):
        batches = view.evaluation_batches(images, settings.workers)
        outputs = collect_outputs(network, batches, positions, temperature=temperature)
    counts = {name: torch.cat(sizes) for name, sizes in network.counts.items()}
    counted = test_domains or range(len(domains))
    return NetworkFacts(view.name, images, outputs, test_domains, counted, total=total, first_experts=counts)


def _untrained_splits(args: Arguments, domains: Sequence[Domain], test_domains: Sequence[int]) -> list[Split]:
    """The in-splits of held-out domains, which are reported, and the out-splits of training domains."""
    splits = make_splits(domains, [index for index in range(len(domains)) if index not in test_domains], args)
    return [
        Split(split.inside, split.outside[:0]) if index in test_domains else Split(split.inside[:0], split.outside)
        for index, split in enumerate(splits)
    ]


def _subsample(positions: np.ndarray, most: int) -> np.ndarray:
    # A fixed seed gives the same images each time. Sorted positions keep the order of the data.
    return positions[np.sort(np.random.default_rng(0).permutation(len(positions))[:most])]
