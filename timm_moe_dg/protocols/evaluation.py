"""Evaluation: one pass over every image, then scores by domain, split, role and group.

Roles are "train", "id" and "ood", for benchmarks that set domains apart. Their test scores are over in-splits.
Validation scores are over out-splits: "id_val" of the training domains, and "ood_val" of domains under shift. WILDS
selects by "ood_val" on FMoW and iWildCam.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import BENCHMARKS, UNGROUPED, Domain, Split
from ..data.inspection import Fingerprint, same_images
from ..errors import ArgumentError
from ..metrics import (
    CLASS_SCORES,
    accuracy,
    class_scores,
    expected_calibration_error,
    f1_macro,
    group_accuracy,
    worst_group,
)
from .options import Arguments
from .records import SCORED_ROLES, VALIDATION_ROLES, RoleScores

Batches = Iterable[Sequence[Tensor]]
Gather = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


class Predictions(NamedTuple):
    """Predictions and losses of a network, on CPU."""

    predicted: Tensor  # class indices, (N,)
    target: Tensor  # class indices, (N,)
    group: Tensor  # 2 * domain for in-split images and 2 * domain + 1 for out-split images, (N,)
    loss: Tensor  # cross-entropies, (N,)
    positive: Tensor  # `positive_score`, (N,)


class Outputs(NamedTuple):
    """Probabilities and features of a network, on CPU."""

    predicted: Tensor  # the first three are as in `Predictions`
    target: Tensor
    group: Tensor
    confidence: Tensor  # softmax probability of the predicted class, (N,)
    probabilities: Tensor  # of all classes in the data's order, (N, C)
    features: Tensor  # input of the classifier, (N, D); (N, 0) if the network does not return it
    uncalibrated: Tensor  # `confidence` without the temperature
    positive: Tensor  # `positive_score`, (N,)


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Within the context, a network is in evaluation mode, without gradients. The mode of every module is restored."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        # Module by module, because frozen batch normalization is in evaluation mode during training
        for module in training:
            module.training = True


def predict(network: nn.Module, batches: Batches, gather: Gather = tuple) -> Predictions:
    """Predicts every batch in evaluation mode, and restores the mode of every module.

    Args:
        network: Maps images (B, 3, H, W), and their metadata if batches have any, to logits (B, num_classes).
        batches: Images, targets (B,), groups (B,) and possibly metadata, on the network's device.
        gather: Collects tensors over processes and drops the padding, as accelerate's `gather_for_metrics` does.
    """
    rows = []
    with evaluation_mode(network):
        for images, target, group, *metadata in batches:
            logits = network(images, *metadata)
            # In half precision the loss would have three digits
            loss = F.cross_entropy(logits.float(), target, reduction="none")
            rows.append(gather((logits.argmax(1), target, group, loss, positive_score(logits))))
    return Predictions(*(torch.cat(column).cpu() for column in zip(*rows, strict=True)))  # waits for a device once


@torch.no_grad()
def collect_outputs(
    network: Callable[..., Tensor | tuple[Tensor, ...]],
    batches: Batches,
    positions: Tensor,
    gather: Gather = tuple,
    temperature: float = 1.0,
) -> Outputs:
    """Runs a network, in the mode that it is in, on every batch; see `predict`.

    The network returns logits (B, C), or a tuple of logits and the classifier's input (B, D). `positions` (C,) holds
    the class of each logit, see `class_positions`. Probabilities are those of the logits divided by the temperature.
    """
    columns = []
    for images, target, group, *metadata in batches:
        output = network(images, *metadata)
        logits, *further = output if isinstance(output, tuple) else (output,)
        row = (target, group, logits.float(), further[0] if further else logits[:, :0])
        columns.append([part.cpu() for part in gather(row)])
    target, group, logits, features = (torch.cat(parts) for parts in zip(*columns, strict=True))
    # From the order of the logits to the order of the classes
    logits = logits[:, positions.argsort()]
    plain = logits.softmax(dim=1)
    uncalibrated, predicted = plain.max(dim=1)  # rounding cannot change the class with the temperature
    probabilities = (logits / temperature).softmax(dim=1) if temperature != 1 else plain
    confidence, positive = probabilities.amax(1), positive_score(logits)
    return Outputs(predicted, target, group, confidence, probabilities, features, uncalibrated, positive)


def domain_accuracies(
    predictions: Predictions | Outputs, num_domains: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the accuracies on the in-splits and on the out-splits, by domain; NaN for an empty split."""
    columns = (predictions.predicted, predictions.target, predictions.group)
    accuracy = group_accuracy(*columns, num_groups=2 * num_domains).accuracy.tolist()
    return tuple(accuracy[0::2]), tuple(accuracy[1::2])


