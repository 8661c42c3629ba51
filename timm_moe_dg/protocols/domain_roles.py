"""Scores over the domains that a benchmark sets apart for "id" and "ood" evaluation: overall, worst group, F1.

Tests are in-splits; out-splits are what such a benchmark validates on: "id_val" the training domains' images of the
validation split, "ood_val" those under shift, by which WILDS selects on FMoW and iWildCam.
"""

from collections.abc import Sequence

import torch

from ..data import UNGROUPED, Domain
from ..metrics import accuracy, f1_macro, group_accuracy, worst_group
from .evaluation import Judged
from .records import SCORED_ROLES, VALIDATION_ROLES, RoleScores


def part_played(domain: Domain, tested: bool) -> str:
    """Says what a domain was to a network: "train", "held out", or "test (id)" and "test (ood)" where data says so.

    Args:
        domain: It.
        tested: Whether it is among the run's test domains.
    """
    if domain.role != "train":
        return f"test ({domain.role})"
    return "held out" if tested else "train"


def held_out(domains: Sequence[Domain], test_domains: Sequence[int]) -> list[int]:
    """Positions of the test domains that a network saw nothing of; it was trained on the groups of "id" domains."""
    return [position for position in test_domains if domains[position].role != "id"]


def role_scores(predictions: Judged, domains: Sequence[Domain]) -> dict[str, RoleScores]:
    """Scores each role over the in-splits of its domains, and its validation over out-splits, one group a domain.

    Args:
        predictions: Of every image, groups as `EvaluationImages` numbers them.
        domains: All domains; those with another `role` than "id" or "ood" take no part.

    Returns:
        Role -> accuracy (over images), worst_accuracy and worst_group ("Other" counts overall, but is no group),
        f1_macro, group_accuracy and num_samples by group. Roles that no domain has are left out, and so is validation
        without images; a benchmark whose domains are all trained on has no scores at all.
    """
    found = {}
    for role in SCORED_ROLES:
        positions = [index for index, domain in enumerate(domains) if domain.role == role]
        if positions:
            found[role] = _scores(predictions, positions, _groups(domains, positions))
    for name, roles in VALIDATION_ROLES.items() if found else ():
        positions = [index for index, domain in enumerate(domains) if domain.role in roles]
        validated = [index for index in positions if (predictions.group == 2 * index + 1).any()]
        if validated:
            found[name] = _scores(predictions, validated, _groups(domains, validated), out=True)
    return found


def _groups(domains: Sequence[Domain], positions: Sequence[int]) -> list[str]:
    return [domains[index].group for index in positions]


def _scores(predictions: Judged, positions: Sequence[int], names: Sequence[str], out: bool = False) -> RoleScores:
    splits = 2 * torch.tensor(positions) + int(out)
    mine = torch.isin(predictions.group, splits)
    predicted, target = predictions.predicted[mine], predictions.target[mine]
    group = torch.searchsorted(splits, predictions.group[mine])
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
