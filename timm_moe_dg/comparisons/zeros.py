"""Rows of a comparison that see no pixel: the most frequent class, and the places of the images alone."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.dummy import DummyClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from ..data import Domain
from ..errors import ArgumentError
from ..finetuning.plan import RunPlan, make_plan
from ..finetuning.run import score
from ..networks.trained import unknown_metadata
from ..protocols.options import RunOptions
from ..protocols.records import Record
from ..results.costs import WITHOUT_NETWORK
from ..storage.files import owned
from ..storage.run_folder import RunFolder

NEIGHBORS = (1, 3, 5, 10, 20, 50)
_LEAST = 1e-6  # probability in place of 0, whose logarithm is infinite


def has_coordinates(domain: Domain) -> bool:
    """Whether any image of a domain has a longitude and a latitude."""
    metadata = np.asarray(domain.metadata if domain.metadata is not None else [])
    return metadata.ndim == 2 and not unknown_metadata(metadata[:, :2]).all()


def most_frequent(plan: RunPlan) -> ClassifierMixin:
    """Answers with the most frequent class of the training images."""
    targets = np.concatenate(plan.training_rows("targets"))
    return DummyClassifier(strategy="prior").fit(np.zeros((len(targets), 2)), targets)


def places(plan: RunPlan) -> ClassifierMixin:
    """Nearest neighbors by great-circle distance. Training-domain validation chooses their number."""
    inside, outside = ([_with_places(plan, index, part) for index in plan.training] for part in ("inside", "outside"))
    points, targets = map(np.concatenate, zip(*inside, strict=True))
    if not len(points):
        remedy = "no training image has coordinates; leave the row out, or give --dataset place_folder"
        raise ArgumentError.of("rows", "places", remedy)
    radians = FunctionTransformer(lambda places: np.deg2rad(places[:, ::-1]))
    candidates = [
        make_pipeline(radians, KNeighborsClassifier(number, metric="haversine")).fit(points, targets)
        for number in NEIGHBORS
        if number <= len(points)
    ]

    def validation(candidate: ClassifierMixin) -> float:
        scores = [candidate.score(*rows) for rows in outside if len(rows[0])]
        return float(np.mean(scores)) if scores else 0.0

    return max(candidates, key=validation)


ZEROS: Mapping[str, Callable[[RunPlan], ClassifierMixin]] = MappingProxyType(
    {"most_frequent": most_frequent, "places": places}
)


def write_zero(row: str, options: RunOptions) -> None:
    """Scores a row of `ZEROS` on the domains and splits of a run, and writes it as a finished run of one evaluation."""
    plan = make_plan(options)
    classifier, frequent = ZEROS[row](plan), most_frequent(plan)
    batches = []
    for index, (domain, split) in enumerate(zip(plan.domains, plan.splits, strict=True)):
        points, targets = _places(domain), np.asarray(domain.targets)
        unknown = unknown_metadata(points)
        shares = np.zeros((len(domain), len(plan.classes)))
        for answering, mask in ((frequent, unknown), (classifier, ~unknown)):
            if mask.any():
                shares[np.ix_(mask, answering.classes_)] = answering.predict_proba(points[mask])
        logits = torch.from_numpy(shares).clamp(min=_LEAST).log().float()
        for part, rows in enumerate((split.inside, split.outside)):
            groups = torch.full((len(rows),), 2 * index + part)
            batches.append((logits[rows], torch.from_numpy(targets[rows]), groups))
    names = {"algorithm": row, "model": WITHOUT_NETWORK}
    args = {**plan.record_args, **names}
    scores = score(torch.nn.Identity(), batches, plan.domains, plan.options.metric)
    hparams, folder = plan.hparams, RunFolder(plan.folder.path, {**plan.folder.args, **names})
    record = Record(step=0, epoch=0.0, losses={}, step_time=0.0, mem_gb=0.0, args=args, hparams=hparams, **scores)
    with owned(folder.path):
        folder.add(record, lambda _: None)  # there is no network to save
        folder.finish()


def _with_places(plan: RunPlan, index: int, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Places (N, 2) and classes (N,) of the images in a split of a domain whose place is known."""
    domain, split = plan.domains[index], getattr(plan.splits[index], part)
    points, targets = _places(domain)[split], np.asarray(domain.targets)[split]
    is_known = ~unknown_metadata(points)
    return points[is_known], targets[is_known]


def _places(domain: Domain) -> np.ndarray:
    """(N, 2) longitudes and latitudes of a domain, NaN where they are unknown."""
    if not has_coordinates(domain):
        return np.full((len(domain), 2), np.nan)
    return np.asarray(domain.metadata, float)[:, :2]
