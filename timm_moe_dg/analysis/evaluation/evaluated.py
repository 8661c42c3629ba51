"""A benchmark whose images a network has answered about: who is held out, which domains count, the scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...data import Domain, EvaluationImages
from ...metrics import confusion_matrix
from ...protocols import domain_accuracies, role_scores
from ...protocols.assessment import Assessment, assess
from ...protocols.domain_roles import held_out, part_played
from ...protocols.evaluation import Answers
from ...protocols.records import RoleScores


@dataclass(frozen=True)
class Evaluated:
    """Images and answers.

    Attributes:
        model: What it is called.
        images: What the network was asked about.
        answers: Its answers, in the same order.
        test_domains: Positions of the domains that it was not trained on; empty where nobody knows.
        counted: Positions of the domains that overall scores and confusions are of.
        engine: What computed the answers, see `export.engines`.
    """

    model: str
    images: EvaluationImages
    answers: Answers
    test_domains: Sequence[int]
    counted: Sequence[int]
    engine: str = "torch"

    @property
    def domains(self) -> Sequence[Domain]:
        """All domains."""
        return self.images.domains

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.domains[0].classes

    @cached_property
    def found(self) -> Assessment:
        """The scores.

        Raises:
            ArgumentError: No domain that counts has an image.
        """
        return assess(self.answers, len(self.domains), self.test_domains, self.counted)

    @cached_property
    def split_accuracies(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Accuracies on the in-splits and on the out-splits, by domain, as a run's records have them."""
        return domain_accuracies(self.answers, len(self.domains))

    @cached_property
    def roles(self) -> dict[str, RoleScores]:
        """Scores by role, where the benchmark sets domains apart; see `protocols.role_scores`."""
        return role_scores(self.answers, self.domains)

    @property
    def parts(self) -> list[str]:
        """What each domain was to the network, see `protocols.domain_roles.part_played`; "" where nobody knows."""
        known = bool(self.test_domains)
        return [part_played(domain, at in self.test_domains) if known else "" for at, domain in enumerate(self.domains)]

    @property
    def order(self) -> list[int]:
        """Positions of the domains: those held out first, then other test domains, then those trained on."""
        first = held_out(self.domains, self.test_domains)
        return [*first, *sorted(set(range(len(self.domains))) - set(first), key=lambda at: at not in self.test_domains)]

    @property
    def counted_name(self) -> str:
        """What the domains that count are together."""
        if len(self.counted) == len(self.domains):
            return "all domains"
        names = ", ".join(self.domains[at].name for at in self.counted)
        if sorted(self.counted) == sorted(held_out(self.domains, self.test_domains)):
            return f"held out: {names}"
        return names

    @property
    def confusion(self) -> Tensor:
        """(C, C) counts over the domains that count, see `metrics.confusion_matrix`."""
        mine = torch.isin(self.answers.group // 2, torch.tensor(self.counted))
        return confusion_matrix(self.answers.predicted[mine], self.answers.target[mine], len(self.classes))

    @property
    def rows(self) -> np.ndarray:
        """(N,) which answer is next, if images are listed by domain and, within each, in the data's order."""
        return np.lexsort((self.images.positions, self.images.groups // 2))

    def file(self, row: int) -> str:
        """Names the image of an answer."""
        return self.domains[self.images.groups[row] // 2].file(int(self.images.positions[row]))
