"""Selection rules, which decide from records alone what stands for an experiment, and the numbers that are reported.

Every rule gets the records of one (dataset, algorithm, model, test domain, trial seed), over any number of
hyper-parameter seeds and steps, and returns one of them. That record's accuracy on the in-split of the test domain is
reported, as in DomainBed. For data of the user, whose record says so, it is the accuracy on the whole test domain. A
run that chose another --metric has this score in place of accuracies. A run that ends with an averaged network enters
with that record alone.

Of equal values, DomainBed's tables take the earliest step of a run and the highest hyper-parameter seed, as do these.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import floor, inf, isnan, nan
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..data import UNGROUPED
from ..errors import RecordError
from ..metrics import METRICS, wilson_interval
from .records import OOD_VALIDATION, VALIDATION_ROLES, Record, RoleScores, Score, SplitName

SelectionRule = Callable[[Sequence[Record]], Record]


def validation_score(record: Record, validated: Collection[int] | None = None) -> float:
    """Returns the unweighted mean of the training domains' scores on out-splits; NaN if none has an out-split.

    This is DomainBed's rule. GMoE's text pools the out-splits into one set, which gives larger domains more weight.

    Args:
        record: One evaluation.
        validated: Domains that have an out-split. None takes those with a score in this record.
    """
    scores = record.scores_on("out")
    if validated is None:
        validated = {domain for domain, score in enumerate(scores) if not isnan(score)}
    counted = [domain for domain in record.training_domains if domain in validated]
    # As DomainBed's mean, whose rounding decides between evaluations with equally many right images
    return float(np.mean([scores[domain] for domain in counted])) if counted else nan


def held_out_score(record: Record, split: SplitName | None = None, metric: str | None = None) -> float:
    """Returns a score on the test domain, or the unweighted mean of several test domains.

    The defaults are the run's reported split and its metric. See `Record.scores_on` for others.
    """
    scores = record.scores_on(split or record.reported_split, metric)
    return _mean([scores[domain] for domain in record.test_domains])


def _mean(scores: Sequence[float]) -> float:
    """DomainBed's mean without NaN, which empty splits have; NaN if nothing is left."""
    present = [score for score in scores if not isnan(score)]
    return float(np.mean(present)) if present else nan


def training_domain_validation(records: Sequence[Record]) -> Record:
    """Picks the record with the highest `validation_score`, which ignores test domains."""
    candidates = selectable(records)
    return _best(candidates, _validation(candidates))


def _validation(records: Sequence[Record]) -> Callable[[Record], float]:
    # Over all records: some camera traps have no out-split in the official split
    scores = [record.scores_on("out") for record in records]
    validated = {domain for values in scores for domain, value in enumerate(values) if not isnan(value)}
    return lambda record: validation_score(record, validated)


def leave_one_domain_out_cv(records: Sequence[Record]) -> Record:
    """Leave-one-domain-out cross-validation for a test domain t.

    Each hyper-parameter seed and step is scored by the mean, over all other domains v, of the score on v's in-split
    in the run that holds out t and v. The record of the best seed and step in the run that holds out t alone is picked.

    Args:
        records: Of the run with test domains {t} and of the runs {t, v} for every other domain v.

    Raises:
        RecordError: There are no records, they hold out no common domain, or every seed and step lacks a run.
    """
    candidates = selectable(records)
    alone = [record for record in candidates if len(record.test_domains) == 1]
    targets = {record.test_domains[0] for record in alone}
    if len(targets) != 1:
        raise RecordError(f"records: runs with one common test domain were expected, got those of {sorted(targets)}")
    (target,) = targets
    left_out: dict[tuple[int, int], dict[int, float]] = {_setting(record): {} for record in alone}
    for record in candidates:
        if len(record.test_domains) == 2 and _setting(record) in left_out:
            (other,) = set(record.test_domains) - targets
            left_out[_setting(record)][other] = record.scores_on("in")[other]
    complete = [record for record in alone if set(left_out[_setting(record)]) == set(record.training_domains)]
    if not complete:
        pairs = ", ".join(f"{{{target}, {other}}}" for other in alone[0].training_domains)
        raise RecordError(f"records: no hyper-parameter seed and step is in all the runs that hold out {pairs}")
    return _best(complete, lambda record: _mean([score for _, score in sorted(left_out[_setting(record)].items())]))


def oracle(records: Sequence[Record]) -> Record:
    """Test-domain validation: of the last records of all runs, the one with the best score on test-domain out-splits.

    This is an upper bound rather than a protocol, because it looks at the test domain. A run without one is a
    `RecordError`.
    """
    if not all(record.test_domains for record in records):
        raise RecordError("records: a run holds out no domain to look at; select by training_domain_validation")
    # Of several records of a run, the dictionary keeps the last
    last = {_run(record): record for record in sorted(selectable(records), key=lambda record: record.step)}
    return _best(list(last.values()), partial(held_out_score, split="out"))


