"""What a run's selected record says about each domain, and in words that hold for its kind of benchmark."""

from typing import NamedTuple

from ..data.readers.places import POOLED
from ..protocols import Record, reported_accuracy
from ..protocols.options import DEFAULTS
from ..results.runs import domain_names

OFFICIAL, PHOTOGRAPH, RANDOM = "official", "photograph", "random"  # ways in which a domain is split
_LOSSES = {
    "aux_loss": ("aux_coef", "the routers' auxiliary loss"),
    "cka_loss": ("cka_coef", "MoGE's diversity loss (CKA)"),
    "supcon_loss": ("supcon_coef", "MoGE's invariance loss (SupCon)"),
}


class DomainResult(NamedTuple):
    """Accuracy of the published weights on one domain.

    Attributes:
        domain: Its name, or its position where the records do not know it.
        role: What it was to the run, in words.
        trained: Whether it was trained on.
        inside: Share of right answers on the in-split; NaN where that is empty.
        outside: Likewise on the out-split.
    """

    domain: str
    role: str
    trained: bool
    inside: float
    outside: float


class DomainFact(NamedTuple):
    """What a run wrote down about a domain: its role and group (see `data.Domain`), and how it was split."""

    role: str
    group: str
    split: str


def domain_facts(record: Record) -> list[DomainFact]:
    """Reads what a run wrote down about its domains; of older runs, what their names say.

    Domains of benchmarks that set some apart for testing are named by role and group, such as "id Europe".
    """
    known = record.args.get("domain_facts")
    if known:
        return [DomainFact(*fact) for fact in known]
    names = domain_names([record])
    if not record.roles:
        return [DomainFact("train", name, RANDOM) for name in names]
    pairs = [name.partition(" ") for name in names]
    return [DomainFact(role, group or POOLED, OFFICIAL) for role, _, group in pairs]


def domain_results(record: Record) -> list[DomainResult]:
    """Returns what an evaluation measured, one row a domain."""
    facts = domain_facts(record)
    trained = [position not in record.test_domains for position in range(len(facts))]
    groups = {fact.group for fact, seen in zip(facts, trained, strict=True) if seen}
    roles = ["training" if seen else _tested(fact, groups) for fact, seen in zip(facts, trained, strict=True)]
    rows = zip(domain_names([record]), roles, trained, record.in_acc, record.out_acc, strict=True)
    return [DomainResult(*row) for row in rows]


def _tested(fact: DomainFact, trained: set[str]) -> str:
    """What a domain is called that took no part in training, though other images of its group may have."""
    if fact.role == "train":
        return "held out"
    words = {"id": "in-distribution test", "ood": "out-of-distribution test"}.get(fact.role, "test")
    if POOLED in trained:
        return words
    return f"{words}, group {'trained on' if fact.group in trained else 'not trained on'}"


class Headline(NamedTuple):
    """The number that a run is judged by.

    Attributes:
        meaning: What it is, in words.
        value: A share.
    """

    meaning: str
    value: float


def headline(record: Record) -> Headline:
    """Picks the number: over out-of-distribution images where the data set some apart, else over held-out domains."""
    if "ood" in record.roles:
        return Headline("accuracy over all out-of-distribution test images", record.roles["ood"]["accuracy"])
    if "id" in record.roles:
        meaning = "accuracy over all in-distribution test images (the data has no others)"
        return Headline(meaning, record.roles["id"]["accuracy"])
    several = len(record.test_domains) > 1
    meaning = "the mean over the held-out domains' in-splits" if several else "the held-out in-split"
    return Headline(meaning, reported_accuracy(record))


def losses_in_effect(record: Record) -> list[str]:
    """Names the losses that were added to the method's own, with their coefficients; those of weight or value 0 not."""
    found = []
    for loss, (option, words) in _LOSSES.items():
        coefficient = record.args.get(option, DEFAULTS[option])
        if coefficient and record.losses.get(loss):
            found.append(f"{words} x {coefficient:g}")
    return found


def splits_in_words(record: Record) -> list[str]:
    """Says how the images of the domains were divided, one sentence for each way that occurs."""
    return [_SPLITS[way](record) for way in dict.fromkeys(fact.split for fact in domain_facts(record))]


def _random(record: Record) -> str:
    out = 100 * record.args.get("holdout_fraction", 0.2)
    seed = record.args["trial_seed"]
    return (
        f"each domain is split at random, as trial seed {seed} decides, into {100 - out:.1f}% (in) and {out:.1f}% (out)"
    )


def _official(record: Record) -> str:
    roles = {fact.role for fact in domain_facts(record) if fact.split == OFFICIAL}
    parts = {
        "train": "training domains: training images (in), validation images (out)",
        "id": "in-distribution test domains: test images (in)",
        "ood": "out-of-distribution test domains: test images (in), validation images under shift, if any (out)",
    }
    return f"the data's own; {'; '.join(words for role, words in parts.items() if role in roles)}"


def _photograph(record: Record) -> str:
    return "by photograph, the same in all domains: 60% to train on, 20% to validate on (out), 20% to test on"


_SPLITS = {RANDOM: _random, OFFICIAL: _official, PHOTOGRAPH: _photograph}
