"""Prints the comparisons in a table of scores, such as those behind docs/results/routers.md.

    python examples/answer.py examples/routers/scores.csv --reference cosine --plot differences.png

The columns are shift (data set), row, domain, seed and score in percent. The picture's name gets that of the data set.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from timm_moe_dg.analysis.plots import plot_answer
from timm_moe_dg.results.answer import answer, render_answer


def main(words: Sequence[str] | None = None) -> None:
    """Prints an answer as Markdown for each data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores", type=Path)
    parser.add_argument("--reference", default="dense", help="row to compare with")
    parser.add_argument("--plot", type=Path, help="picture to write")
    options = parser.parse_args(words)
    table = pd.read_csv(options.scores)
    for shift, part in table.groupby("shift"):
        scores = part.assign(accuracy=part.score / 100, balanced=float("nan"), domain=part.domain.astype(str))
        found = answer(scores, {}, options.reference)
        print(f"## {shift}\n\n{render_answer(found, 'markdown')}\n")
        if options.plot:
            plot_answer(found, scores, options.plot.with_stem(f"{options.plot.stem}_{shift}"))


if __name__ == "__main__":
    main()