def validation_under_shift(records: Sequence[Record], score: Score) -> Record:
    """Picks the highest score on the "ood" validation split. Test scores are ignored.

    WILDS compares worst-group accuracies on FMoW, where groups are the regions without "Other", and macro-averaged F1
    on iWildCam. Evaluations without the score raise a `RecordError`.
    """
    candidates = selectable(records)
    lacking = [record for record in candidates if not has_ood_validation(record, score)]
    if lacking:
        raise RecordError(
            f"records: {len(lacking)} of {len(candidates)} evaluations lack {score} on the ood validation split; "
            "select by training_domain_validation"
        )
    return _best(candidates, lambda record: record.roles[OOD_VALIDATION][score])


def has_ood_validation(record: Record, score: Score) -> bool:
    """Whether an evaluation has a score on the "ood" validation split. The worst-group score needs named groups."""
    return not isnan(record.roles.get(OOD_VALIDATION, RoleScores()).get(score, nan))


def validates_on_test_groups(record: Record) -> bool:
    """Whether the "ood" validation split holds a group of the "ood" test that is not trained on.

    Selection on such a split is an oracle. FMoW's split is none: its regions are trained on, in earlier years.
    """
    facts, sizes = record.args.get("domain_facts") or (), record.args.get("split_sizes") or ()
    trained = {group for role, group, _ in facts if role != "ood"}
    pairs = zip(facts, sizes, strict=False)  # DomainBed's rows have neither
    return any(role == "ood" and group not in trained and all(images) for (role, group, _), images in pairs)


def selectable(records: Sequence[Record]) -> list[Record]:
    """Returns the records that may be selected: all of a run, or its averaged network's alone if it has one."""
    averaged = {_run(record) for record in records if record.averaged}
    return [record for record in records if record.averaged or _run(record) not in averaged]


def _run(record: Record) -> tuple[tuple[int, ...], int]:
    return tuple(sorted(record.test_domains)), record.args["hparams_seed"]


def _setting(record: Record) -> tuple[int, int]:
    return record.args["hparams_seed"], record.step


def _best(records: Sequence[Record], value: Callable[[Record], float]) -> Record:
    if not records:
        raise RecordError("records=[]: nothing to select from; has the run reached its first evaluation?")
    # max returns the first of equals: the highest seed, then the earliest step
    by_seed = sorted(records, key=lambda record: -record.args["hparams_seed"])
    values = [value(record) for record in by_seed]
    if all(map(isnan, values)):  # nothing was validated: the first record would be of an untrained network
        return max(by_seed, key=lambda record: record.step)
    return by_seed[max(range(len(values)), key=lambda index: -inf if isnan(values[index]) else values[index])]


# rule -> the score on the "ood" validation split that it compares; for data that sets such a split apart
OOD_RULES: Mapping[str, Score] = MappingProxyType({"ood_worst_group": "worst_accuracy", "ood_f1_macro": "f1_macro"})
_ORACLE = " (oracle: the split has held-out groups of the test)"
_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "training_domain_validation": "training-domain validation",
        "leave_one_domain_out_cv": "leave-one-domain-out cross-validation",
        "oracle": "test-domain validation (oracle)",
        "ood_worst_group": "the worst group of the ood validation split",
        "ood_f1_macro": "F1-macro on the ood validation split",
    }
)
SELECTION_RULES: Mapping[str, SelectionRule] = MappingProxyType(
    {
        "training_domain_validation": training_domain_validation,
        "leave_one_domain_out_cv": leave_one_domain_out_cv,
        "oracle": oracle,
        **{rule: partial(validation_under_shift, score=score) for rule, score in OOD_RULES.items()},
    }
)


def rule_title(rule: str, records: Iterable[Record] = ()) -> str:
    """Describes a rule of `SELECTION_RULES`. The rules for the ood validation split are oracles on some data."""
    return _TITLES[rule] + (_ORACLE if rule in OOD_RULES and any(map(validates_on_test_groups, records)) else "")


FEW = 100  # images; with fewer, an accuracy is given with its interval
NEARLY_ALL = 0.95  # of the answers


class Headline(NamedTuple):
    """A reported number, a share, with its description in words."""

    meaning: str
    value: float
    images: int | None  # None if not recorded
    is_share: bool = True  # of the images; False for a mean over domains or classes
    independent: float | None = None  # see `Record.independent_images`

    @property
    def counted(self) -> str:
        """The number of images, see `counted`."""
        return counted(self.images, self.value if self.is_share else None, self.independent)


