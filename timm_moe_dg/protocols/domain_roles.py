"""Scores of benchmarks that set some domains apart for "id" and "ood" evaluation: overall, worst group, F1.

Test scores are over in-splits. Validation scores are over out-splits: "id_val" of the training domains, and "ood_val"
of domains under shift. WILDS selects by "ood_val" on FMoW and iWildCam.
"""

from collections.abc import Sequence

import torch

from ..data import UNGROUPED, Domain
from ..metrics import accuracy, f1_macro, group_accuracy, worst_group
from .evaluation import Outputs, Predictions
from .records import SCORED_ROLES, VALIDATION_ROLES, RoleScores


def describe_role(domain: Domain, tested: bool) -> str:
    """Returns "train", "held out", or "test (id)" and "test (ood)" for domains that the data sets apart."""
    if domain.role != "train":
        return f"test ({domain.role})"
    return "held out" if tested else "train"


def unseen_domains(domains: Sequence[Domain], test_domains: Sequence[int]) -> list[int]:
    """Returns the positions of the test domains that are new to a network; groups of "id" domains were trained on."""
    return [position for position in test_domains if domains[position].role != "id"]


def role_scores(predictions: Predictions | Outputs, domains: Sequence[Domain]) -> dict[str, RoleScores]:
    """Scores each role over the in-splits of its domains, and its validation over out-splits, with a group per domain.

    Returns:
        Role -> scores. Images of "Other" count, but are not a group. Roles without domains are left out, and so is
        validation without images. A benchmark without "id" and "ood" domains has no scores.
    """
    scores = {}
    for role in SCORED_ROLES:
        positions = [index for index, domain in enumerate(domains) if domain.role == role]
        if positions:
            scores[role] = _scores(predictions, domains, positions)
    for name, roles in VALIDATION_ROLES.items() if scores else ():
        positions = [index for index, domain in enumerate(domains) if domain.role in roles]
        validated = [index for index in positions if (predictions.group == 2 * index + 1).any()]
        if validated:
            scores[name] = _scores(predictions, domains, validated, out=True)
    return scores


def _scores(
    predictions: Predictions | Outputs, domains: Sequence[Domain], positions: Sequence[int], out: bool = False
) -> RoleScores:
    names = [domains[index].group for index in positions]
    splits = 2 * torch.tensor(positions) + int(out)
    scored = torch.isin(predictions.group, splits)
    predicted, target = predictions.predicted[scored], predictions.target[scored]
    # Splits are in ascending order, which searchsorted needs
    group = torch.searchsorted(splits, predictions.group[scored])
    groups = group_accuracy(predicted, target, group, len(names))
    ignored = [index for index, name in enumerate(names) if name == UNGROUPED]
    worst = worst_group(predicted, target, group, len(names), ignored)
    return {
        "accuracy": accuracy(predicted, target).item(),
        "worst_accuracy": worst.accuracy,
        "worst_group": names[worst.group] if worst.group >= 0 else None,
        "f1_macro": f1_macro(predicted, target).item(),
        "group_accuracy": dict(zip(names, groups.accuracy.tolist(), strict=True)),
        "num_samples": dict(zip(names, groups.num_samples.tolist(), strict=True)),
    }
