"""Prints the tables of docs/results/fashion_shift.md and docs/results/emoji_styles.md.

    python examples/compare.py output/fashion_shift output/fashion_soups output/fashion_wise
    python examples/compare.py --holm output/emoji_styles

Each run gives the accuracy on the held-out in-split at the step that training-domain validation selects. Errors are
standard errors over the seeds (as DomainBed's tables: the population deviation over the root of their number). P values
are those of a sign-flip test over pairs of runs with the same held-out domain and seed, with `--holm` corrected for the
number of tests too.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean, pstdev

from timm_moe_dg.protocols.selection import held_out_score, training_domain_validation
from timm_moe_dg.results.comparison import holm, sign_flip_p
from timm_moe_dg.results.runs import domain_names, find_runs

NAME = re.compile(
    r"(?:(?:folder|emoji_styles)-)?(?P<model>\w+)-(?P<method>[\w-]+?)-test(?P<domain>\d)-trial(?P<seed>\d)\b"
)
METHODS = {"ERM": "ERM", "LP_FT": "LP-FT", "CORAL": "CORAL", "SWAD": "SWAD", "soup": "soup", "alpha_0.5": "WiSE-FT"}
METHODS |= {"alpha_0": "start", "upcycled": "upcycled"}
MODELS = {"dense": "dense", "top_2": "2 of 6 experts", "top_1": "1 of 6 experts", "linear": "linear router"}
MODELS |= {"sfmoe": "SF-MoE", "frozen": "frozen routers", "top_2_short": "2 of 6, equal FLOPs"}
Scores = dict[tuple[int, int], float]  # percent by held-out domain and seed


def read(folders: Sequence[str]) -> tuple[dict[tuple[str, str], Scores], list[str]]:
    """Returns the scores of each model and method, and the domains' names."""
    runs, unfinished = find_runs(folders)
    if unfinished:
        sys.exit(f"compare.py: {unfinished[0]} is not finished")
    rows: dict[tuple[str, str], Scores] = defaultdict(dict)
    for run in runs:
        parts = NAME.search(str(run.folder))
        if parts is None:
            sys.exit(f"compare.py: {run.folder} is no run of this comparison")
        method = run.folder.name if parts["method"] == "wise_ft" else parts["method"]
        place = int(parts["domain"]), int(parts["seed"])
        accuracy = held_out_score(training_domain_validation(run.records))
        rows[parts["model"], method][place] = 100 * accuracy
    return rows, domain_names([record for run in runs for record in run.records])


def accuracies(rows: Mapping[tuple[str, str], Scores], domains: Sequence[str]) -> list[list[str]]:
    """Rows of the table of accuracies, and its head."""
    held_out = sorted({domain for scores in rows.values() for domain, _ in scores})
    table = [["method", "network", *(domains[domain] for domain in held_out), "mean"]]
    for method, model in product(METHODS, MODELS):
        if scores := rows.get((model, method)):
            columns = [[value for (at, _), value in scores.items() if at == domain] for domain in held_out]
            cells = [f"{fmean(values):.1f} ± {pstdev(values) / len(values) ** 0.5:.1f}" for values in columns]
            table.append([METHODS[method], MODELS[model], *cells, f"{fmean(map(fmean, columns)):.1f}"])
    return table


def tests(rows: Mapping[tuple[str, str], Scores], corrected: bool) -> list[list[str]]:
    """Rows of the table of differences, and its head."""
    pairs = [((model, method), ("dense", method)) for method, model in product(METHODS, MODELS) if model != "dense"]
    pairs += [(("frozen", "ERM"), ("top_2", "ERM"))]
    pairs += [((model, method), (model, "ERM")) for model, method in product(("dense", "top_2"), METHODS)]
    pairs += [((model, "soup"), (model, "upcycled")) for model in ("dense", "top_2")]
    table, p_values = [["first", "second", "difference", f"wins of {len(rows['dense', 'ERM'])}", "p"]], []
    for first, second in pairs:
        if first != second and first in rows and second in rows and first[1] != "alpha_0":
            differences = [rows[first][place] - rows[second][place] for place in sorted(rows[first])]
            wins = str(sum(value > 0 for value in differences))
            name = f"{METHODS[first[1]]}, {MODELS[first[0]]}"
            other = MODELS[second[0]] if first[1] == second[1] else METHODS[second[1]]  # in what they differ
            p_values.append(sign_flip_p(differences))
            table.append([name, other, f"{fmean(differences):+.2f}", wins, f"{p_values[-1]:.3f}"])
    if corrected:
        for row, cell in zip(table, ["p, Holm", *(f"{value:.3f}" for value in holm(p_values))], strict=True):
            row.append(cell)
    return table


def main(words: Sequence[str]) -> None:
    """Prints both tables as Markdown."""
    rows, domains = read([word for word in words if word != "--holm"])
    for head, *body in (accuracies(rows, domains), tests(rows, "--holm" in words)):
        lines = [head, ["---"] * len(head), *body]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