def positive_score(logits: Tensor) -> Tensor:
    """(N, C) -> (N,) float32 log-odds of the second of two classes, or NaN for other numbers of classes."""
    # Not its probability, which rounds to 1 for many images of a confident network
    scores = logits.float()
    return scores[:, 1] - scores[:, 0] if logits.shape[1] == 2 else torch.full_like(scores[:, 0], torch.nan)


def class_scores_by_domain(predictions: Predictions, num_domains: int) -> dict[str, list[float]]:
    """Returns `metrics.class_scores` on the in-splits: name -> score of each domain.

    They are there on out-splits ("out_") and on both splits ("whole_", NaN without predictions on the in-split) too.
    "same_answer" is the share of the most frequent answer.
    """
    columns = (predictions.predicted, predictions.target, predictions.positive)
    by_name: dict[str, list[float]] = defaultdict(list)
    for domain in range(num_domains):
        splits = {"": predictions.group == 2 * domain, "out_": predictions.group == 2 * domain + 1}
        # Without --eval-train, in-splits of training domains are left out
        splits["whole_"] = (predictions.group // 2 == domain) & splits[""].any()
        for prefix, mask in splits.items():
            scores = class_scores(*(column[mask] for column in columns))
            for name in CLASS_SCORES:
                by_name[prefix + name].append(scores[name])
            answers = torch.bincount(predictions.predicted[mask], minlength=1)
            by_name[f"{prefix}same_answer"].append((answers.max() / answers.sum()).item())
    return dict(by_name)


def out_losses(predictions: Predictions, num_domains: int) -> tuple[float, ...]:
    """Returns the mean cross-entropies on the out-splits, by domain; NaN for an empty split."""
    masks = (predictions.group == 2 * domain + 1 for domain in range(num_domains))
    return tuple(predictions.loss[mask].double().mean().item() for mask in masks)


SPLITS = ("all", "in", "out")


class Scores(NamedTuple):
    """Scores over some images; NaN if there are none."""

    images: int  # number of images
    accuracy: float
    f1_macro: float
    ece: float  # expected calibration error, 15 bins
    balanced_accuracy: float  # this and the next three: see `metrics.class_scores`
    sensitivity: float  # of the second of two classes
    specificity: float
    auc: float


class Assessment(NamedTuple):
    """Scores of a network on a benchmark."""

    domains: tuple[Scores, ...]  # in the benchmark's order
    overall: Scores  # of all images of the counted domains
    average: float  # mean accuracy over the counted domains that have images
    test_average: float  # mean accuracy over the test domains that have images; NaN without any
    worst: tuple[int, ...]  # positions of the counted domains with the lowest accuracy, of which several may be equal


def restrict(splits: Sequence[Split], part: str) -> list[Split]:
    """Empties the in-splits or the out-splits of all domains. `part` is "in" or "out" to keep these alone, or "all"."""
    inside, outside = (slice(None) if part in ("all", name) else slice(0) for name in ("in", "out"))
    restricted = [Split(split.inside[inside], split.outside[outside]) for split in splits]
    if not any(len(split.inside) + len(split.outside) for split in restricted):
        raise ArgumentError.of("split", part, "holds no image of any domain")
    return restricted


def assess(
    outputs: Outputs, num_domains: int, test_domains: Sequence[int] = (), counted: Sequence[int] | None = None
) -> Assessment:
    """Scores a network by domain and overall.

    `counted` domains enter the overall scores, and None counts all. `num_domains` includes empty ones.
    """
    domain = outputs.group // 2
    positions = list(range(num_domains) if counted is None else counted)
    domains = tuple(_scores(outputs, domain == position) for position in range(num_domains))
    accuracies = torch.tensor([scores.accuracy for scores in domains], dtype=torch.float64)
    if accuracies[positions].isnan().all():
        raise ArgumentError.of("domains", positions, "none of them has an image in this split")
    lowest = accuracies[positions].nan_to_num(torch.inf).min()
    return Assessment(
        domains=domains,
        overall=_scores(outputs, torch.isin(domain, torch.tensor(positions))),
        average=accuracies[positions].nanmean().item(),
        test_average=accuracies[list(test_domains)].nanmean().item(),
        worst=tuple(position for position in positions if accuracies[position] == lowest),
    )


def _scores(outputs: Outputs, mask: Tensor) -> Scores:
    predicted, target, confidence = outputs.predicted[mask], outputs.target[mask], outputs.confidence[mask]
    ece = expected_calibration_error(confidence, predicted == target)
    by_name = {"accuracy": accuracy(predicted, target).item(), "ece": ece.item()}
    return Scores(images=int(mask.sum()), **by_name, **class_scores(predicted, target, outputs.positive[mask]))


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


def role_scores(
    predictions: Predictions | Outputs, domains: Sequence[Domain], metric: str = "accuracy"
) -> dict[str, RoleScores]:
    """Scores each role over the in-splits of its domains, and its validation over out-splits, by group.

    Returns:
        Role -> scores, with those by `metric` if it is another. Images of "Other" count, but are not a group. Roles
        without images are left out. A benchmark without "id" and "ood" domains has no scores.
    """
    scores: dict[str, RoleScores] = {}
    tests = {role: (role,) for role in SCORED_ROLES}
    for name, roles in (tests | VALIDATION_ROLES).items():
        out = int(name in VALIDATION_ROLES)
        positions = [index for index, domain in enumerate(domains) if domain.role in roles]
        with_images = [index for index in positions if (predictions.group == 2 * index + out).any()]
        if with_images and (scores or not out):
            scores[name] = _role_scores(predictions, domains, with_images if out else positions, out, metric)
    return scores


def _role_scores(
    predictions: Predictions | Outputs, domains: Sequence[Domain], positions: Sequence[int], out: int, metric: str
) -> RoleScores:
    names = list(dict.fromkeys(domains[index].group for index in positions))
    group_of_split = torch.tensor([names.index(domains[index].group) for index in positions])
    splits = 2 * torch.tensor(positions) + out
    scored = torch.isin(predictions.group, splits)
    predicted, target = predictions.predicted[scored], predictions.target[scored]
    # Splits are in ascending order, which searchsorted needs
    group = group_of_split[torch.searchsorted(splits, predictions.group[scored])]
    groups = group_accuracy(predicted, target, group, len(names))
    ignored = [index for index, name in enumerate(names) if name == UNGROUPED]
    worst = worst_group(predicted, target, group, len(names), ignored)
    further: RoleScores = {}
    if metric == "balanced_accuracy":
        further = {"balanced_accuracy": class_scores(predicted, target, target.new_empty(0))[metric]}
    return {
        "accuracy": accuracy(predicted, target).item(),
        "worst_accuracy": worst.accuracy,
        "worst_group": names[worst.group] if worst.group >= 0 else None,
        "f1_macro": f1_macro(predicted, target).item(),
        "group_accuracy": dict(zip(names, groups.accuracy.tolist(), strict=True)),
        "num_samples": dict(zip(names, groups.num_samples.tolist(), strict=True)),
        **further,
    }
