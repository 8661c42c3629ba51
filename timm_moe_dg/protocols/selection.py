"""Selection rules: which of several records stands for an experiment, decided from records alone.

All rules are given the records of one (dataset, algorithm, test domains, trial seed), over any number of
hyper-parameter seeds and steps, and return one of them. What is then reported is that record's accuracy on the in-split
of the test domain, as DomainBed reports it.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType

from ..errors import RecordError
from .records import Record

SelectionRule = Callable[[Sequence[Record]], Record]


def validation_accuracy(record: Record) -> float:
    """Unweighted mean of the training domains' out-split accuracies."""
    return fmean(record.out_acc[domain] for domain in record.training_domains)


def reported_accuracy(record: Record) -> float:
    """What is reported: accuracy on the test domain's in-split, the unweighted mean where several are held out."""
    return fmean(record.in_acc[domain] for domain in record.test_domains)


def training_domain_validation(records: Sequence[Record]) -> Record:
    """Picks the record with the highest `validation_accuracy`, the first of equals; test domains play no part.

    Raises:
        RecordError: There are no records.
    """
    _require(records)
    return max(records, key=validation_accuracy)


def oracle(records: Sequence[Record]) -> Record:
    """Test-domain validation: of each run's last record, the one with the best test-domain out-split accuracy.

    An upper bound rather than a protocol: it looks at the test domain.

    Raises:
        RecordError: There are no records.
    """
    _require(records)
    last: dict[int, Record] = {}
    for record in sorted(records, key=lambda record: record.step):
        last[record.args["hparams_seed"]] = record
    return max(last.values(), key=lambda record: fmean(record.out_acc[domain] for domain in record.test_domains))


def _require(records: Sequence[Record]) -> None:
    if not records:
        raise RecordError("records=[]: nothing to select from; has the run reached its first evaluation?")


SELECTION_RULES: Mapping[str, SelectionRule] = MappingProxyType(
    {"training_domain_validation": training_domain_validation, "oracle": oracle}
)
