"""The numbers that a run reports, in words, with the images behind them."""

from collections.abc import Sequence
from math import isnan, nan
from typing import NamedTuple

from ..data import UNGROUPED
from ..metrics import wilson_interval
from .records import Record, RoleScores
from .selection import reported_accuracy, tied_with_selected, training_domain_validation, validation_accuracy

FEW = 100  # images; with fewer, an accuracy is given with its interval


class Headline(NamedTuple):
    """A reported number, a share, with its description in words."""

    meaning: str
    value: float
    images: int | None  # None if not recorded
    of_one_set: bool = True  # False for a mean over domains

    @property
    def counted(self) -> str:
        """The number of images, see `counted`."""
        return counted(self.images, self.value if self.of_one_set else None)


def headlines(record: Record) -> list[Headline]:
    """Returns the accuracies over the data's own test images, out-of-distribution first, or over held-out domains.

    Without any of these, it is the accuracy of training-domain validation.
    """
    roles = {"ood": "out-of-distribution", "id": "in-distribution"}
    own = [
        Headline(f"the accuracy over all {words} test images", scores["accuracy"], images(scores))
        for role, words in roles.items()
        if (scores := record.roles.get(role))
    ]
    if own:
        return own
    if not record.test_domains:
        meaning = "the mean accuracy over the out-splits of the training domains (no domain was held out)"
        validated = record.images(record.training_domains, out=True)
        return [Headline(meaning, validation_accuracy(record), validated, of_one_set=False)]
    several = len(record.test_domains) > 1
    meaning = "the mean accuracy over the held-out in-splits" if several else "the accuracy on the held-out in-split"
    return [Headline(meaning, reported_accuracy(record), record.images(record.test_domains), not several)]


def headline_accuracy(record: Record) -> float:
    """Returns the first of `headlines`; NaN if no domain was held out."""
    return headlines(record)[0].value if record.test_domains else nan


def summary(record: Record) -> str:
    """Formats the accuracy on validation images and the reported ones in one line."""
    validated = record.images(record.training_domains, out=True)
    validation = f"training-domain validation (mean of out acc) {validation_accuracy(record):.4f}{counted(validated)}"
    reported = headlines(record) if record.test_domains else []
    return "; ".join([validation, *(f"{line.meaning} {line.value:.4f}{line.counted}" for line in reported)])


def selection_remark(records: Sequence[Record]) -> str | None:
    """Says in a sentence that training-domain validation had a tie in a run, or selected its first step."""
    tied = [record.step for record in tied_with_selected(records)]
    facts = []
    if len(tied) > 1:
        equal = f"{len(tied)} evaluations, of steps {min(tied)} to {max(tied)}, have the same validation accuracy"
        facts.append(f"{equal}, and the earliest is selected, as in DomainBed")
    if len(records) > 1 and training_domain_validation(records).step == 0:
        facts.append("the selected network is that of step 0, which has taken one training step")
    return "; ".join(facts) or None


def images(scores: RoleScores, groups: Sequence[str] | None = None) -> int | None:
    """Number of images of a role, or of some of its groups; None if not recorded."""
    numbers = scores.get("num_samples")
    return None if numbers is None else sum(numbers.get(group, 0) for group in (numbers if groups is None else groups))


def worst_groups(scores: RoleScores) -> list[str]:
    """Names of all groups with the lowest accuracy."""
    lowest, named = scores.get("worst_accuracy"), scores.get("worst_group")
    by_group = scores.get("group_accuracy", {})
    return [group for group in by_group if by_group[group] == lowest and group != UNGROUPED] or [named or "-"]


def counted(number: int | None, share: float | None = None) -> str:
    """Formats the number of images behind an accuracy, and its 95% interval if they are few; "" if unknown or 0."""
    if not number:
        return ""
    if number >= FEW or share is None or isnan(share):
        return f" ({number} image{'s' * (number != 1)})"
    low, high = (100 * bound for bound in wilson_interval(share, number))
    return f" ({number} image{'s' * (number != 1)}, 95% interval {low:.0f} to {high:.0f}%)"
