"""The answer of a comparison of rows: tables, paired differences, and a recommendation by a written rule.

The rows were trained on the same splits, with each domain held out by several trial seeds. There are two questions:

- These domains: a sign-flip test over pairs of runs, which have the same domain and seed.
- New sites: a new site is a domain, and the pairs of one domain are alike. A t test over domain means answers it.

scipy's distributions serve both. Libraries do not fit: autorank takes one value for each data set and at least five of
these. baycomp separates runs from data sets by a Stan model alone, which is compiled when it is used.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil, inf, isfinite, isnan, nan, sqrt
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.stats import nct, t

from ..errors import ArgumentError
from ..protocols.records import SplitName
from ..protocols.selection import training_domain_validation, validation_score
from .comparison import FORMATS, data_text, formatted, holm, sign_flip_p, smallest_p
from .runs import FinishedRun, RowKey, by_row, unseen_of_most_frequent, unseen_scores

LEAST_DOMAINS = 4  # of a prediction interval
CONFIDENCE, LEVEL = 0.95, 0.05  # of intervals, and of tests
ZERO = "most_frequent"  # the row that answers with the most frequent class of the training images
BETTER, WORSE, EQUAL, UNKNOWN = "better", "worse", "equal in practice", "cannot tell"
POWER = 0.8  # share of comparisons that find a difference of the size that the verdict states
NOTES = (
    "Interval: 95%, over domains, for the mean difference at new sites. p (sites): t test over domains, corrected.",
    "p: two-sided sign-flip test over pairs of equal domain and seed, for these domains, and with Holm's correction.",
)


@dataclass(frozen=True, eq=False)
class Answer:
    """The numbers of a comparison, in shares, and their verdict.

    Columns of `rows`, by name: mean, standard_error (over seeds), worst, worst_domain, balanced_accuracy, low and high
    (`prediction_interval`), gmacs and parameters (NaN if unknown), seeds.
    Columns of `pairs`: first, second, difference, low and high (95%, over domains), p (sign-flip), p_holm, p_sites
    (t test over domains, Holm's correction), wins, pairs, domains_won, domains, verdict.
    """

    domains: pd.DataFrame  # accuracy by row and held-out domain
    rows: pd.DataFrame
    pairs: pd.DataFrame  # of each trained row with the reference
    recommended: str
    verdict: list[str]
    equal_within: float
    metric: str = "accuracy"  # of all scores, in words
    plan: Mapping[str, Any] = field(default_factory=dict)  # what was compared


def observed_scores(runs: Sequence[FinishedRun], split: SplitName | None) -> pd.DataFrame:
    """Returns the selected scores, a line for each "row", number of training domains, held-out "domain" and "seed".

    Columns in shares: accuracy (by the runs' metric), zero (of the most frequent class), balanced, answer (share of the
    most frequent answer), validation. The number of training domains is "trained", that of their images "images".
    """
    lines = []
    frame = by_row(runs).groupby(["row", "test_domains", "seed"], sort=False).run if runs else []
    for (row, _, seed), members in frame:
        record = training_domain_validation([record for run in members for record in run.records])
        images = record.images(record.training_domains)
        facts = (validation_score(record), nan if images is None else images)
        part = split or record.reported_split
        zeros = unseen_of_most_frequent(record, part)
        balanced = unseen_scores(record, part, "balanced_accuracy")
        answers = unseen_scores(record, part, "same_answer")
        for name, accuracy in unseen_scores(record, part).items():
            scores = (accuracy, *(table.get(name, nan) for table in (zeros, balanced, answers)))
            lines.append((row, len(record.training_domains), name, seed, *scores, *facts))
    columns = ["row", "trained", "domain", "seed", "accuracy", "zero", "balanced", "answer", "validation", "images"]
    table = pd.DataFrame(lines, columns=columns).dropna(subset="accuracy")
    table = table.groupby(columns[:4], as_index=False).mean()
    # Each run scores the data's own "ood" domains, whichever domain it holds out besides
    table["row"] = table.row.map(row_names(table.row))
    return table.groupby(columns[:4], as_index=False, sort=False).mean()


def row_names(rows: Iterable[RowKey]) -> dict[RowKey, str]:
    """Names rows. Those of one name, from several sweeps, get their method and network too."""
    names = {row: str(row) for row in rows}
    repeated = {name for name, number in Counter(names.values()).items() if number > 1 and name != ZERO}
    return {row: f"{row} ({row.algorithm}, {row.model})" if n in repeated else n for row, n in names.items()}


def counted_scores(observed: pd.DataFrame) -> pd.DataFrame:
    """Returns the scores of runs with the most training domains of which a row held out two domains or more."""
    held_out = observed.groupby(["row", "trained"]).domain.nunique().groupby("trained").max().clip(upper=2)
    return observed[observed.trained == max(held_out.index, key=lambda number: (held_out[number], number), default=0)]


def scores_of(runs: Sequence[FinishedRun], split: SplitName | None = None) -> pd.DataFrame:
    """Reads the scores of finished runs that count, see `counted_scores` and `with_zero`."""
    return with_zero(counted_scores(observed_scores(runs, split)))


def with_zero(scores: pd.DataFrame) -> pd.DataFrame:
    """Adds the row `ZERO` from the column zero, unless it was run: row, domain, seed, accuracy and balanced, in shares.

    Accuracies are by the runs' metric.
    """
    if ZERO not in set(scores.row):
        zeros = scores.groupby(["domain", "seed"], as_index=False).zero.mean().dropna()
        scores = pd.concat([scores, zeros.rename(columns={"zero": "accuracy"}).assign(row=ZERO)], ignore_index=True)
    return scores[["row", "domain", "seed", "accuracy", "balanced"]]


def prediction_interval(accuracies: Sequence[float]) -> tuple[float, float]:
    """Predicts the accuracy at one new domain: mean ± t s sqrt(1 + 1/n) for n domains.

    t is the 97.5% quantile of Student's distribution with n - 1 degrees of freedom, and s the standard deviation of
    the domains (ddof=1). Ends beyond 0 and 1 are clipped. Fewer than `LEAST_DOMAINS` domains have no interval, but NaN.
    """
    number = len(accuracies)
    if number < LEAST_DOMAINS:
        return nan, nan
    half = t.ppf((1 + CONFIDENCE) / 2, number - 1) * np.std(accuracies, ddof=1) * sqrt(1 + 1 / number)
    low, high = np.clip([np.mean(accuracies) - half, np.mean(accuracies) + half], 0, 1).tolist()
    return low, high


def percent(share: float, sign: str = "") -> str:
    """Formats a share in percent, and a missing value as a dash. The sign "+" is that of differences."""
    return f"{100 * share:{sign}.1f}" if isfinite(share) else "-"


def above(zero: float) -> float:
    """Returns an accuracy that is hardly above `zero`: by five points, or by half of what lies on either side of it."""
    return zero + min(0.05, zero / 2, (1 - zero) / 2)


def paired(scores: pd.DataFrame, first: str, second: str) -> pd.Series:
    """Returns first - second by "domain" and "seed", where both rows have a run."""
    accuracy = scores.set_index(["row", "domain", "seed"]).accuracy
    # Rounded, so that ties stay ties despite floating-point errors
    return (accuracy[first] - accuracy[second]).dropna().round(12)


def answer(
    scores: pd.DataFrame,
    costs: Mapping[str, tuple[float, float]],
    reference: str = "dense",
    equal_within: float = 0.01,
    metric: str = "accuracy",
) -> Answer:
    """Compares the rows of `scores_of` with a reference, and recommends one by `judge` and `recommend`.

    Args:
        scores: Columns row, domain, seed, accuracy and balanced. Pairs are compared if both rows have the run.
        costs: Multiply-accumulates of an image (in billions) and number of parameters, by row.
        reference: Row to compare with. If it is none of `complete_rows`, that of the highest mean.
        equal_within: Largest difference that is equal in practice, as a share.
        metric: The score in words.

    Raises:
        ArgumentError: No row was trained.
    """
    domains = scores.pivot_table("accuracy", "row", "domain", sort=False)
    trained = [name for name in domains.index if name != ZERO]
    if not trained:
        raise ArgumentError.of("rows", list(domains.index), "none was trained; add one, such as dense")
    complete = complete_rows(domains)
    reference = reference if reference in complete.index else complete.mean(axis="columns").idxmax()
    lines = [_pair(name, reference, paired(scores, name, reference)) for name in trained if name != reference]
    pairs = pd.DataFrame(lines, columns=_PAIR)
    pairs["p_holm"], pairs["p_sites"] = holm(pairs.p), holm(pairs.p_sites)
    pairs["verdict"] = [judge(pair, equal_within) for pair in pairs.itertuples()]
    rows = _rows(scores, domains, costs)
    recommended, reason = recommend(domains, rows, pairs, reference, equal_within)
    verdict = [reason, *_missing(scores, domains, pairs), *_on_these_domains(pairs), *_zero(domains)]
    return Answer(domains, rows, pairs, recommended, [*verdict, *_limits(scores, pairs)], equal_within, metric)


def _rows(scores: pd.DataFrame, domains: pd.DataFrame, costs: Mapping[str, tuple[float, float]]) -> pd.DataFrame:
    by_seed = scores.pivot(index=["row", "seed"], columns="domain", values="accuracy")
    whole = by_seed.count(axis="columns").eq(domains.count(axis="columns"), level="row")
    seeds = by_seed[whole].mean(axis="columns").groupby("row")
    intervals = [prediction_interval(row.dropna()) for _, row in domains.iterrows()]
    both = [(*interval, *costs.get(name, (nan, nan))) for name, interval in zip(domains.index, intervals, strict=True)]
    return pd.DataFrame(both, domains.index, ["low", "high", "gmacs", "parameters"]).assign(
        mean=domains.mean(axis="columns"),
        standard_error=(seeds.std(ddof=0) / seeds.size() ** 0.5).where(seeds.size() > 1),
        worst=domains.min(axis="columns"),
        worst_domain=domains.idxmin(axis="columns"),
        balanced_accuracy=scores.groupby(["row", "domain"]).balanced.mean().groupby("row").mean(),
        seeds=scores.groupby("row").seed.nunique(),
    )


_PAIR = ["first", "second", "difference", "low", "high", "p", "p_holm", "p_sites"]
_PAIR += ["wins", "pairs", "domains_won", "domains", "verdict"]


def _pair(first: str, second: str, differences: pd.Series) -> dict[str, object]:
    by_domain = differences.groupby("domain").mean().round(12)
    weighted = differences / differences.groupby("domain").transform("size")  # as in the mean over domains
    difference, freedom = by_domain.mean(), len(by_domain) - 1
    error = np.float64(by_domain.sem())
    half = t.ppf((1 + CONFIDENCE) / 2, freedom) * error
    with np.errstate(divide="ignore", invalid="ignore"):  # domains with equal differences
        p_sites = 2 * t.sf(abs(difference) / error, freedom)
    numbers = {"difference": difference, "low": difference - half, "high": difference + half, "p_sites": p_sites}
    numbers |= {"p": sign_flip_p(list(weighted)), "wins": (differences > 0).sum(), "pairs": len(differences)}
    domains = {"domains_won": (by_domain > 0).sum(), "domains": len(by_domain)}
    return {"first": first, "second": second, **numbers, **domains}


def judge(pair: Any, equal_within: float) -> str:
    """Gives the verdict on a line of `Answer.pairs`. It is about new sites.

    1. The interval lies within `equal_within` of zero: equal in practice.
    2. The sign-flip test over pairs and the t test over domains find a difference, both with Holm's correction: better
       or worse.
    3. Otherwise, and with one domain or without a common run: cannot tell.
    """
    if -equal_within <= pair.low and pair.high <= equal_within:
        return EQUAL
    if pair.p_holm < LEVEL and pair.p_sites < LEVEL:
        return BETTER if pair.difference > 0 else WORSE
    return UNKNOWN


def recommend(
    domains: pd.DataFrame, rows: pd.DataFrame, pairs: pd.DataFrame, reference: str, equal_within: float
) -> tuple[str, str]:
    """Returns the row to take, and the reason in words. The first rule that applies decides.

    1. No trained row is clearly above the most frequent class (`above`): take `ZERO`, so no network.
    2. Rows are better than the reference: take the cheapest of those within `equal_within` of the best of them.
    3. Otherwise take the cheapest of the reference and the rows that are equal in practice or cannot be told apart.
       A row is left out if its mean difference is below -`equal_within`.

    Rows that are not clearly above the most frequent class, or none of `complete_rows`, are left out. The cheapest row
    has the fewest operations for an image, then the fewest parameters. Of equal ones, and without known costs, the
    probe comes first, because nothing but a linear classifier is trained, then the reference.
    """
    beating = _above_zero(domains)
    if not beating:
        zero = f"the most frequent class of the training images ({percent(_zero_of(domains))}%)"
        return ZERO, f"Take {ZERO}: no row is clearly above {zero}."
    judged = {pair.first: pair for pair in pairs.itertuples() if pair.first in beating}
    better = {name: pair.difference for name, pair in judged.items() if pair.verdict == BETTER}
    if better:
        row = _cheapest(rows, [name for name in better if better[name] >= max(better.values()) - equal_within], "")
        pair, gain = judged[row], percent(better[row], "+")
        reason = f"at new sites it is better than {reference}, by {gain} points (95% interval: {_interval(pair, '+')})"
        return row, f"Take {row}: {reason}, and it wins {_domains_won(pair)}."
    alike = {n: p.verdict for n, p in judged.items() if p.verdict != WORSE and p.difference >= -equal_within}
    names = [name for name in beating if name == reference or name in alike] or [rows["mean"][beating].idxmax()]
    row = _cheapest(rows, names, reference)
    which = "one" if rows.gmacs[names].isna().any() else "the cheapest"  # costs may be unknown
    if len(names) == 1:
        return row, f"Take {row}, the only row that the rules leave."
    what = "that cannot be told apart at new sites"
    if set(alike.values()) == {EQUAL}:
        unit = "point" if equal_within == 0.01 else "points"
        what = f"that are equal in practice, within {100 * equal_within:g} {unit} of {reference}"
    return row, f"Take {row}, {which} of the rows {what}: {', '.join(names)}."


def complete_rows(domains: pd.DataFrame) -> pd.DataFrame:
    """Returns the trained rows of a table by row and domain that have the most domains, and these."""
    domains = domains.drop(index=ZERO, errors="ignore")
    present = domains.notna()
    fullest = present.loc[present.sum(axis="columns").idxmax()]
    return domains.loc[present.eq(fullest).all(axis="columns"), fullest]


def _domains_won(pair: Any) -> str:
    return f"{pair.domains_won} of {pair.domains} domains"


def _cheapest(rows: pd.DataFrame, names: Sequence[str], reference: str) -> str:
    costs = rows[["gmacs", "parameters"]].fillna(inf)
    return min(names, key=lambda name: (*costs.loc[name], name != "probe", name != reference, name))


def _above_zero(domains: pd.DataFrame) -> list[str]:
    """Names the `complete_rows` that are clearly above the most frequent class, all if its scores are unknown."""
    complete, zero = complete_rows(domains), _zero_of(domains)
    least = above(zero) if isfinite(zero) else -inf
    return list(complete.index[complete.mean(axis="columns") > least])


def _zero_of(domains: pd.DataFrame) -> float:
    """Returns the mean of the most frequent class on the domains of `complete_rows`, NaN if it is unknown."""
    return domains.reindex(index=[ZERO], columns=complete_rows(domains).columns).loc[ZERO].mean()


def _missing(scores: pd.DataFrame, domains: pd.DataFrame, pairs: pd.DataFrame) -> list[str]:
    """Names rows that lack held-out domains, and those of which runs have no partner."""
    complete = complete_rows(domains)
    left_out = domains.drop(index=[*complete.index, ZERO], errors="ignore")[complete.columns]
    lacking = [f"{name} ({', '.join(map(str, row.index[row.isna()]))})" for name, row in left_out.iterrows()]
    lines = [f"Left out, because runs of held-out domains are missing: {', '.join(lacking)}."] if lacking else []
    wanted = len(scores[scores.row != ZERO].drop_duplicates(["domain", "seed"]))
    partial = [f"{pair.first} {pair.pairs} of {wanted}" for pair in pairs.itertuples() if pair.pairs < wanted]
    return [*lines, f"Pairs with {pairs.second[0]}, as runs are missing: {', '.join(partial)}."] if partial else lines


def _on_these_domains(pairs: pd.DataFrame) -> list[str]:
    shown = [
        f"{pair.first} is {BETTER if pair.difference > 0 else WORSE} than {pair.second}, by "
        f"{percent(pair.difference, '+')} points (p = {pair.p_holm:.2g}, and it wins {_domains_won(pair)})"
        for pair in pairs[(pairs.verdict == UNKNOWN) & (pairs.p_holm < LEVEL)].itertuples()
    ]
    return [f"On these domains {', and '.join(shown)}. New sites may differ."] if shown else []


def _zero(domains: pd.DataFrame) -> list[str]:
    beating = _above_zero(domains)
    if ZERO not in domains.index or not beating:
        return []
    zero = f"the most frequent class ({percent(_zero_of(domains))}%)"
    alone = f" The probe alone is {'one' if 'probe' in beating else 'none'} of them."
    return [f"Rows clearly above {zero}: {', '.join(beating)}.{alone if 'probe' in domains.index else ''}"]


def _limits(scores: pd.DataFrame, pairs: pd.DataFrame) -> list[str]:
    """States which differences so many domains and seeds can find, and how many seeds the largest gain needs."""
    if pairs.empty:
        return []
    number, most, domains = pairs.p.count(), pairs.pairs.max(), pairs.domains.max()
    if not most:
        return ["No runs form a pair, because no row has a held-out domain and seed of another."]
    smallest = number * smallest_p(most)
    corrected = f", corrected for {number} rows" if number > 1 else ""
    reach = f"The smallest p of {most} paired runs is {min(smallest, 1):.2g}{corrected}"
    if domains < 2:
        return [f"{reach}. One held-out domain says nothing about new sites: hold out each domain in turn."]
    if smallest >= LEVEL:
        seeds = next(seeds for seeds in count(1) if number * smallest_p(domains * seeds) < LEVEL)
        return [f"{reach}, so no difference can be shown: at least {seeds} seeds are needed."]
    freedom = pairs.domains - 1
    errors = (pairs.high - pairs.low) / 2 / t.ppf((1 + CONFIDENCE) / 2, freedom)
    factors = freedom.map(lambda each: _errors_to_find(LEVEL / number, each))
    if not errors.any():
        return [f"{reach}."]
    found = f"a difference of about {percent((factors * errors).median())} points at new sites"
    text = f"{reach}. {POWER:.0%} of comparisons like this find {found}."
    best = pairs.loc[pairs.difference.idxmax()]
    by_domain = paired(scores, best["first"], best.second).groupby("domain")
    of_runs = by_domain.var().mean()  # NaN with one seed
    if best.verdict == UNKNOWN and best.difference > 0 and isfinite(of_runs):
        of_domains = max(by_domain.mean().var() - of_runs / by_domain.size().mean(), 0)
        left = domains * (best.difference / factors[best.name]) ** 2 - of_domains
        needed = f"about {ceil(of_runs / left)} seeds, or" if left > 0 else "not more seeds but"
        text += f" To show the gain of {best['first']} takes {needed} more domains."
    return [text]


def _errors_to_find(level: float, freedom: int) -> float:
    """Returns the true difference, in standard errors, that a two-sided t test finds by the chance `POWER`."""
    if freedom < 1:
        return nan
    limit = t.ppf(1 - level / 2, freedom)
    return float(brentq(lambda size: nct.sf(limit, freedom, size) - POWER, 0, 9 * limit))


def render_answer(answer: Answer, format_: str) -> str:
    """Formats an answer in a format of `FORMATS`, or as "csv" or "json"."""
    if format_ == "json":
        return json.dumps(answer_data(answer), indent=1, ensure_ascii=False) + "\n"
    if format_ == "csv":
        return data_text(answer_frame(answer), format_)
    prefix = {"text": "", "markdown": "- ", "latex": "% "}[format_]
    lines = [prefix + FORMATS[format_](line) for line in answer.verdict]
    rows = formatted(rows_title(answer), row_texts(answer), format_)
    return "\n\n".join(["\n".join(lines), rows, *pairs_text(answer, format_)])


def _interval(row: Any, sign: str = "") -> str:
    return "-" if isnan(row.low) else f"{percent(row.low, sign)} to {percent(row.high, sign)}"


def rows_title(answer: Answer) -> str:
    """Returns the title of `row_texts`."""
    return f"Held-out domains, {'' if answer.metric == 'accuracy' else f'{answer.metric} in '}percent"


def row_texts(answer: Answer) -> pd.DataFrame:
    """Formats the rows in percent."""
    lines = [
        {
            "mean": percent(row.mean) + (f" ± {percent(row.standard_error)}" if isfinite(row.standard_error) else ""),
            "worst": f"{row.worst_domain}, {percent(row.worst)}",
            "balanced": percent(row.balanced_accuracy),
            "at a new site": _interval(row),
            "GMACs": "-" if isnan(row.gmacs) else f"{row.gmacs:.2f}",
            "parameters": "-" if isnan(row.parameters) else f"{row.parameters / 1e6:.1f}M",
            "seeds": str(row.seeds),
        }
        for row in answer.rows.itertuples()
    ]
    texts = pd.concat([answer.domains.map(percent), pd.DataFrame(lines, answer.rows.index)], axis="columns")
    return texts.reset_index(names="row", allow_duplicates=True)


def pairs_title(answer: Answer) -> str:
    """Returns the title of `pair_texts`."""
    return f"Differences to {answer.pairs.second[0]}, points"


def pair_texts(answer: Answer) -> pd.DataFrame:
    """Formats the differences in points."""
    lines = [
        {
            "row": pair.first,
            "difference": percent(pair.difference, "+"),
            "interval": _interval(pair, "+"),
            "p": _p(pair.p),
            "p (Holm)": _p(pair.p_holm),
            "p (sites)": _p(pair.p_sites),
            "won": f"{pair.wins} of {pair.pairs} pairs, {_domains_won(pair)}",
            "verdict": pair.verdict,
        }
        for pair in answer.pairs.itertuples()
    ]
    return pd.DataFrame(lines)


def _p(value: float) -> str:
    return f"{value:.2g}" if isfinite(value) else "-"


def pairs_text(answer: Answer, format_: str) -> list[str]:
    """Formats the differences with their notes in a format of `FORMATS`. An answer without pairs has none."""
    if answer.pairs.empty:
        return []
    table = formatted(pairs_title(answer), pair_texts(answer), format_)
    return [table, "\n".join(("% " if format_ == "latex" else "") + note for note in NOTES)]


def answer_frame(answer: Answer) -> pd.DataFrame:
    """Returns a line for each row: its numbers, and the difference to the reference, in percent and points."""
    rows, pairs = _in_percent(answer)
    accuracies = (100 * answer.domains.add_prefix("accuracy_")).round(6)
    frame = pd.concat([accuracies, rows, pairs.set_index("first").add_prefix("pair_")], axis="columns")
    return frame.assign(metric=answer.metric, recommended=frame.index == answer.recommended).reset_index(names="row")


def answer_data(answer: Answer) -> dict[str, object]:
    """Returns what "json" prints, in percent and points: rows, pairs, recommended and verdict. None stands for NaN."""
    accuracies, rows, pairs = map(_records, ((100 * answer.domains).round(6), *_in_percent(answer)))
    named = [
        {"name": name, "accuracy": by_domain, **row}
        for name, by_domain, row in zip(answer.rows.index, accuracies, rows, strict=True)
    ]
    return {
        "rows": named,
        "pairs": [{"interval": [pair.pop("low"), pair.pop("high")], **pair} for pair in pairs],
        "recommended": answer.recommended,
        "verdict": answer.verdict,
        "plan": {"metric": answer.metric, **answer.plan},
    }


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return table.astype(object).where(table.notna(), None).to_dict("records")


def _in_percent(answer: Answer) -> list[pd.DataFrame]:
    shares = ["mean", "standard_error", "worst", "balanced_accuracy", "low", "high", "difference"]
    tables = [(table, table.columns.intersection(shares)) for table in (answer.rows, answer.pairs)]
    return [table.assign(**(100 * table[columns]).round(6)) for table, columns in tables]
