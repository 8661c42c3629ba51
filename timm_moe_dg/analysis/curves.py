"""The learning curves of a run, as a picture."""

import logging
from collections.abc import Sequence
from pathlib import Path

from ..errors import MissingDependencyError
from ..protocols import Record, reported_accuracy, validation_accuracy
from .plots import plot_curves

FILE = "learning_curves.png"
_logger = logging.getLogger(__name__)


def draw_learning_curves(records: Sequence[Record], domains: Sequence[str], folder: Path) -> None:
    """Draws learning_curves.png, or says that matplotlib is missing.

    Args:
        records: Of one run; a final average has no place on the curves.
        domains: Names of the domains.
        folder: Where the picture goes.
    """
    trained = [record for record in records if not record.averaged]
    try:
        plot_curves([record.step for record in trained], learning_curves(trained, domains), folder / FILE)
    except MissingDependencyError as error:
        _logger.info(f"{FILE} is not drawn: {error}")


def learning_curves(records: Sequence[Record], domains: Sequence[str]) -> dict[str, list[float]]:
    """Returns the losses, the two accuracies that matter, and each domain's on its out-split, one value per record."""
    curves = {name: [record.losses[name] for record in records] for name in records[0].losses}
    curves["training-domain validation"] = [validation_accuracy(record) for record in records]
    curves["test domain (in)"] = [reported_accuracy(record) for record in records]
    out = {f"{name} (out)": [record.out_acc[at] for record in records] for at, name in enumerate(domains)}
    return curves | out
