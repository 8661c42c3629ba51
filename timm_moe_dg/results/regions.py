"""Models for one region alone, each asked about its own: what they come to together.

The data sets domains of test images apart and has one training domain a region, as geo_digits and FMoW_regions do. The
runs are those of the protocol "per_region", each trained on one region and selected on its validation images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isnan, nan
from typing import Literal

from ..errors import RecordError
from ..protocols.planner import TRAINING_PREFIX
from ..protocols.records import Record, RoleScores
from ..protocols.selection import training_domain_validation
from .runs import FinishedRun


def trained_region(run: FinishedRun) -> str | None:
    """Returns the only region that a run was trained on; None if it was trained on all that there is."""
    first = run.records[0]
    regions, trained = _regions(first), first.training_domains
    if not first.roles or len(regions) < 2 or len(trained) != 1:
        return None
    return regions.get(trained[0])


def joined_regions(runs: Sequence[FinishedRun]) -> Record:
    """Joins the models of all regions, of one trial seed, into an evaluation with the scores of each on its own.

    Those of "id" test images, and of "ood" ones where every region has such too, as FMoW's later years.

    Args:
        runs: For each region those trained on it alone, with any hyper-parameter seeds.

    Raises:
        RecordError: A region lacks its run, or no test images of a region were scored.
    """
    found: dict[str, list[Record]] = {}
    for run in runs:
        if region := trained_region(run):
            found.setdefault(region, []).extend(run.records)
    needed = _regions(runs[0].records[0]).values() if runs else []
    if lacking := sorted(set(needed) - set(found)) or not found:
        raise RecordError(f"records: per-region models lack runs trained on {lacking or 'any region'}")
    chosen = {region: training_domain_validation(records) for region, records in found.items()}
    roles = {"id": _joined(chosen, "id")}
    if all(
        region in record.roles.get("ood", RoleScores()).get("group_accuracy", {}) for region, record in chosen.items()
    ):
        roles["ood"] = _joined(chosen, "ood")
    return replace(next(iter(chosen.values())), roles=roles)


def _joined(chosen: Mapping[str, Record], role: str) -> RoleScores:
    accuracy = {region: _own_score(record, role, region, "group_accuracy") for region, record in chosen.items()}
    number = {region: int(_own_score(record, role, region, "num_samples")) for region, record in chosen.items()}
    worst = min(accuracy, key=lambda region: accuracy[region])
    return {
        "accuracy": sum(accuracy[region] * number[region] for region in accuracy) / sum(number.values()),
        "worst_accuracy": accuracy[worst],
        "worst_group": worst,
        "group_accuracy": accuracy,
        "num_samples": number,
    }


def _regions(record: Record) -> dict[int, str]:
    """Regions by the position of their training domain."""
    names = enumerate(record.args.get("domains") or ())
    return {at: name.removeprefix(TRAINING_PREFIX) for at, name in names if name.startswith(TRAINING_PREFIX)}


def _own_score(record: Record, role: str, region: str, score: Literal["group_accuracy", "num_samples"]) -> float:
    value = record.roles.get(role, RoleScores()).get(score, {}).get(region, nan)
    if isnan(value):
        raise RecordError(f"records: no {role} test image of {region!r} was scored, which its own model is asked about")
    return value