def headlines(record: Record) -> list[Headline]:
    """Returns the scores over the data's own test images, out-of-distribution first, or over held-out domains.

    Without any of these, it is the accuracy of training-domain validation.
    """
    roles, metric = {"ood": "out-of-distribution", "id": "in-distribution"}, METRICS[record.metric]
    is_share = record.metric == "accuracy"
    own = [
        Headline(
            f"the {metric} over all {words} test images",
            scores[record.metric],
            images(scores),
            is_share,
            independent_images(record, role),
        )
        for role, words in roles.items()
        if (scores := record.roles.get(role))
    ]
    if own:
        return own
    if not record.test_domains:
        meaning = f"the mean {metric} over the out-splits of the training domains (no domain was held out)"
        validated = record.images(record.training_domains, "out")
        return [Headline(meaning, validation_score(record), validated, is_share=False)]
    several, is_whole = len(record.test_domains) > 1, record.reported_split == "whole"
    part = f"domain{'s' * several}" if is_whole else f"in-split{'s' * several}"
    meaning = f"the mean {metric} over the held-out {part}" if several else f"the {metric} on the held-out {part}"
    number = record.images(record.test_domains, record.reported_split)
    independent = record.independent_images(record.test_domains, record.reported_split)
    return [Headline(meaning, held_out_score(record), number, is_share and not several, independent)]


def selected_scores(record: Record) -> dict[str, float]:
    """Returns the scores that a run is selected and reported by, under the names of summary.csv."""
    name = "acc" if record.metric == "accuracy" else record.metric
    return {f"validation_{name}": validation_score(record), f"test_{name}": headline_score(record)}


def headline_score(record: Record) -> float:
    """Returns the first of `headlines`; NaN if no domain was held out."""
    return headlines(record)[0].value if record.test_domains else nan


def summary(record: Record) -> str:
    """Formats the score on validation images and the reported ones in one line."""
    validated = record.images(record.training_domains, "out")
    metric = "acc" if record.metric == "accuracy" else METRICS[record.metric]
    validation = f"training-domain validation (mean of out {metric}) {validation_score(record):.4f}{counted(validated)}"
    reported = headlines(record) if record.test_domains else []
    return "; ".join([validation, *(f"{line.meaning} {line.value:.4f}{line.counted}" for line in reported)])


def one_answer_of(record: Record) -> str:
    """Returns `one_answer` for the test domains of a record."""
    shares = record.scores_on(record.reported_split, "same_answer")
    return one_answer([shares[domain] for domain in record.test_domains])


def one_answer(shares: Iterable[float]) -> str:
    """Says that one class takes nearly all answers in each domain, or "" where it does not.

    The shares of the most frequent answer are by domain, NaN if not recorded.
    """
    least = min((share for share in shares if not isnan(share)), default=0.0)
    if least < NEARLY_ALL:
        return ""
    share = "all" if least == 1 else f"at least {floor(100 * least)}% of the"
    return f"one class takes {share} answers in each domain"


def images(scores: RoleScores, groups: Sequence[str] | None = None) -> int | None:
    """Number of images of a role, or of some of its groups; None if not recorded."""
    numbers = scores.get("num_samples")
    return None if numbers is None else sum(numbers.get(group, 0) for group in (numbers if groups is None else groups))


def independent_images(record: Record, role: str, groups: Sequence[str] | None = None) -> float | None:
    """Returns `Record.independent_images` of a role of `Record.roles`, or of some of its groups."""
    roles = VALIDATION_ROLES.get(role, (role,))
    facts = enumerate(record.args.get("domain_facts") or ())
    domains = [i for i, (part, group, _) in facts if part in roles and (groups is None or group in groups)]
    return record.independent_images(domains, "out" if role in VALIDATION_ROLES else "in")


def worst_groups(scores: RoleScores) -> list[str]:
    """Names of all groups with the lowest accuracy."""
    lowest, named = scores.get("worst_accuracy"), scores.get("worst_group")
    by_group = scores.get("group_accuracy", {})
    return [group for group in by_group if by_group[group] == lowest and group != UNGROUPED] or [named or "-"]


def counted(number: int | None, share: float | None = None, independent: float | None = None) -> str:
    """Formats the number of images behind an accuracy, and its 95% interval if they are few; "" if unknown or 0.

    `independent` is the number of independent images, see `Record.independent_images`. None counts all.
    """
    if not number:
        return ""
    words, independent = f"{number} image{'s' * (number != 1)}", number if independent is None else independent
    words += f" in groups, as good as {independent:.0f}" if independent < number else ""
    if independent >= FEW or share is None or isnan(share):
        return f" ({words})"
    low, high = (100 * bound for bound in wilson_interval(share, independent))
    return f" ({words}, 95% interval {low:.0f} to {high:.0f}%)"
