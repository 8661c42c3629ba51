"""Scores over the domains that a benchmark sets apart for "id" and "ood" evaluation: overall, worst group, F1."""

from collections.abc import Sequence

import torch

from ..data import UNGROUPED, Domain
from ..metrics import accuracy, f1_macro, group_accuracy, worst_group
from .evaluation import Judged
from .records import RoleScores

SCORED_ROLES = ("id", "ood")


def role_scores(predictions: Judged, domains: Sequence[Domain]) -> dict[str, RoleScores]:
    """Scores each role over the in-splits of its domains, one group a domain.

    Args:
        predictions: Of every image, groups as `EvaluationImages` numbers them.
        domains: All domains; those with another `role` than "id" or "ood" take no part.

    Returns:
        Role -> accuracy (over images), worst_accuracy and worst_group ("Other" counts overall, but is no group),
        f1_macro, group_accuracy and num_samples by group. Roles that no domain has are left out.
    """
    found = {}
    for role in SCORED_ROLES:
        positions = [index for index, domain in enumerate(domains) if domain.role == role]
        if positions:
            names = [domains[index].group for index in positions]
            found[role] = _scores(predictions, positions, names)
    return found


def _scores(predictions: Judged, positions: Sequence[int], names: Sequence[str]) -> RoleScores:
    inside = 2 * torch.tensor(positions)
    mine = torch.isin(predictions.group, inside)
    predicted, target = predictions.predicted[mine], predictions.target[mine]
    group = torch.searchsorted(inside, predictions.group[mine])
    each = group_accuracy(predicted, target, group, len(names))
    ignored = [index for index, name in enumerate(names) if name == UNGROUPED]
    worst = worst_group(predicted, target, group, len(names), ignored)
    return {
        "accuracy": accuracy(predicted, target).item(),
        "worst_accuracy": worst.accuracy,
        "worst_group": names[worst.group] if worst.group >= 0 else None,
        "f1_macro": f1_macro(predicted, target).item(),
        "group_accuracy": dict(zip(names, each.accuracy.tolist(), strict=True)),
        "num_samples": dict(zip(names, each.num_samples.tolist(), strict=True)),
    }
