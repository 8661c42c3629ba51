"""Results and splits of a run's domains from its selected record, in words for its kind of benchmark."""

from dataclasses import fields
from typing import NamedTuple

from ..algorithms.hparams import LOSS_COEFFICIENTS
from ..data.readers.places import POOLED
from ..errors import RecordError
from ..layers import LossWeights
from ..protocols.records import Record
from ..results.runs import domain_names

_KINDS = OFFICIAL, PHOTOGRAPH, GROUP, RANDOM = "official", "photograph", "group", "random"  # of splits
# The names of losses in records: the option of their weight, and words
_LOSSES = {
    item.metadata["loss"]: (item.name, item.metadata["words"])
    for item in fields(LossWeights)
    if "loss" in item.metadata
}


class DomainResult(NamedTuple):
    """Accuracy of the published weights on the two splits of a domain, NaN for an empty split, and their images."""

    domain: str
    role: str  # in words
    trained: bool
    inside: float
    outside: float
    images_inside: int | None = None  # None if not recorded
    images_outside: int | None = None


class DomainFact(NamedTuple):
    """A domain as recorded by a run: its role and group (see `data.Domain`), and the kind of its split."""

    role: str
    group: str
    split: str


def domain_facts(record: Record) -> list[DomainFact]:
    """Reads the recorded role, group and split of each domain."""
    facts = record.args.get("domain_facts", ())
    if len(facts) != len(record.in_acc) or any(len(fact) != 3 or fact[2] not in _KINDS for fact in facts):
        raise RecordError(f"domain_facts={facts}: must have role, group and split of each domain; it is damaged")
    return [DomainFact(*fact) for fact in facts]


def domain_results(record: Record) -> list[DomainResult]:
    """Returns the accuracies of an evaluation by domain."""
    facts = domain_facts(record)
    trained = [position not in record.test_domains for position in range(len(facts))]
    groups = {fact.group for fact, used in zip(facts, trained, strict=True) if used}
    roles = ["training" if used else _test_role(fact, groups) for fact, used in zip(facts, trained, strict=True)]
    sizes = [(record.images([position]), record.images([position], out=True)) for position in range(len(facts))]
    rows = zip(domain_names([record]), roles, trained, record.in_acc, record.out_acc, sizes, strict=True)
    return [DomainResult(*row, *images) for *row, images in rows]


def _test_role(fact: DomainFact, trained: set[str]) -> str:
    """Describes a domain that was not trained on, and whether other images of its group were."""
    if fact.role == "train":
        return "held out"
    words = {"id": "in-distribution test", "ood": "out-of-distribution test"}.get(fact.role, "test")
    if POOLED in trained:  # one training domain with the images of all groups, so no group is unseen for certain
        return words
    return f"{words}, group {'trained on' if fact.group in trained else 'not trained on'}"


def losses_in_effect(record: Record) -> list[str]:
    """Describes the auxiliary losses with their coefficients. Losses without effect are left out."""
    losses = []
    for loss, (option, words) in _LOSSES.items():
        coefficient = record.args.get(option, LOSS_COEFFICIENTS.get(option, 0.0))
        if coefficient and record.losses.get(loss):
            losses.append(f"{words} x {coefficient:g}")
    return losses


def splits_in_words(record: Record) -> list[str]:
    """Describes the splits of the domains, one sentence for each kind of split."""
    out, seed = 100 * record.args.get("holdout_fraction", 0.2), record.args["trial_seed"]
    facts = domain_facts(record)
    roles = {fact.role for fact in facts if fact.split == OFFICIAL}
    parts = {
        "train": "training domains: training images (in), validation images (out)",
        "id": "in-distribution test domains: test images (in)",
        "ood": "out-of-distribution test domains: test images (in), validation images of that kind, if any (out)",
    }
    sentences = {
        RANDOM: f"each domain is split at random, by trial seed {seed}, into {100 - out:.1f}% (in) and {out:.1f}% "
        "(out)",
        GROUP: f"each domain is split by groups of images ({record.args.get('group_column')}), by trial seed {seed}, "
        f"into about {100 - out:.1f}% (in) and {out:.1f}% (out)",
        OFFICIAL: f"the data's own; {'; '.join(words for role, words in parts.items() if role in roles)}",
        PHOTOGRAPH: "by photograph, the same in all domains: 60% for training, 20% for validation (out), 20% for "
        "testing",
    }
    return [sentences[kind] for kind in dict.fromkeys(fact.split for fact in facts)]
