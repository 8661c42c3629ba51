"""The files of an evaluation: scores, confusions, every image's prediction, features."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ...protocols.assessment import Scores
from ...storage.csv_text import write_csv
from ...storage.json_text import json_text
from ..canvas import optional_picture
from ..confusion_plots import plot_confusion
from .evaluated import Evaluated
from .projection_plots import plot_projection

FILES = ("metrics.json", "per_domain.csv", "confusion.csv", "confusion.png", "predictions.csv", "projection.png")


def write_files(found: Evaluated, folder: Path, settings: Mapping[str, object], projection: str) -> None:
    """Writes `FILES`, without pictures where they cannot be drawn.

    Args:
        found: The evaluation; with features.
        folder: Where.
        settings: What was evaluated, and how, for metrics.json.
        projection: A name in `projection.METHODS`.
    """
    (folder / "metrics.json").write_text(json_text(metrics(found, settings), indent=2))
    write_csv(folder / "per_domain.csv", _domain_rows(found))
    matrix, names = found.confusion, found.classes
    counts = zip(names, matrix.tolist(), strict=True)
    write_csv(folder / "confusion.csv", [["class", *names], *([name, *row] for name, row in counts)])
    write_csv(folder / "predictions.csv", _prediction_rows(found))
    with optional_picture(folder / "confusion.png") as path:
        plot_confusion(matrix, names, path, f"{found.model}\n{found.counted_name}")
    with optional_picture(folder / "projection.png") as path:
        plot_projection(found, projection, path)


def metrics(found: Evaluated, settings: Mapping[str, object]) -> dict[str, object]:
    """Collects all scores as JSON has them: those of every domain, and those of the domains that count together."""
    inside, outside = found.split_accuracies
    scores = zip(found.domains, found.found.domains, inside, outside, found.parts, strict=True)
    return {
        **settings,
        "engine": found.engine,
        "domains": {
            domain.name: {**each._asdict(), "in_accuracy": own, "out_accuracy": other, "role": part}
            for domain, each, own, other, part in scores
        },
        "counted_domains": [found.domains[at].name for at in found.counted],
        "overall": found.found.overall._asdict(),
        "average_accuracy": found.found.average,
        "test_average_accuracy": found.found.test_average,
        "worst_domain": found.domains[found.found.worst].name,
        **({"roles": found.roles} if found.roles else {}),
    }


def save_features(found: Evaluated, path: Path) -> None:
    """Writes what the classifier saw of each image as npz, without pickle, in the order of predictions.csv.

    The arrays: features float32 (N, D); domain, target and prediction int64 (N,), the first two naming entries of
    domain_names and class_names; name (N,), the images' files.
    """
    rows, answers = found.rows, found.answers
    np.savez_compressed(
        path,
        features=answers.features.numpy()[rows],
        domain=(answers.group // 2).numpy()[rows],
        target=answers.target.numpy()[rows],
        prediction=answers.predicted.numpy()[rows],
        name=np.array([found.file(row) for row in rows]),
        domain_names=np.array([domain.name for domain in found.domains]),
        class_names=np.array(found.classes),
    )


def _domain_rows(found: Evaluated) -> Iterator[list[object]]:
    """Rows in the data's order; "test" is 1 for the domains that were not trained on."""
    yield ["domain", "test", *Scores._fields, "in_accuracy", "out_accuracy", "role"]
    inside, outside = found.split_accuracies
    for at, (domain, part) in enumerate(zip(found.domains, found.parts, strict=True)):
        yield [domain.name, int(at in found.test_domains), *found.found.domains[at], inside[at], outside[at], part]


def _prediction_rows(found: Evaluated) -> Iterator[list[object]]:
    """One row for each image, with the probability of each class."""
    yield ["file", "domain", "split", "target", "prediction", "probability", *(f"P({name})" for name in found.classes)]
    target, predicted = found.answers.target.tolist(), found.answers.predicted.tolist()
    for row in found.rows.tolist():
        domain, part = divmod(int(found.images.groups[row]), 2)
        names = [found.classes[at] for at in (target[row], predicted[row])]
        shares = [f"{share:.6f}" for share in found.answers.probabilities[row].tolist()]
        probability = f"{found.answers.confidence[row].item():.6f}"
        yield [found.file(row), found.domains[domain].name, ("in", "out")[part], *names, probability, *shares]
