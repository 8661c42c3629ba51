"""Roles of domains for a network, and scores of benchmarks that set "id" and "ood" domains apart.

Test scores are over in-splits. Validation scores are over out-splits: "id_val" of the training domains, and "ood_val"
of domains under shift. WILDS selects by "ood_val" on FMoW and iWildCam.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..data import BENCHMARKS, UNGROUPED, Domain
from ..data.fingerprint import Fingerprint, same_images
from ..metrics import accuracy, f1_macro, group_accuracy, worst_group
from .evaluation import Outputs, Predictions
from .options import Arguments
from .records import SCORED_ROLES, VALIDATION_ROLES, RoleScores


def describe_role(domain: Domain, tested: bool) -> str:
    """Returns "train", "held out", or "test (id)" and "test (ood)" for domains that the data sets apart."""
    if domain.role != "train":
        return f"test ({domain.role})"
    return "held out" if tested else "train"


class Recognized(NamedTuple):
    """A domain's place in the run's data."""

    position: int | None  # in the run's data; None for a new domain
    trained: bool  # whether the run trained on it
    changed: bool = False  # whether it has a name of the run's data, and other images

    def role(self, domain: Domain) -> str:
        """Describes the domain as `describe_role` does. Domains that the run did not have are "new"."""
        if self.position is None:
            return "new"
        return describe_role(domain, not self.trained) + (", changed" if self.changed else "")


def recognize(run: Arguments, domains: Sequence[Domain], digests: Fingerprint) -> list[Recognized] | None:
    """Finds the domains of a run among others, by their names and images; None if the run recorded no names.

    A renamed domain is found by its images. A domain that has a name of the run's and other images is taken for the
    run's domain, since it may hold images that were trained on.

    Args:
        run: Arguments of the run.
        domains: Domains of any benchmark.
        digests: Their fingerprint; not needed if the run recorded none.
    """
    recorded = run.get("domain_digests") or ()
    benchmark = BENCHMARKS.get(run.get("dataset", ""))
    names = [table["name"] for table in recorded] or list(benchmark.domains if benchmark else ())
    if not names or not isinstance(run.get("test_domains"), list):
        return None
    trained = [position for position in range(len(names)) if position not in run["test_domains"]]
    known = []
    for index, domain in enumerate(domains):
        named = [names.index(domain.name)] if domain.name in names else []
        same = [position for position, table in enumerate(recorded) if same_images(table, digests[index])]
        # Of several domains with the same images, that of the name, and then one that was trained on
        candidates = [*(set(named) & set(same)), *(set(trained) & set(same)), *same, *named]
        position = candidates[0] if candidates else None
        known.append(Recognized(position, position in trained, bool(recorded and candidates and not same)))
    return known


def unseen_domains(domains: Sequence[Domain], test_domains: Sequence[int], roles: Sequence[str] = ()) -> list[int]:
    """Returns the positions of the test domains that are new to a network.

    Groups of "id" domains were trained on, except in domains that the network's run did not have.

    Args:
        domains: All domains.
        test_domains: Positions of the domains that the network was not trained on.
        roles: Each domain's part in training, where a run recorded it; see `Recognized.role`.
    """
    new = [position for position, role in enumerate(roles) if role == "new"]
    return [position for position in test_domains if domains[position].role != "id" or position in new]


def role_scores(predictions: Predictions | Outputs, domains: Sequence[Domain]) -> dict[str, RoleScores]:
    """Scores each role over the in-splits of its domains, and its validation over out-splits, by group.

    Returns:
        Role -> scores. Images of "Other" count, but are not a group. Roles without images are left out. A benchmark
        without "id" and "ood" domains has no scores.
    """
    scores = {}
    for role in SCORED_ROLES:
        positions = [index for index, domain in enumerate(domains) if domain.role == role]
        if torch.isin(predictions.group, 2 * torch.tensor(positions, dtype=torch.long)).any():
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
    names = list(dict.fromkeys(domains[index].group for index in positions))
    group_of_split = torch.tensor([names.index(domains[index].group) for index in positions])
    splits = 2 * torch.tensor(positions) + int(out)
    scored = torch.isin(predictions.group, splits)
    predicted, target = predictions.predicted[scored], predictions.target[scored]
    # Splits are in ascending order, which searchsorted needs
    group = group_of_split[torch.searchsorted(splits, predictions.group[scored])]
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
