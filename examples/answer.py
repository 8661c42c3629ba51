"""Prints the comparisons of recorded scores, such as those behind docs/results.

    python examples/answer.py examples/pretrained/scores.csv --plot differences.png
    python examples/answer.py examples/routers/scores.csv --reference cosine
    python examples/answer.py output/emoji_dinov2 output/fonts_dinov2 --save scores.csv

A table has the columns shift (the comparison), row, domain, seed and score in percent, and may have balanced (percent),
gmacs and parameters. A folder holds the finished runs of a comparison. The picture's name gets that of the shift.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from timm_moe_dg.analysis.plots import plot_answer
from timm_moe_dg.results.answer import answer, render_answer, scores_of
from timm_moe_dg.results.costs import costs_of
from timm_moe_dg.results.runs import find_runs

NUMBERS = ("balanced", "gmacs", "parameters")  # which may be unknown


def recorded(source: Path) -> pd.DataFrame:
    """Reads the scores of a table, or of the runs in a folder, the cheapest rows first."""
    if not source.is_dir():
        return pd.read_csv(source, keep_default_na=False, na_values=dict.fromkeys(NUMBERS, ""))
    runs = find_runs([source])[0]
    costs = pd.DataFrame(costs_of(runs), index=["gmacs", "parameters"]).T
    scores = scores_of(runs).join(costs, on="row").sort_values(["gmacs", "parameters"], kind="stable")
    shares = {"score": 100 * scores.pop("accuracy"), "balanced": 100 * scores.balanced}
    return scores.assign(shift=source.name, **shares)


def main(words: Sequence[str] | None = None) -> None:
    """Prints an answer as Markdown for each shift."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores", nargs="+", type=Path)
    parser.add_argument("--reference", nargs="+", default=["dense"], help="rows to compare with, the first of a shift")
    parser.add_argument("--plot", type=Path, help="picture to write")
    parser.add_argument("--save", type=Path, help="table to write")
    options = parser.parse_args(words)
    table = pd.concat(map(recorded, options.scores)).assign(domain=lambda table: table.domain.astype(str))
    if options.save:
        table.round(4).to_csv(options.save, index=False)
    for shift, part in table.groupby("shift", sort=False):
        balanced = part.get("balanced", pd.Series(float("nan"), part.index)) / 100
        scores = part.assign(accuracy=part.score / 100, balanced=balanced)
        costs = {}
        if "gmacs" in part:
            known = part[["row", "gmacs", "parameters"]].dropna()
            costs = {row: (gmacs, int(parameters)) for row, gmacs, parameters in known.to_numpy()}
        reference = next((row for row in options.reference if row in set(part.row)), "")
        found = answer(scores, costs, reference)
        print(f"## {shift}\n\n{render_answer(found, 'markdown')}\n")
        if options.plot:
            plot_answer(found, scores, options.plot.with_stem(f"{options.plot.stem}_{shift}"))


if __name__ == "__main__":
    main()
