r"""Measures the coverage of prediction sets, and calibration errors, on domains that runs have held out.

    python examples/coverage.py output/SWEEP [output/SWEEP ...] --coverage 0.9

Each run is calibrated first. "Within" calibrates on a half of the validation
images and tests on the other, over 100 divisions. "Outside" tests on the
held-out domain: with validation images, and with the held-out domains of the
sweep's other runs, without those of this domain.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

import timm_moe_dg
from timm_moe_dg.networks.calibration import CALIBRATION, Calibration, read_calibration, set_threshold

DIVISIONS = 100


def within(of_target: Tensor, coverage: float) -> float:
    """Returns the mean share of a half of the scores that sets from the other half cover."""
    shares = []
    for _ in range(DIVISIONS):
        shuffled = of_target[torch.randperm(len(of_target))]
        half = len(shuffled) // 2
        shares.append((shuffled[half:] >= set_threshold(shuffled[:half].sort().values, coverage)).float().mean())
    return torch.stack(shares).mean().item()


def measure(run: Path, others: Sequence[Calibration], coverage: float) -> dict[str, float]:
    """Measures a run; `others` are the calibrations of the sweep."""
    own = read_calibration(run / "best" / CALIBRATION)
    elsewhere = [item.held_out.of_target for item in others if not {*item.held_out_domains} & {*own.held_out_domains}]
    held_out = own.held_out.of_target
    row = {
        "temperature": own.temperature,
        "within": within(own.validation.of_target, coverage),
        "outside, validation": (held_out >= set_threshold(own.validation.of_target, coverage)).float().mean().item(),
    }
    if elsewhere:
        least = set_threshold(torch.cat(elsewhere).sort().values, coverage)
        row["outside, sweep"] = (held_out >= least).float().mean().item()
    scores = timm_moe_dg.evaluate(run, split="out", workers=0).dropna(subset="ece")
    for part, rows in (("within", scores[scores.role == "train"]), ("outside", scores[scores.test == 1])):
        row |= {f"ECE {part}, before": rows.ece_uncalibrated.mean(), f"ECE {part}, after": rows.ece.mean()}
    return row


def main() -> None:
    """Prints a table, a row for each sweep: means over its runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="SWEEP")
    parser.add_argument("--coverage", type=float, default=0.9, metavar="X")
    args = parser.parse_args()
    torch.manual_seed(0)
    table = {}
    for sweep in args.sweeps:
        runs = sorted(path.parent for path in sweep.glob("*/best"))
        for run in runs:
            if not (run / "best" / CALIBRATION).exists():
                timm_moe_dg.evaluate(run, calibrate=True, split="out", workers=0)
        calibrations = [read_calibration(run / "best" / CALIBRATION) for run in runs]
        rows = [measure(run, calibrations, args.coverage) for run in runs]
        frame = pd.DataFrame(rows)
        table[f"{sweep.name} ({len(frame)} runs)"] = frame.mean()
        print(frame.round(3).to_string(), flush=True)
    print(pd.DataFrame(table).T.round(3).to_markdown())


if __name__ == "__main__":
    main()
