"""The accuracy to expect at a new site, from runs that held out domains: in numbers, in words and in tables.

A new site is a domain that no run was trained on. Training-domain validation selects the steps, so the selection uses
no image of a held-out domain. Trial seeds are averaged within a domain, because a new site is a domain and not a seed.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan, sqrt
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t

from ..errors import RecordError
from ..metrics import METRICS
from ..protocols.records import Record, SplitName
from ..protocols.selection import one_answer, training_domain_validation, validation_score
from .comparison import FORMATS, formatted, holm, sign_flip_p
from .runs import FinishedRun, RowKey, by_row, domain_names, unseen_of_most_frequent, unseen_scores

LEAST_DOMAINS = 4  # of a prediction interval
CONFIDENCE, LEVEL = 0.95, 0.05  # of the interval, and of the tests


@dataclass(frozen=True, eq=False)
class NewSite:
    """The numbers for one data set. `sentences` and `site_tables` describe them.

    Scores are by the runs' metric, accuracies by default. Columns of `rows`, in shares: row (`RowKey`), domains and
    seeds (numbers), accuracy, low, high and clipped (see `prediction_interval`), worst_domain, worst, validation, gap.
    Columns of the comparison with the first row: difference, better_in and paired (domains), pairs, p (Holm's
    correction), p_domains (seeds averaged), comparison in words.
    """

    runs: Sequence[FinishedRun]
    rows: pd.DataFrame  # the recommended row first
    domains: pd.DataFrame  # accuracy, zero, balanced, answer, validation and seeds of the best row by domain
    by_training_domains: pd.DataFrame  # accuracy of the recommended row: number of training domains x domain
    by_training_images: pd.DataFrame  # of rows that differ in --holdout-fraction alone: number of images x domain
    nested: float  # mean accuracy if the row is chosen anew without the domain that it is tested on
    zero: float  # mean accuracy of the training images' most frequent class on the same domains, or else of guessing

    @property
    def metric(self) -> str:
        """The score in words."""
        return METRICS[self.runs[0].metric]

    @property
    def zero_in_words(self) -> str:
        """What reaches `zero`."""
        name = self.runs[0].records[0].args.get("most_frequent_class")
        source = f"the most frequent class of the training images ({name})"
        source = "guessing" if self.domains.zero.isna().all() else source
        return f"{source} gives {percent(self.zero)}%"


def prediction_interval(accuracies: Sequence[float]) -> tuple[float, float, bool]:
    """Predicts the accuracy at one new domain: mean ± t s sqrt(1 + 1/n) for n domains.

    t is the 97.5% quantile of Student's distribution with n - 1 degrees of freedom, and s the standard deviation of
    the domains (ddof=1). Returns both ends, clipped to 0..1, and whether they were. Fewer than `LEAST_DOMAINS` domains
    have no interval, but NaN.
    """
    number = len(accuracies)
    if number < LEAST_DOMAINS:
        return nan, nan, False
    half = t.ppf((1 + CONFIDENCE) / 2, number - 1) * np.std(accuracies, ddof=1) * sqrt(1 + 1 / number)
    ends = (np.mean(accuracies) - half, np.mean(accuracies) + half)
    low, high = np.clip(ends, 0, 1).tolist()
    return low, high, (low, high) != ends


def new_site(runs: Sequence[FinishedRun], split: SplitName | None = None) -> NewSite:
    """Computes what runs on one data set predict for a new site. Runs that hold out no domain are left out.

    Scores are on a part of held-out domains, by default `Record.reported_split`.

    Of runs with different numbers of training domains, those count whose row held out the most domains in turn. The
    recommended row has the highest mean of the rows with the most held-out domains.

    Raises:
        RecordError: The runs have different data, or no row held out two domains.
    """
    runs = [run for run in runs if run.test_domains]
    _check_same_data(runs)
    observed = observed_scores(runs, split)
    held_out = observed.groupby(["row", "trained"]).domain.nunique().groupby("trained").max()
    if not held_out.max() >= 2:  # NaN without any held-out domain
        names = ", ".join(map(repr, observed.domain.unique())) or "none that a run was not trained on"
        reason = "too few to show what to expect at a new site, because one domain stands for itself alone"
        raise RecordError(f"held-out domains={names}: {reason}; hold out each domain in turn: timm-moe-dg sweep")
    trained = max(held_out.index, key=lambda number: (held_out[number], number))
    counted = observed[observed.trained == trained]
    accuracies = _by_domain(counted, "row")
    rows, full = _rows(counted, accuracies), _complete(accuracies)
    best = rows.row[0]
    of_best = counted[counted.row == best].groupby("domain")
    zero = of_best.zero.mean().mean()
    if isnan(zero):
        zero = 1 / (runs[0].args.get("num_classes") or inf)
    domains = of_best[["accuracy", "zero", "balanced", "answer", "validation"]].mean()
    domains = domains.assign(seeds=of_best.seed.nunique()).sort_values("accuracy")
    by_domains = _by_domain(observed[observed.row == best], "trained").dropna()
    nested = np.mean([full.loc[full.drop(columns=name).mean(axis="columns").idxmax(), name] for name in full])
    return NewSite(runs, rows, domains, by_domains, _by_training_images(counted, best), float(nested), zero)


def _check_same_data(runs: Sequence[FinishedRun]) -> None:
    for run in runs[1:]:
        ours, theirs = _data(runs[0].records[0]), _data(run.records[0])
        for name in [name for name in ours if ours[name] != theirs.get(name, ours[name])]:
            pair = f"{name}={ours[name]!r:.150} in {runs[0].folder}, {theirs[name]!r:.150} in {run.folder}"
            raise RecordError(f"{pair}: a recommendation is for one data set; give folders with runs of the same data")


def _data(record: Record) -> dict[str, object]:
    facts = {name: record.args.get(name) for name in ("dataset", "num_classes")}
    facts |= {"domains": domain_names([record]), "metric": record.metric, "reported_split": record.reported_split}
    # The digest depends on the columns of metadata that a run reads
    digest = f"data of columns {columns}" if (columns := record.args.get("metadata_columns")) else "data"
    return {name: value for name, value in {**facts, digest: record.args.get("data")}.items() if value is not None}


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
    # Each run scores the data's own "ood" domains, whichever domain it holds out besides
    return table.groupby(columns[:4], as_index=False).mean()


def _by_domain(observed: pd.DataFrame, name: str, value: str = "accuracy") -> pd.DataFrame:
    return observed.groupby([name, "domain"])[value].mean().unstack("domain")


def _by_training_images(counted: pd.DataFrame, best: RowKey) -> pd.DataFrame:
    names = {row: re.sub(", holdout_fraction=[^,]+", "", str(row)) for row in counted.row}
    alike = counted[[names[row] == names[best] for row in counted.row]].dropna(subset="images")
    return _by_domain(alike.assign(images=alike.groupby("row").images.transform("mean").round()), "images").dropna()


def _complete(accuracies: pd.DataFrame) -> pd.DataFrame:
    present = accuracies.notna()
    fullest = present.loc[present.sum(axis="columns").idxmax()]
    return accuracies.loc[present.eq(fullest).all(axis="columns"), fullest]


def _rows(counted: pd.DataFrame, accuracies: pd.DataFrame) -> pd.DataFrame:
    complete, means = _complete(accuracies).index, accuracies.mean(axis="columns")
    best, *others = sorted(accuracies.index, key=lambda row: (row not in complete, -means[row]))
    intervals = [prediction_interval(values.dropna()) for _, values in accuracies.iterrows()]
    rows = pd.DataFrame(intervals, accuracies.index, columns=["low", "high", "clipped"])
    rows = rows.assign(domains=accuracies.count(axis="columns"), seeds=counted.groupby("row").seed.nunique())
    rows = rows.assign(worst_domain=accuracies.idxmin(axis="columns"), worst=accuracies.min(axis="columns"))
    rows = rows.assign(accuracy=means, validation=_by_domain(counted, "row", "validation").mean(axis="columns"))
    pairs = counted.pivot(index=["domain", "seed"], columns="row", values="accuracy")
    differences = pairs[others].sub(pairs[best], axis="index")
    by_domain = differences.groupby("domain").mean()
    p, p_domains = ([sign_flip_p(table[row].dropna()) for row in others] for table in (differences, by_domain))
    rows = rows.assign(gap=rows.validation - means, difference=by_domain.mean(), better_in=(by_domain > 0).sum())
    rows = rows.assign(paired=by_domain.count())
    rows = rows.assign(pairs=differences.count(), p=pd.Series(holm(p), others), p_domains=pd.Series(p_domains, others))
    rows["comparison"] = [_comparison(row) for row in rows.itertuples()]
    for row in accuracies.index.difference(complete):
        rows.loc[row, "comparison"] = f"incomplete: lacks {', '.join(accuracies.columns[accuracies.loc[row].isna()])}"
    rows.loc[best, "comparison"] = "recommended"
    return rows.loc[[best, *others]].reset_index(names="row")


def _comparison(row: Any) -> str:
    if isnan(row.p):
        return "not compared: no common seed"
    if row.p >= LEVEL:
        return "no difference that these runs can show"
    return f"{'worse' if row.difference < 0 else 'better'}{'' if row.p_domains < LEVEL else ' on these domains'}"


def percent(share: float, sign: str = "") -> str:
    """Formats a share in percent, and a missing value as a dash. The sign "+" is that of differences."""
    return f"{100 * share:{sign}.1f}" if isfinite(share) else "-"


def above(zero: float) -> float:
    """Returns an accuracy that is hardly above `zero`: by five points, or by half of what lies on either side of it."""
    return zero + min(0.05, zero / 2, (1 - zero) / 2)


def recommendation(site: NewSite) -> str:
    """Recommends in one sentence. The first rule that applies decides.

    1. The mean is hardly above the training images' most frequent class (`above`): do not deploy.
    2. Fewer than `LEAST_DOMAINS` domains were held out: hold out more before deciding.
    3. The interval begins at or below that of rule 1: test on labeled images of each new site first.
    4. Otherwise: deploy where the lower end of the interval is enough.
    """
    best, least = site.rows.iloc[0], above(site.zero)
    zero = f", and {site.zero_in_words}" if site.zero else ""
    if best.accuracy <= least:
        learnt = "it has learnt nothing beyond it" if best.accuracy <= site.zero else "it has learnt hardly more"
        advice = f"do not deploy it, because it reaches {percent(best.accuracy)}% on held-out domains{zero}: {learnt}"
    elif isnan(best.low):
        advice = f"hold out at least {LEAST_DOMAINS} domains before you decide, because these are {best.domains}"
    elif best.low <= least:
        advice = f"test it on labeled images of each new site first, because {percent(best.low)}% is possible{zero}"
    else:
        article = "a" if site.metric == "balanced accuracy" else "an"
        advice = f"deploy it if {article} {site.metric} of {percent(best.low)}% is enough at a new site"
    return f"{best.row}: {advice}."


def sentences(site: NewSite) -> list[str]:
    """Describes the numbers behind the recommendation."""
    best, *others = site.rows.itertuples()
    interval = f"none, because {best.domains} held-out domains are fewer than {LEAST_DOMAINS}"
    if isfinite(best.low):
        interval = f"{percent(best.low)} to {percent(best.high)}%{', clipped to 0 to 100%' if best.clipped else ''}"
    gap = f"{percent(best.validation)}%, a gap of {percent(best.gap, sign='+')} points to held-out {site.metric}"
    gap = gap if isfinite(best.gap) else "unknown, without images"
    lines = [
        f"{site.metric.capitalize()} to expect at a new site (data set {site.runs[0].dataset}): "
        f"{percent(best.accuracy)}%, the mean over {best.domains} held-out domains with {best.seeds} trial "
        f"seed{'' if best.seeds == 1 else 's'}.",
        f"95% prediction interval for one new site: {interval}.",
        *([f"To compare with: {site.zero_in_words} on the same domains."] if site.zero else []),
        *_by_class(site),
        f"Worst held-out domain: {best.worst_domain}, {percent(best.worst)}%.",
        f"Validation {site.metric} on the training domains: {gap}.",
        *_what_helps(site),
    ]
    if not others:
        return [*lines, "Other rows: none, so these runs compare no models."]
    counts = Counter(row.comparison.partition(":")[0] for row in others)
    compared = ", ".join(f"{words} ({number})" for words, number in counts.items())
    chosen = f"Mean {site.metric} if the row is chosen anew without the domain that it is tested on"
    test = "two-sided sign-flip test over pairs of equal domain and seed (Holm's correction), and over domains alone"
    compared = f"Other rows against the recommended one: {compared}."
    return [*lines, compared, f"{chosen}: {percent(site.nested)}%.", f"p: {test}."]


def _by_class(site: NewSite) -> list[str]:
    """What accuracies hide where classes are of unequal size."""
    lines, balanced = [], site.domains.balanced.mean()
    if isfinite(balanced) and site.runs[0].metric == "accuracy":
        lines.append(f"Balanced accuracy, the mean over classes: {percent(balanced)}%.")
    answer = one_answer(site.domains.answer)
    return [*lines, f"{answer.capitalize()}."] if answer else lines


def _what_helps(site: NewSite) -> list[str]:
    domains = "sweep with --protocols leave_one_domain_out_cv, which also holds out pairs of domains"
    fraction = (1 + site.runs[0].args.get("holdout_fraction", 0.2)) / 2
    images = f"sweep into another folder with -- --holdout-fraction {fraction:g}, and give both folders"
    curves = {"domains": (site.by_training_domains, domains), "images": (site.by_training_images, images)}
    return [_trend(f"training {unit}", *curve) for unit, curve in curves.items()]


def _trend(unit: str, curve: pd.DataFrame, remedy: str) -> str:
    if len(curve) < 2:
        return f"Effect of more {unit}: unknown; {remedy}."
    points = ", ".join(f"{percent(share)}% with {number:,.0f}" for number, share in curve.mean(axis="columns").items())
    change = curve.iloc[-1] - curve.iloc[-2]
    last = f"{percent(change.mean(), sign='+')} points, p = {sign_flip_p(list(change)):.2g} over {len(change)} domains"
    return f"Effect of more {unit}: {points}. Last step: {last}."


def site_tables(site: NewSite) -> dict[str, pd.DataFrame]:
    """Returns title -> table of texts, in percent and points. Rows are compared if there are several."""
    domains, compared = site.domains.reset_index(), []
    for row in site.rows.itertuples():
        line = {"row": str(row.row), "compared": row.comparison, site.metric: percent(row.accuracy)}
        line |= {"95% interval": f"{percent(row.low)} to {percent(row.high)}"} if isfinite(row.low) else {}
        line |= {"worst domain": f"{row.worst_domain}, {percent(row.worst)}", "gap": percent(row.gap, sign="+")}
        if isfinite(row.p):
            line |= {"minus the recommended": percent(row.difference, sign="+")}
            line |= {"better in": f"{row.better_in:.0f} of {row.paired:.0f}", "pairs": f"{row.pairs:.0f}"}
            line |= {"p, pairs": f"{row.p:.2g}", "p, domains": f"{row.p_domains:.2g}"}
        compared.append(line)
    texts = pd.DataFrame({"held-out domain": domains.domain, site.metric: domains.accuracy.map(percent)})
    texts["most frequent class"] = domains.zero.map(percent)
    if site.runs[0].metric == "accuracy" and domains.balanced.notna().any():
        texts["balanced"] = domains.balanced.map(percent)
    texts["validation"], texts["seeds"] = domains.validation.map(percent), domains.seeds.map(str)
    tables = {f"Held-out domains of {site.rows.row[0]}, the worst first": texts}
    return {"Rows compared": pd.DataFrame(compared).fillna("-"), **tables} if len(compared) > 1 else tables


def render_site(site: NewSite, format_: str) -> str:
    """Formats sentences and tables in a format of `FORMATS`."""
    prefix = {"text": "", "markdown": "- ", "latex": "% "}[format_]
    lines = [prefix + FORMATS[format_](line) for line in (recommendation(site), *sentences(site))]
    parts = [formatted(title, texts, format_) for title, texts in site_tables(site).items()]
    return "\n\n".join(["\n".join(lines), *parts])


def site_frame(site: NewSite) -> pd.DataFrame:
    """Returns the numbers of each row for other programs, in percent and points."""
    frame = pd.DataFrame(list(site.rows.row)).join(site.rows.drop(columns="row"))
    shares = ["accuracy", "low", "high", "worst", "validation", "gap", "difference"]
    frame[shares] = (100 * frame[shares]).round(6)
    return frame.assign(dataset=site.runs[0].dataset, recommendation=recommendation(site))
