"""Prints the training-domain validation accuracy of each network and learning rate, in percent, over held-out styles.

python examples/emoji_styles/choose_rates.py output/emoji_rates
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from timm_moe_dg.protocols.selection import training_domain_validation, validation_score
from timm_moe_dg.results.runs import find_runs


def validated(folder: str) -> Mapping[tuple[str, str], float]:
    """Returns the mean accuracy of the selected steps by network and learning rate."""
    accuracies = defaultdict(list)
    for run in find_runs([folder])[0]:
        _, network, rate, *_ = run.folder.name.split("-")
        accuracies[network, rate].append(validation_score(training_domain_validation(run.records)))
    return {choice: 100 * fmean(values) for choice, values in sorted(accuracies.items())}


if __name__ == "__main__":
    for choice, accuracy in validated(sys.argv[1]).items():
        print(*choice, f"{accuracy:.1f}")
