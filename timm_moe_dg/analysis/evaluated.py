"""A benchmark with a network's predictions on it: test domains, scored domains, scores and confusions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..data import Domain, EvaluationImages
from ..metrics import CalibrationBins, calibration_bins, confusion_matrix
from ..protocols.evaluation import (
    Assessment,
    Outputs,
    assess,
    describe_role,
    domain_accuracies,
    role_scores,
    unseen_domains,
)
from ..protocols.records import RoleScores


@dataclass(frozen=True)
class Evaluated:
    """Images of a benchmark and a network's predictions for them."""

    model: str
    images: EvaluationImages  # N of them
    outputs: Outputs  # predictions, in the order of the images
    test_domains: Sequence[int]  # positions of the domains that the network was not trained on; empty if unknown
    counted: Sequence[int]  # positions of the domains that overall scores and the confusion matrix cover
    known_roles: Sequence[str] = ()  # each domain's part in training, where a run recorded it

    @property
    def domains(self) -> Sequence[Domain]:
        """All domains."""
        return self.images.domains

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the C classes."""
        return self.domains[0].classes

    @property
    def is_counted(self) -> Tensor:
        """Bool (N,): whether an image lies in a counted domain."""
        return torch.isin(self.outputs.group // 2, torch.tensor(list(self.counted), dtype=torch.long))

    @cached_property
    def assessment(self) -> Assessment:
        """The scores."""
        return assess(self.outputs, len(self.domains), self.test_domains, self.counted)

    @cached_property
    def split_accuracies(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Accuracies by domain on in-splits and on out-splits, as in a run's records."""
        return domain_accuracies(self.outputs, len(self.domains))

    @cached_property
    def roles(self) -> dict[str, RoleScores]:
        """Scores by role, for benchmarks with "id" and "ood" domains; see `protocols.role_scores`."""
        return role_scores(self.outputs, self.domains)

    @cached_property
    def uncalibrated_errors(self) -> tuple[float, ...]:
        """Calibration errors by domain without the temperature; NaN for a domain without images."""
        plain = self.outputs._replace(confidence=self.outputs.uncalibrated)
        return tuple(scores.ece for scores in assess(plain, len(self.domains), counted=self.counted).domains)

    @property
    def calibration_groups(self) -> dict[str, CalibrationBins]:
        """Bins before and after calibration, of the validation images and of all images of other domains."""
        group, outputs = self.outputs.group, self.outputs
        is_tested = torch.isin(group // 2, torch.tensor(list(self.test_domains), dtype=torch.long))
        parts = {"training domains": ~is_tested & (group % 2 == 1), "other domains": is_tested}
        kinds = {"before": outputs.uncalibrated, "after": outputs.confidence}
        if torch.equal(*kinds.values()):  # without a temperature
            kinds = {"as it is": outputs.confidence}
        correct = outputs.predicted == outputs.target
        return {
            f"{part}, {kind}": calibration_bins(confidence[mask], correct[mask])
            for part, mask in parts.items()
            for kind, confidence in kinds.items()
            if mask.any()
        }

    @property
    def domain_roles(self) -> list[str]:
        """Each domain's part in training, see `domain_roles.describe_role`; "" if the test domains are unknown."""
        if self.known_roles:
            return list(self.known_roles)
        if not self.test_domains:
            return [""] * len(self.domains)
        return [describe_role(domain, index in self.test_domains) for index, domain in enumerate(self.domains)]

    @property
    def domain_order(self) -> list[int]:
        """Positions of the domains for display: held out first, then other test domains, then training domains."""
        first = unseen_domains(self.domains, self.test_domains, self.known_roles)
        rest = sorted(set(range(len(self.domains))) - set(first), key=lambda index: index not in self.test_domains)
        return [*first, *rest]

    @property
    def counted_name(self) -> str:
        """Describes the counted domains in a few words."""
        if len(self.counted) == len(self.domains):
            return "all domains"
        names = ", ".join(self.domains[index].name for index in self.counted)
        if sorted(self.counted) == sorted(unseen_domains(self.domains, self.test_domains, self.known_roles)):
            return f"{'not trained on' if 'new' in self.domain_roles else 'held out'}: {names}"
        return names

    @property
    def confusion(self) -> Tensor:
        """(C, C) counts over the counted domains, see `metrics.confusion_matrix`."""
        predicted, target = self.outputs.predicted[self.is_counted], self.outputs.target[self.is_counted]
        return confusion_matrix(predicted, target, len(self.classes))

    @property
    def image_order(self) -> np.ndarray:
        """(N,) indices that sort the images by domain, and within a domain by their position in the data."""
        # `EvaluationImages` lists a domain's in-split before its out-split
        return np.lexsort((self.images.positions, self.images.groups // 2))

    def file(self, index: int) -> str:
        """Names the file of an image."""
        return self.domains[self.images.groups[index] // 2].file(int(self.images.positions[index]))
