"""The accuracy to expect at a new site, from runs that held out domains: in numbers, in words and in tables.

A new site is a domain that no run was trained on. Training-domain validation selects the steps, so the selection uses
no image of a held-out domain. Trial seeds are averaged within a domain, because a new site is a domain and not a seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import Any

import pandas as pd

from ..errors import RecordError
from ..metrics import METRICS
from ..protocols.records import Record, SplitName
from ..protocols.selection import one_answer
from .answer import (
    LEAST_DOMAINS,
    NOTES,
    ZERO,
    Answer,
    above,
    answer,
    answer_frame,
    complete_rows,
    counted_scores,
    observed_scores,
    pair_texts,
    pairs_title,
    percent,
    row_texts,
    rows_title,
    with_zero,
)
from .comparison import FORMATS, formatted, sign_flip_p
from .costs import costs_of
from .runs import FinishedRun, domain_names


@dataclass(frozen=True, eq=False)
class NewSite:
    """The numbers for one data set. `sentences` and `site_tables` describe them.

    Scores are by the runs' metric, accuracies by default, in shares.
    """

    runs: Sequence[FinishedRun]
    row: str  # the recommended row
    answer: Answer  # all rows
    validation: pd.Series  # by row, of its training domains
    domains: pd.DataFrame  # accuracy, zero, balanced, answer, validation and seeds of the recommended row by domain
    by_training_domains: pd.DataFrame  # accuracy of the recommended row: number of training domains x domain
    by_training_images: pd.DataFrame  # of rows that differ in --holdout-fraction alone: number of images x domain
    zero: float  # mean accuracy of the training images' most frequent class on the same domains, or else of guessing

    @property
    def metric(self) -> str:
        """The score in words."""
        return METRICS[self.runs[0].metric]

    @property
    def best(self) -> Any:
        """The line of the recommended row in `Answer.rows`."""
        return self.answer.rows.loc[self.row]

    @property
    def zero_in_words(self) -> str:
        """What reaches `zero`."""
        names = sorted({str(name) for run in self.runs if (name := run.args.get("most_frequent_class")) is not None})
        named = f" ({' or '.join(names)})" if names else ""
        source = f"the most frequent class of the training images{named}"
        source = "guessing" if self.domains.zero.isna().all() else source
        return f"{source} gives {percent(self.zero)}%"


def new_site(runs: Sequence[FinishedRun], split: SplitName | None = None) -> NewSite:
    """Computes what runs on one data set predict for a new site. Runs that hold out no domain are left out.

    Scores are on a part of held-out domains, by default `Record.reported_split`.

    `answer.recommend` chooses the row. Of rows that differ in --holdout-fraction alone, that with the most domains, and
    then training images, takes part.

    Raises:
        RecordError: The runs have different data, or no row held out two domains.
    """
    runs = [run for run in runs if run.test_domains]
    _check_same_data(runs)
    observed = observed_scores(runs, split).rename(columns={"row": "variant"})
    fraction = observed.variant.astype(str).str.replace(", holdout_fraction=[^, ]+", "", regex=True)
    observed["row"] = fraction.where(observed.images.notna(), observed.variant)
    every = counted_scores(observed)
    sizes = every.groupby(["row", "variant"]).agg(domains=("domain", "nunique"), images=("images", "mean"))
    largest = sizes.sort_values(["domains", "images"]).reset_index().groupby("row").variant.last()
    counted = every[every.variant.isin(largest)]
    accuracies = _by_domain(counted, "row").drop(index=ZERO, errors="ignore")
    if len(counted) and accuracies.empty:
        raise RecordError(f"rows=[{ZERO!r}]: none was trained; add one, such as dense")
    if not accuracies.count(axis="columns").max() >= 2:  # NaN without any held-out domain
        names = ", ".join(map(repr, observed.domain.unique())) or "none that a run was not trained on"
        reason = "too few to show what to expect at a new site, because one domain stands for itself alone"
        raise RecordError(f"held-out domains={names}: {reason}; hold out each domain in turn: timm-moe-dg sweep")
    costs = costs_of(runs) if len(accuracies) > 1 else {}
    costs |= {row: costs[variant] for row, variant in largest.items() if variant in costs}
    found = answer(with_zero(counted), costs, metric=METRICS[runs[0].metric])
    row = found.recommended
    if row == ZERO:
        row = complete_rows(accuracies).mean(axis="columns").idxmax()
    of_row = counted[counted.row == row].groupby("domain")
    zero = of_row.zero.mean().mean()
    if isnan(zero):
        zero = 1 / (runs[0].args.get("num_classes") or inf)
    domains = of_row[["accuracy", "zero", "balanced", "answer", "validation"]].mean()
    domains = domains.assign(seeds=of_row.seed.nunique()).sort_values("accuracy")
    validation = _by_domain(counted, "row", "validation").mean(axis="columns")
    by_domains = _by_domain(observed[observed.variant == largest[row]], "trained").dropna()
    of_sizes = every[every.row == row].dropna(subset="images")
    sizes = of_sizes.groupby("variant").images.transform("mean").round()
    by_images = _by_domain(of_sizes.assign(images=sizes), "images").dropna()
    return NewSite(runs, row, found, validation, domains, by_domains, by_images, zero)


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


def _by_domain(observed: pd.DataFrame, name: str, value: str = "accuracy") -> pd.DataFrame:
    return observed.groupby([name, "domain"])[value].mean().unstack("domain")


def recommendation(site: NewSite) -> str:
    """Recommends in one sentence. The first rule that applies decides.

    1. The mean is hardly above the training images' most frequent class (`above`): do not deploy.
    2. Fewer than `LEAST_DOMAINS` domains were held out: hold out more before deciding.
    3. The interval begins at or below that of rule 1: test on labeled images of each new site first.
    4. Otherwise: deploy where the lower end of the interval is enough.
    """
    best, least = site.best, above(site.zero)
    zero = f", and {site.zero_in_words}" if site.zero else ""
    if best["mean"] <= least:
        learnt = "it has learnt nothing beyond it" if best["mean"] <= site.zero else "it has learnt hardly more"
        advice = f"do not deploy it, because it reaches {percent(best['mean'])}% on held-out domains{zero}: {learnt}"
    elif isnan(best.low):
        advice = f"hold out at least {LEAST_DOMAINS} domains before you decide, because these are {len(site.domains)}"
    elif best.low <= least:
        advice = f"test it on labeled images of each new site first, because {percent(best.low)}% is possible{zero}"
    else:
        article = "a" if site.metric == "balanced accuracy" else "an"
        advice = f"deploy it if {article} {site.metric} of {percent(best.low)}% is enough at a new site"
    return f"{site.row}: {advice}."


def sentences(site: NewSite) -> list[str]:
    """Describes the numbers behind the recommendation, and how rows compare if there are several."""
    best, number = site.best, len(site.domains)
    interval = f"none, because {number} held-out domains are fewer than {LEAST_DOMAINS}"
    if isfinite(best.low):
        interval = f"{percent(best.low)} to {percent(best.high)}%"
    validation = site.validation[site.row]
    gap = f"a gap of {percent(validation - best['mean'], sign='+')} points to held-out {site.metric}"
    gap = f"{percent(validation)}%, {gap}" if isfinite(validation) else "unknown, without images"
    lines = [
        f"{site.metric.capitalize()} to expect at a new site (data set {site.runs[0].dataset}): "
        f"{percent(best['mean'])}%, the mean over {number} held-out domains with {_seeds(site.domains.seeds)}.",
        f"95% prediction interval for one new site: {interval}.",
        *([f"To compare with: {site.zero_in_words} on the same domains."] if site.zero else []),
        *_by_class(site),
        f"Worst held-out domain: {best.worst_domain}, {percent(best.worst)}%.",
        f"Validation {site.metric} on the training domains: {gap}.",
        *_what_helps(site),
    ]
    if site.answer.pairs.empty:
        return [*lines, "Other rows: none, so these runs compare no models."]
    return [*lines, *site.answer.verdict, *NOTES]


def _seeds(numbers: pd.Series) -> str:
    least, most = numbers.min(), numbers.max()
    return f"{most if least == most else f'{least} to {most}'} trial seed{'' if most == 1 else 's'}"


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
    domains = site.domains.reset_index()
    texts = pd.DataFrame({"held-out domain": domains.domain, site.metric: domains.accuracy.map(percent)})
    texts["most frequent class"] = domains.zero.map(percent)
    if site.runs[0].metric == "accuracy" and domains.balanced.notna().any():
        texts["balanced"] = domains.balanced.map(percent)
    texts["validation"], texts["seeds"] = domains.validation.map(percent), domains.seeds.map(str)
    tables = {f"Held-out domains of {site.row}, the worst first": texts}
    if site.answer.pairs.empty:
        return tables
    return {
        rows_title(site.answer): row_texts(site.answer),
        pairs_title(site.answer): pair_texts(site.answer),
        **tables,
    }


def render_site(site: NewSite, format_: str) -> str:
    """Formats sentences and tables in a format of `FORMATS`."""
    prefix = {"text": "", "markdown": "- ", "latex": "% "}[format_]
    lines = [prefix + FORMATS[format_](line) for line in (recommendation(site), *sentences(site))]
    parts = [formatted(title, texts, format_) for title, texts in site_tables(site).items()]
    return "\n\n".join(["\n".join(lines), *parts])


def site_frame(site: NewSite) -> pd.DataFrame:
    """Returns the numbers of each row for other programs, in percent and points."""
    frame = answer_frame(site.answer)
    validation = (100 * frame.row.map(site.validation)).round(6)
    return frame.assign(validation=validation, dataset=site.runs[0].dataset, recommendation=recommendation(site))
