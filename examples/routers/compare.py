"""Prints the tables of docs/results/routers.md and draws its picture.

    python examples/routers/compare.py output/routers --routing routing.csv --picture routers.png --scores scores.csv
    python examples/routers/compare.py examples/routers/scores.csv --routing examples/routers/routing.csv

Each run is scored by its accuracy on the held-out domain, at the step that training-domain validation selects. Errors
are standard errors over seeds of the means over held-out domains. Each network is compared with the cosine router by a
sign-flip test over pairs of runs with the same held-out domain and seed. Holm's correction covers all tests of all data
sets. A router is recommended if it beats the cosine router on two data sets after the correction, and loses on none.
`routing.csv` is written by measure.py. The second command repeats the page's tables from its stored scores.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import timm_moe_dg
from timm_moe_dg.results.comparison import holm, sign_flip_p

NAMES = {
    "dense": "dense",
    "cosine": "cosine (GMoE)",
    "linear": "linear",
    "bias": "sigmoid, bias without a loss",
    "expert_choice": "expert choice",
    "threshold": "expert threshold",
    "shared": "shared and narrow experts",
    "self": "self-routing",
    "random": "random, frozen",
}
REFERENCE = "cosine"
SHIFTS = {"emoji_styles": "emoji styles", "blue_marble": "Earth", "folder": "Fashion-MNIST"}
LEVEL = 0.05  # a corrected p value below it counts


def names(runs: pd.Series) -> pd.DataFrame:
    """Splits folder names such as emoji_styles-cosine-ERM-test0-trial0-hparams0."""
    return runs.map(lambda run: Path(run).name).str.extract(
        r"(?P<shift>\w+)-(?P<row>\w+)-ERM-test(?P<domain>\d+)-trial(?P<seed>\d+)"
    )


def read(source: Path) -> pd.DataFrame:
    """Returns the score in percent of each run, with its data set (shift), network (row), held-out domain and seed.

    The source is a folder of runs, or a table that `--scores` wrote.
    """
    if source.is_file():
        return pd.read_csv(source)
    runs = timm_moe_dg.read_runs(source)
    runs = runs[runs.selected & runs.finished]
    # Data with test domains of their own have a score for the held-out ones alone
    score = runs.ood_accuracy.fillna(runs.test_acc) if "ood_accuracy" in runs else runs.test_acc
    return names(runs.run).assign(score=100 * score)


def accuracies(frame: pd.DataFrame) -> pd.DataFrame:
    """The table of accuracies: mean and standard error over seeds of the means over held-out domains."""
    means = frame.groupby(["row", "shift", "seed"]).score.mean().groupby(["row", "shift"])
    errors = means.std(ddof=0) / means.size() ** 0.5
    cells = means.mean().map("{:.1f}".format) + " ± " + errors.map("{:.1f}".format)
    return cells.unstack()


def differences(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each network and data set: the difference to the cosine router, and what belongs to it."""
    rows = []
    for shift, runs in frame.groupby("shift"):
        wide = runs.pivot(index=["domain", "seed"], columns="row", values="score")
        for row in wide.columns.drop(REFERENCE):
            pairs = (wide[row] - wide[REFERENCE]).dropna()
            error = pairs.std() / len(pairs) ** 0.5
            rows.append([row, shift, pairs.mean(), error, (pairs > 0).sum(), len(pairs), sign_flip_p(pairs.to_numpy())])
    columns = ["row", "shift", "difference", "error", "won", "pairs", "p"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(**{"p, Holm": holm(table.p.tolist())})


def cells(table: pd.DataFrame) -> pd.DataFrame:
    """The differences as text, a column for each data set."""
    texts = [f"{row.difference:+.2f}, {row.won} of {row.pairs}, {row.p:.2f}" for row in table.itertuples()]
    return table.assign(text=texts).pivot(index="row", columns="shift", values="text")


def recommended(table: pd.DataFrame) -> list[str]:
    """The routers that the rule at the top recommends."""
    counts = table[(table["p, Holm"] < LEVEL) & (table.row != "dense")]
    won, lost = (counts[sign * counts.difference > 0].row.value_counts() for sign in (1, -1))
    return [row for row in NAMES if won.get(row, 0) >= 2 and not lost.get(row, 0)]


def draw(table: pd.DataFrame, file: Path) -> None:
    """Draws the differences with standard errors over pairs, a panel for each data set."""
    rows = [row for row in NAMES if row in set(table.row)]
    figure, panels = plt.subplots(1, len(SHIFTS), figsize=(9, 3.6), sharey=True, layout="constrained")
    for panel, (shift, title) in zip(panels, SHIFTS.items(), strict=True):
        part = table[table["shift"] == shift].set_index("row").reindex(rows)
        certain = part["p, Holm"] < LEVEL
        for chosen, color in ((certain, "#c0392b"), (~certain, "#7f8c8d")):
            places = np.flatnonzero(chosen)
            panel.errorbar(part.difference[chosen], places, xerr=part.error[chosen], fmt="o", color=color, capsize=3)
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_title(title)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("points against the cosine router")
    panels[0].set_yticks(range(len(rows)), [NAMES[row] for row in rows])
    panels[0].invert_yaxis()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def routing(file: Path) -> pd.DataFrame:
    """Means over runs of what measure.py measured, with the accuracy that permuted routing takes."""
    runs = pd.read_csv(file)
    parts = names(runs.run)[["shift", "row"]]
    runs = runs.assign(**parts, lost=runs.accuracy - runs.permuted).dropna(subset="lost")
    return runs.drop(columns=["run", "accuracy", "permuted"]).groupby(["shift", "row"]).mean()


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Rows and columns in the order of `NAMES` and `SHIFTS`, with the names that readers see."""
    rows = [row for row in NAMES if row in table.index]
    return table.loc[rows].rename(index=NAMES, columns=SHIFTS).rename_axis("router")


def main(words: Sequence[str] | None = None) -> None:
    """Prints the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of runs, or table of their scores")
    parser.add_argument("--routing", type=Path, help="table of measure.py")
    parser.add_argument("--picture", type=Path, help="picture to write")
    parser.add_argument("--scores", type=Path, help="table of scores to write")
    options = parser.parse_args(words)
    frame = read(options.source)
    table = differences(frame)
    shifts = [shift for shift in SHIFTS if shift in set(table["shift"])]
    print(in_order(accuracies(frame)[shifts]).to_markdown())
    print(f"\nDifference to the cosine router, pairs won, p\n\n{in_order(cells(table)[shifts]).to_markdown()}")
    print(f"\nLeast p after the correction: {table['p, Holm'].min():.4f}")
    print(f"\nRecommended: {', '.join(NAMES[row] for row in recommended(table)) or 'none'}")
    if options.scores:
        frame.to_csv(options.scores, index=False)
    if options.picture:
        draw(table, options.picture)
    if options.routing:
        means = routing(options.routing)
        for shift in shifts:
            part = in_order(means.loc[shift].dropna(axis=1))
            print(f"\nRouting, {SHIFTS[shift]}\n\n{part.to_markdown(floatfmt='.2f')}")


if __name__ == "__main__":
    main()
