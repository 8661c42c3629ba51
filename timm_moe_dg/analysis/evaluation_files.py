"""Output of an evaluation: the printed table, and files of scores, confusions, predictions and features."""

from collections.abc import Iterator, Mapping
from math import isnan
from pathlib import Path

import numpy as np

from ..cli.text import one_line
from ..metrics import CLASS_SCORES
from ..protocols.evaluation import Scores
from ..protocols.selection import counted
from ..storage.files import json_text, write_csv
from .evaluated import Evaluated
from .evaluation_projection import plot_projection
from .score_plots import plot_confusion, plot_reliability
from .style import optional_picture

PICTURES = ("confusion.png", "projection.png", "reliability.png")
FILES = ("metrics.json", "per_domain.csv", "confusion.csv", "predictions.csv", *PICTURES)


def write_files(evaluated: Evaluated, folder: Path, settings: Mapping[str, object], projection: str) -> None:
    """Writes `FILES` for an evaluation with features. Pictures that cannot be drawn are skipped with a warning."""
    (folder / "metrics.json").write_text(json_text(metrics(evaluated, settings), indent=2))
    write_csv(folder / "per_domain.csv", domain_rows(evaluated))
    matrix, names = evaluated.confusion, evaluated.classes
    counts = zip(names, matrix.tolist(), strict=True)
    write_csv(folder / "confusion.csv", [["class", *names], *([name, *row] for name, row in counts)])
    write_csv(folder / "predictions.csv", _prediction_rows(evaluated))
    with optional_picture(folder / "confusion.png") as path:
        plot_confusion(matrix, names, path, f"{evaluated.model}\n{evaluated.counted_name}")
    with optional_picture(folder / "reliability.png") as path:
        plot_reliability(evaluated.calibration_groups, path)
    with optional_picture(folder / "projection.png") as path:
        plot_projection(evaluated, projection, path)


def metrics(evaluated: Evaluated, settings: Mapping[str, object]) -> dict[str, object]:
    """Collects the scores for JSON: those of every domain, and those of all counted domains together."""
    assessment = evaluated.assessment
    (_, _, *columns), *rows = domain_rows(evaluated)
    return {
        **settings,
        "domains": {name: dict(zip(columns, values, strict=True)) for name, _, *values in rows},
        "counted_domains": [evaluated.domains[index].name for index in evaluated.counted],
        "overall": assessment.overall._asdict(),
        "average_accuracy": assessment.average,
        "test_average_accuracy": assessment.test_average,
        "worst_domains": [evaluated.domains[index].name for index in assessment.worst],
        **({"roles": evaluated.roles} if evaluated.roles else {}),
    }


def save_features(evaluated: Evaluated, path: Path) -> None:
    """Writes the classifier's inputs as npz, without pickle, in the order of predictions.csv.

    The arrays: features float32 (N, D); domain, target and prediction int64 (N,), indices into domain_names and
    class_names; name (N,), the images' files.
    """
    order, outputs = evaluated.image_order, evaluated.outputs
    np.savez_compressed(
        path,
        features=outputs.features.numpy()[order],
        domain=(outputs.group // 2).numpy()[order],
        target=outputs.target.numpy()[order],
        prediction=outputs.predicted.numpy()[order],
        name=np.array([evaluated.file(index) for index in order]),
        domain_names=np.array([domain.name for domain in evaluated.domains]),
        class_names=np.array(evaluated.classes),
    )


def domain_rows(evaluated: Evaluated) -> Iterator[list[object]]:
    """Rows in the data's order; "test" is 1 for domains that were not trained on."""
    yield ["domain", "test", *Scores._fields, "in_accuracy", "out_accuracy", "role", "ece_uncalibrated"]
    errors = evaluated.uncalibrated_errors
    scores = zip(evaluated.assessment.domains, *evaluated.split_accuracies, evaluated.domain_roles, errors, strict=True)
    for index, (of_domain, *further) in enumerate(scores):
        yield [evaluated.domains[index].name, int(index in evaluated.test_domains), *of_domain, *further]


def _prediction_rows(evaluated: Evaluated) -> Iterator[list[object]]:
    classes, outputs = evaluated.classes, evaluated.outputs
    yield ["file", "domain", "split", "target", "prediction", "probability", *(f"P({name})" for name in classes)]
    target, predicted = outputs.target.tolist(), outputs.predicted.tolist()
    for index in evaluated.image_order.tolist():
        domain, split = divmod(int(evaluated.images.groups[index]), 2)
        names = [classes[target[index]], classes[predicted[index]]]
        probabilities = [f"{value:.6f}" for value in outputs.probabilities[index].tolist()]
        confidence = f"{outputs.confidence[index].item():.6f}"
        place = [evaluated.file(index), evaluated.domains[domain].name, ("in", "out")[split]]
        yield [*place, *names, confidence, *probabilities]


def score_table(evaluated: Evaluated) -> str:
    """Formats the scores for the screen: a row for each domain, held-out domains first, then the totals."""
    assessment, roles, overall = evaluated.assessment, evaluated.domain_roles, evaluated.assessment.overall
    name_width = max(len("domain"), *(len(domain.name) for domain in evaluated.domains))
    role_width = max(len("role"), *map(len, roles))
    inside, outside = evaluated.split_accuracies
    shown = [name for name in CLASS_SCORES if name != "f1_macro"][: 4 if len(evaluated.classes) == 2 else 1]
    lines = [
        f"{'domain':<{name_width}}  {'role':<{role_width}}   images  accuracy  in-split  out-split  F1-macro     ECE"
        + "".join(f"  {CLASS_SCORES[name]:>11}" for name in shown)
    ]
    for index in evaluated.domain_order:
        scores, name = assessment.domains[index], evaluated.domains[index].name
        accuracies = f"{_number(scores.accuracy, 8)}  {_number(inside[index], 8)}  {_number(outside[index], 9)}"
        numbers = f"{scores.images:7d}  {accuracies}  {_number(scores.f1_macro, 8)}  {_number(scores.ece, 6)}"
        numbers += "".join(f"  {_number(getattr(scores, column), 11)}" for column in shown)
        lines.append(f"{name:<{name_width}}  {roles[index]:<{role_width}}  {numbers}")
    totals = f"{overall.images} images, accuracy {_number(overall.accuracy)}, F1-macro {_number(overall.f1_macro)}"
    lines.append(f"together ({evaluated.counted_name}): {totals}, ECE {_number(overall.ece)}")
    if "auc" in shown:
        lines.append(f"sensitivity: the recall of {evaluated.classes[1]!r}, the second of the two classes")
    if len(evaluated.counted) > 1:
        worst = [assessment.domains[index] for index in assessment.worst]
        names = ", ".join(evaluated.domains[index].name for index in assessment.worst)
        lines.append(f"average of {len(evaluated.counted)} domains {assessment.average:.4f}")
        images = counted(sum(scores.images for scores in worst), worst[0].accuracy)
        lines.append(f"worst domain {names} {worst[0].accuracy:.4f}{images}")
    return "\n".join(map(one_line, lines))


def _number(value: float, width: int = 0) -> str:
    return f"{'-' if isnan(value) else f'{value:.4f}':>{width}}"
