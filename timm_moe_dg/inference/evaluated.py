"""A benchmark with a network's predictions on it: scores by domain, the printed table, files and pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..analysis.style import category_color, fitted, optional_picture, picture, text_size
from ..cli.text import one_line
from ..data import Domain, EvaluationImages
from ..metrics import CLASS_SCORES, CalibrationBins, calibration_bins, confusion_matrix, independent_number
from ..protocols.evaluation import (
    Assessment,
    Outputs,
    Scores,
    assess,
    describe_role,
    domain_accuracies,
    role_scores,
    unseen_domains,
)
from ..protocols.records import RoleScores
from ..protocols.selection import NEARLY_ALL, counted
from ..storage.files import json_text, write_csv

FILES = ("metrics.json", "per_domain.csv", "confusion.csv", "predictions.csv", "confusion.png", "reliability.png")
MAX_COUNTED = 30  # classes; counts of more are too small to read
MAX_NAMED = 90  # classes; of more, only every second or third is named


@dataclass(frozen=True)
class Evaluated:
    """Images of a benchmark and a network's predictions for them."""

    model: str
    images: EvaluationImages  # N of them
    outputs: Outputs  # predictions, in the order of the images
    test_domains: Sequence[int]  # positions of the domains that the network was not trained on; empty if unknown
    counted: Sequence[int]  # positions of the domains that overall scores and the confusion matrix cover
    known_roles: Sequence[str] = ()  # each domain's part in training, where a run recorded it
    group_squares: Sequence[Sequence[int]] = ()  # see `data.splits.group_squares`; empty without --group-column

    @property
    def domains(self) -> Sequence[Domain]:
        """All domains."""
        return self.images.domains

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the C classes."""
        return self.domains[0].classes

    @property
    def is_counted(self) -> Tensor:
        """Bool (N,): whether an image lies in a counted domain."""
        return torch.isin(self.outputs.group // 2, torch.tensor(list(self.counted), dtype=torch.long))

    @cached_property
    def assessment(self) -> Assessment:
        """The scores."""
        return assess(self.outputs, len(self.domains), self.test_domains, self.counted)

    @cached_property
    def split_accuracies(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Accuracies by domain on in-splits and on out-splits, as in a run's records."""
        return domain_accuracies(self.outputs, len(self.domains))

    @cached_property
    def roles(self) -> dict[str, RoleScores]:
        """Scores by role, for benchmarks with "id" and "ood" domains; see `protocols.role_scores`."""
        return role_scores(self.outputs, self.domains)

    @property
    def calibration_groups(self) -> dict[str, CalibrationBins]:
        """Bins before and after calibration, of the validation images and of all images of other domains."""
        group, outputs = self.outputs.group, self.outputs
        is_tested = torch.isin(group // 2, torch.tensor(list(self.test_domains), dtype=torch.long))
        parts = {"training domains": ~is_tested & (group % 2 == 1), "other domains": is_tested}
        kinds = {"before": outputs.uncalibrated, "after": outputs.confidence}
        if torch.equal(*kinds.values()):  # without a temperature
            kinds = {"as it is": outputs.confidence}
        correct = outputs.predicted == outputs.target
        return {
            f"{part}, {kind}": calibration_bins(confidence[mask], correct[mask])
            for part, mask in parts.items()
            for kind, confidence in kinds.items()
            if mask.any()
        }

    @property
    def domain_roles(self) -> list[str]:
        """Each domain's part in training, see `evaluation.describe_role`; "" if the test domains are unknown."""
        if self.known_roles:
            return list(self.known_roles)
        if not self.test_domains:
            return [""] * len(self.domains)
        return [describe_role(domain, index in self.test_domains) for index, domain in enumerate(self.domains)]

    @property
    def domain_order(self) -> list[int]:
        """Positions of the domains for display: held out first, then other test domains, then training domains."""
        first = unseen_domains(self.domains, self.test_domains, self.known_roles)
        rest = sorted(set(range(len(self.domains))) - set(first), key=lambda index: index not in self.test_domains)
        return [*first, *rest]

    @property
    def counted_name(self) -> str:
        """Describes the counted domains in a few words."""
        if len(self.counted) == len(self.domains):
            return "all domains"
        names = ", ".join(self.domains[index].name for index in self.counted)
        if sorted(self.counted) == sorted(unseen_domains(self.domains, self.test_domains, self.known_roles)):
            return f"{'not trained on' if 'new' in self.domain_roles else 'held out'}: {names}"
        return names

    @property
    def confusion(self) -> Tensor:
        """(C, C) counts over the counted domains, see `metrics.confusion_matrix`."""
        predicted, target = self.outputs.predicted[self.is_counted], self.outputs.target[self.is_counted]
        return confusion_matrix(predicted, target, len(self.classes))

    @property
    def image_order(self) -> np.ndarray:
        """(N,) indices that sort the images by domain, and within a domain by their position in the data."""
        # `EvaluationImages` lists a domain's in-split before its out-split
        return np.lexsort((self.images.positions, self.images.groups // 2))

    def file(self, index: int) -> str:
        """Names the file of an image."""
        return self.domains[self.images.groups[index] // 2].file(int(self.images.positions[index]))


def write_files(evaluated: Evaluated, folder: Path, settings: Mapping[str, object]) -> None:
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
    plain = evaluated.outputs._replace(confidence=evaluated.outputs.uncalibrated)
    without = assess(plain, len(evaluated.domains), counted=evaluated.counted)
    errors = [scores.ece for scores in without.domains]
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
    answers = evaluated.confusion.sum(0)
    most = int(answers.argmax())
    nearly_all = answers[most] >= NEARLY_ALL * answers.sum() and len(answers) > 1
    lines.append(f"most frequent answer: {evaluated.classes[most]!r}, {int(answers[most])} of {overall.images} images")
    if nearly_all:
        lines[-1] += f"; nearly all, so look at balanced accuracy, {_number(overall.balanced_accuracy)}"
    if "auc" in shown:
        lines.append(f"sensitivity: the recall of {evaluated.classes[1]!r}, the second of the two classes")
    if len(evaluated.counted) > 1:
        worst = [assessment.domains[index] for index in assessment.worst]
        names = ", ".join(evaluated.domains[index].name for index in assessment.worst)
        lines.append(f"average of {len(evaluated.counted)} domains {assessment.average:.4f}")
        squares = [sum(evaluated.group_squares[index]) for index in assessment.worst if evaluated.group_squares]
        number = sum(scores.images for scores in worst)
        images = counted(number, worst[0].accuracy, independent_number(number, squares) if squares else None)
        lines.append(f"worst domain {names} {worst[0].accuracy:.4f}{images}")
    return "\n".join(map(one_line, lines))


def _number(value: float, width: int = 0) -> str:
    return f"{'-' if isnan(value) else f'{value:.4f}':>{width}}"


def plot_confusion(matrix: Tensor, classes: Sequence[str], path: Path, title: str = "") -> None:
    """Draws (C, C) counts, a row for each target, colored by share. Up to 30 classes, the cells hold counts."""
    shares = (matrix / matrix.sum(1, keepdim=True).clamp(min=1)).numpy()
    side = min(3.2 + 0.36 * len(classes), 14.0)
    cell = 72 * (side - 1.5) / max(len(classes), 4)  # approximate width, points
    steps = range(0, len(classes), -(-len(classes) // MAX_NAMED))
    names = [fitted(classes[index], 24) for index in steps]
    with picture(path, side + 1.0, side + 0.8, layout="compressed") as figure:
        axes = figure.subplots()
        # scikit-learn's display colors by count, which hides the rare classes
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
        largest = min(text_size(side), cell * 1.4 / len(str(int(matrix.max()))))
        for (row, column), count in np.ndenumerate(matrix.numpy()) if len(classes) <= MAX_COUNTED else ():
            color = "white" if shares[row, column] > 0.5 else "black" if count else "silver"
            axes.text(column, row, count, ha="center", va="center", color=color, size=largest)
        lines = max(name.count("\n") + 1 for name in names)
        size = min(text_size(side), 0.8 * cell * steps.step / lines)
        axes.set_xticks(steps, names, rotation=90 if max(map(len, names)) > 2 else 0, size=size)
        axes.set_yticks(steps, names, size=size)
        axes.set(xlabel="predicted class", ylabel="class of the image")
        above = [fitted(line, 44) for line in title.splitlines()]
        axes.set_title("\n".join([*above, f"{int(matrix.sum())} images"]))
        figure.colorbar(image, label="share of the class's images", shrink=0.8)


def plot_reliability(groups: Mapping[str, CalibrationBins], path: Path) -> None:
    """Draws the accuracy of each filled confidence bin, and below it the share of predictions in the bin."""
    with picture(path, 4.6, 4.8) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        upper.plot([0, 1], [0, 1], color="gray", linestyle=":", linewidth=1)
        for number, (name, bins) in enumerate(groups.items()):
            filled, color, width = bins.num_samples > 0, category_color(number), 1 / len(bins.num_samples)
            confidence, accuracy = bins.confidence[filled].numpy(), bins.accuracy[filled].numpy()
            upper.plot(confidence, accuracy, marker="o", color=color, label=name)
            centers = [(index + 0.5) * width for index in range(len(filled))]
            shares = bins.num_samples / bins.num_samples.sum().clamp(min=1)
            lower.bar(centers, shares.tolist(), 0.9 * width, color=color, alpha=0.5)
        upper.set(ylabel="share of right predictions", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        upper.legend(loc="upper left")
        lower.set(xlabel="confidence", ylabel="share of images")
        lower.set_ylim(bottom=0)
