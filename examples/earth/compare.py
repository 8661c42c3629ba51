"""Prints the tables of docs/results/earth.md from the runs of train.py.

    python examples/earth/compare.py output/earth

Each run is scored at the step that training-domain validation selects. "id" are test blocks of the continents that were
trained on. "unseen" is the continent that was held out, or the five others of a model per continent. Errors are
standard errors over seeds of the means over continents. P values are those of sign-flip tests over pairs of runs with
the same continent and seed, corrected by Holm's method within a table.
"""

import sys
from pathlib import Path
from typing import Any

import pandas as pd

import timm_moe_dg
from timm_moe_dg.results.comparison import holm, sign_flip_p

NAMES = {
    "erm": "ERM",
    "erm_le": "ERM+LE",
    "d3g": "D3G",
    "gmoe": "GMoE",
    "moge": "MoGE, coverage radius `auto`",
    "moge_routed": "MoGE, routed everywhere",
    "moge_shared": "MoGE, shared expert alone",
    "moge_geoclip": "MoGE with GeoCLIP, coverage radius `auto`",
    "moge_geoclip_routed": "MoGE with GeoCLIP, routed everywhere",
    "moge_se": "MoGE-SE",
    "gmoe_frozen": "GMoE, routers frozen at random",
    "moge_frozen": "MoGE, router frozen at random, coverage radius `auto`",
    "per_continent": "ERM, a model per continent",
}
MODES: dict[str, dict[str, Any]] = {"routed": {"coverage_radius": float("inf")}, "shared": {"expert_mode": "shared"}}
SCORES = {"id": "id overall", "worst": "id worst continent", "unseen": "unseen continent"}


def read(folder: Path) -> pd.DataFrame:
    """Returns the scores in percent of each row, continent and seed, and of MoGE's runs in further modes."""
    runs = timm_moe_dg.read_runs(folder)
    runs = runs[runs.selected & runs.finished]
    names = runs.run.map(lambda path: Path(path).name.rsplit("-", 2))
    frame = pd.DataFrame(names.tolist(), columns=["row", "continent", "seed"], index=runs.index)
    scores = {"id": runs.id_accuracy, "worst": runs.id_worst_accuracy, "unseen": runs.ood_accuracy}
    frame = frame.assign(**{name: 100 * column for name, column in scores.items()})
    further = [
        [f"{row}_{mode}", continent, seed, *mode_scores(folder / f"{row}-{continent}-{seed}", mode)]
        for row, continent, seed in frame[frame.row.isin(["moge", "moge_geoclip"])][["row", "continent", "seed"]].values
        for mode in MODES
        if f"{row}_{mode}" in NAMES
    ]
    return pd.concat([frame, pd.DataFrame(further, columns=frame.columns)])


def mode_scores(run: Path, mode: str) -> list[float]:
    """Scores a run in a mode of `MODES`, or reads the scores of an earlier call."""
    file = run / f"{mode}.csv"
    if not file.exists():
        timm_moe_dg.evaluate(run, split="in", workers=0, **MODES[mode]).to_csv(file, index=False)
    domains = pd.read_csv(file)
    known, unseen = (domains[domains.role == f"test ({role})"] for role in ("id", "ood"))
    means = [(part.accuracy * part.images).sum() / part.images.sum() for part in (known, unseen)]
    return [100 * means[0], 100 * known.accuracy.min(), 100 * means[1]]


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """The table of accuracies: mean and standard error over seeds of the means over continents."""
    means = frame.groupby(["row", "seed"])[list(SCORES)].mean().groupby("row")
    errors = means.std(ddof=0).div(means.size() ** 0.5, axis=0)
    cells = means.mean().map("{:.1f}".format) + " ± " + errors.map("{:.1f}".format)
    return cells.loc[[row for row in NAMES if row in cells.index]].rename(index=NAMES, columns=SCORES)


def differences(frame: pd.DataFrame, score: str, first: str) -> pd.DataFrame:
    """The table of paired differences of a score between all rows and one of them."""
    wide = frame.pivot_table(index=["continent", "seed"], columns="row", values=score)
    # A model per continent is trained on the continent that others hold out
    rows = [row for row in NAMES if row in wide and row not in (first, "per_continent")]
    pairs = [(wide[row] - wide[first]).dropna() for row in rows]
    by_continent = [pair.groupby("continent").mean() for pair in pairs]
    table = {
        "difference": [f"{pair.mean():+.1f}" for pair in pairs],
        "pairs won": [f"{(pair > 0).sum()} of {len(pair)}" for pair in pairs],
        "continents won": [f"{(means > 0).sum()} of {len(means)}" for means in by_continent],
        "p": [f"{p:.4f}" for p in holm([sign_flip_p(pair.values) for pair in pairs])],
    }
    return pd.DataFrame(table, index=rows).rename(index=NAMES)


def main(folder: Path) -> None:
    """Prints the tables as Markdown."""
    frame = read(folder)
    print(scores(frame).to_markdown(), end="\n\n")
    for score in SCORES:
        print(f"{SCORES[score]}, difference to ERM\n\n{differences(frame, score, 'erm').to_markdown()}", end="\n\n")
    unseen = frame.groupby(["row", "continent"]).unseen.mean().unstack()
    print(unseen.loc[[row for row in NAMES if row in unseen.index]].rename(index=NAMES).round(1).to_markdown())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
