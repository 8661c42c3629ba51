"""How often a comparison of made-up scores recommends a mixture: `python -m tests.results.simulate_answer`.

Runs vary by 2.5 points. Gains over dense vary by domain where a deviation is given.
"""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from timm_moe_dg.results import comparison
from timm_moe_dg.results.answer import answer

RESAMPLES = 1999  # sign patterns of a test, for speed
# Gain, its deviation between domains, and numbers of mixtures, domains and seeds
CASES = ((0.0, 0.0, 3, 5, 5), (0.0, 0.03, 3, 5, 5), (0.03, 0.0, 1, 5, 5), (0.03, 0.0, 3, 5, 5), (0.03, 0.0, 3, 3, 3))


def made_up_scores(
    gains: Mapping[str, Sequence[float] | np.ndarray], seeds: int, noise: float, random: np.random.Generator
) -> pd.DataFrame:
    """Scores of rows with gains by domain over a level that domains have of their own."""
    table = pd.DataFrame(gains).T
    shape = (*table.shape, seeds)
    shares = table.to_numpy()[:, :, None] + random.normal(0.6, 0.08, shape[1])[:, None] + random.normal(0, noise, shape)
    domains = [f"domain {number}" for number in table.columns]
    index = pd.MultiIndex.from_product([table.index, domains, range(seeds)], names=["row", "domain", "seed"])
    return pd.DataFrame({"accuracy": shares.ravel(), "balanced": shares.ravel() - 0.1}, index).reset_index()


def recommended(repetitions: int, gain: float, deviation: float, mixtures: int, domains: int, seeds: int) -> float:
    """Share of comparisons that recommend a mixture."""
    random, found = np.random.default_rng(0), 0
    names = [f"mixture {number}" for number in range(mixtures)]
    costs = {"dense": (1.0, 1), **dict.fromkeys(names, (2.0, 1))}
    for _ in range(repetitions):
        gains = {name: random.normal(gain, deviation, domains) for name in names} | {"dense": np.zeros(domains)}
        found += answer(made_up_scores(gains, seeds, 0.025, random), costs).recommended != "dense"
    return found / repetitions


if __name__ == "__main__":
    comparison._RESAMPLES = RESAMPLES
    for case in CASES:
        sys.stdout.write(f"{case}: {recommended(1000, *case):.1%}\n")
        sys.stdout.flush()
