"""Joint scores of per-region models: each is trained on one region and evaluated on that region alone.

The runs are those of the protocol "per_region", on data with one training domain per region, like geo_digits and
FMoW_regions. Each run is selected on the validation images of its region.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import pandas as pd

from ..data import UNGROUPED
from ..errors import RecordError
from ..protocols.planner import TRAINING_PREFIX
from ..protocols.records import Record, RoleScores
from ..protocols.selection import training_domain_validation
from .runs import FinishedRun, domain_names


def trained_region(run: FinishedRun) -> str | None:
    """Returns the only region that a run was trained on, None if it was trained on several or has no regions."""
    first = run.records[0]
    regions, trained = _regions(first), first.training_domains
    if not first.roles or len(regions) < 2 or len(trained) != 1:
        return None
    return regions.get(trained[0])


def held_out_regions(run: FinishedRun) -> list[str]:
    """Names the regions that a run held out; none if it was trained on all or has no regions."""
    first = run.records[0]
    return [name for position, name in _regions(first).items() if first.roles and position in first.test_domains]


def joined_regions(runs: Sequence[FinishedRun]) -> Record:
    """Joins one trial seed's models of all regions into one record, with the scores of each on its own region.

    The "ood" scores are joined only if every region has "ood" test images, like FMoW with its later years.

    Raises:
        RecordError: A region has no run, or no test image of a region was scored.
    """
    by_region: dict[str, list[Record]] = {}
    for run in runs:
        if region := trained_region(run):
            by_region.setdefault(region, []).extend(run.records)
    needed = _regions(runs[0].records[0]).values() if runs else []
    if missing := sorted(set(needed) - set(by_region)) or not by_region:
        raise RecordError(f"records: per-region models lack runs trained on {missing or 'any region'}")
    selected = {region: training_domain_validation(records) for region, records in by_region.items()}
    roles = {"id": _joined(selected, "id")}
    if all(region in group_scores(record, "ood") for region, record in selected.items()):
        roles["ood"] = _joined(selected, "ood")
    return replace(next(iter(selected.values())), roles=roles, metrics={})


def _joined(selected: Mapping[str, Record], role: str) -> RoleScores:
    names = ("group_accuracy", "num_samples")
    lines = [[group_scores(record, role, name).get(region) for name in names] for region, record in selected.items()]
    frame = pd.DataFrame(lines, index=list(selected), columns=names, dtype=float)
    for region in frame.index[frame.isna().any(axis="columns")]:
        raise RecordError(f"records: the model of region {region!r} was scored on no {role} test image of that region")
    accuracy, number = frame.group_accuracy, frame.num_samples
    return {
        # Regions have different numbers of images, and the overall accuracy is over images.
        "accuracy": float((accuracy * number).sum() / number.sum()),
        "worst_accuracy": float(accuracy.min()),
        "worst_group": str(accuracy.idxmin()),
        "group_accuracy": accuracy.to_dict(),
        "num_samples": number.astype(int).to_dict(),
    }


def group_scores(record: Record, role: str, name: str = "group_accuracy") -> Mapping[str, float]:
    """Returns the accuracy of each group of a role, or another score of them."""
    return cast(Mapping[str, float], record.roles.get(role, {}).get(name, {}))


def unseen_accuracies(record: Record) -> dict[str, float]:
    """Returns the accuracy on each held-out domain, for data with its own test domains on each "ood" group.

    Groups that were trained on are left out, as is "Other". With pooled training domains no group is surely unseen.
    """
    names = domain_names([record])
    if not record.roles:
        return {names[domain]: record.in_acc[domain] for domain in record.test_domains}
    trained = {names[domain].removeprefix(TRAINING_PREFIX) for domain in record.training_domains}
    # A single training domain has this name alone
    groups = {} if TRAINING_PREFIX.strip() in trained else group_scores(record, "ood")
    return {group: accuracy for group, accuracy in groups.items() if group not in {*trained, UNGROUPED}}


def _regions(record: Record) -> dict[int, str]:
    """Names of the regions by the position of their training domain."""
    names = enumerate(record.args.get("domains") or ())
    return {i: name.removeprefix(TRAINING_PREFIX) for i, name in names if name.startswith(TRAINING_PREFIX)}
