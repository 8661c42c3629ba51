"""The accuracy to expect at a new site in words and tables, for pages and terminals."""

from collections import Counter
from math import isfinite, isnan

import pandas as pd

from .comparison import sign_flip_p
from .new_site import LEAST_DOMAINS, NewSite
from .rendering import FORMATS, formatted


def percent(share: float, digits: int = 1, sign: str = "") -> str:
    """Formats a share in percent, and a missing value as a dash. The sign "+" is that of differences."""
    return f"{100 * share:{sign}.{digits}f}" if isfinite(share) else "-"


def near_chance(num_classes: int) -> float:
    """Returns an accuracy that is hardly above guessing: by five points, or by half of chance if that is less."""
    return 1 / num_classes + min(0.05, 0.5 / num_classes)


def recommendation(site: NewSite) -> str:
    """Recommends in one sentence. The first rule that applies decides.

    1. The mean is hardly above guessing (`near_chance`): do not deploy.
    2. Fewer than `LEAST_DOMAINS` domains were held out: hold out more before deciding.
    3. The interval begins at or below that of rule 1: test on labeled images of each new site first.
    4. Otherwise: deploy where the lower end of the interval is enough.
    """
    best, classes = site.rows.iloc[0], site.runs[0].args.get("num_classes")
    chance, guessing = (near_chance(classes), f", and guessing gives {percent(1 / classes)}%") if classes else (0.0, "")
    if best.accuracy <= chance:
        advice = f"do not deploy it, because it reaches {percent(best.accuracy)}% on held-out domains{guessing}"
    elif isnan(best.low):
        advice = f"hold out at least {LEAST_DOMAINS} domains before you decide, because these are {best.domains}"
    elif best.low <= chance:
        advice = f"test it on labeled images of each new site first, because {percent(best.low)}% is possible{guessing}"
    else:
        advice = f"deploy it if an accuracy of {percent(best.low)}% is enough at a new site"
    return f"{best.row}: {advice}."


def sentences(site: NewSite) -> list[str]:
    """Describes the numbers behind the recommendation."""
    best, *others = site.rows.itertuples()
    interval = f"none, because {best.domains} held-out domains are fewer than {LEAST_DOMAINS}"
    if isfinite(best.low):
        interval = f"{percent(best.low)} to {percent(best.high)}%{', clipped to 0 to 100%' if best.clipped else ''}"
    gap = f"{percent(best.validation)}%, a gap of {percent(best.gap, sign='+')} points to held-out accuracy"
    lines = [
        f"Accuracy to expect at a new site (data set {site.runs[0].dataset}): {percent(best.accuracy)}%, the mean over "
        f"{best.domains} held-out domains with {best.seeds} trial seed{'' if best.seeds == 1 else 's'}.",
        f"95% prediction interval for one new site: {interval}.",
        f"Worst held-out domain: {best.worst_domain}, {percent(best.worst)}%.",
        f"Validation accuracy on the training domains: {gap if isfinite(best.gap) else 'unknown, without images'}.",
        *_what_helps(site),
    ]
    if not others:
        return [*lines, "Other rows: none, so these runs compare no models."]
    counts = Counter(row.comparison.partition(":")[0] for row in others)
    compared = ", ".join(f"{words} ({number})" for words, number in counts.items())
    chosen = "Mean accuracy if the row is chosen anew without the domain that it is tested on"
    test = "two-sided sign-flip test over pairs of equal domain and seed (Holm's correction), and over domains alone"
    compared = f"Other rows against the recommended one: {compared}."
    return [*lines, compared, f"{chosen}: {percent(site.nested)}%.", f"p: {test}."]


def _what_helps(site: NewSite) -> list[str]:
    args = site.runs[0].args
    domains = "sweep with --protocols leave_one_domain_out_cv, which also holds out pairs of domains"
    fraction = (1 + args.get("holdout_fraction", 0.2)) / 2
    images = f"sweep into another folder with -- --holdout-fraction {fraction:g}, and give both folders"
    if any(
        role == "train" and split in ("official", "photograph") for role, _, split in args.get("domain_facts") or ()
    ):
        images = "no option changes their number, because the split of these data is fixed"
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
        line = {"row": str(row.row), "compared": row.comparison, "accuracy": percent(row.accuracy)}
        line |= {"95% interval": f"{percent(row.low)} to {percent(row.high)}"} if isfinite(row.low) else {}
        line |= {"worst domain": f"{row.worst_domain}, {percent(row.worst)}", "gap": percent(row.gap, sign="+")}
        if isfinite(row.p):
            line |= {"difference": percent(row.difference, sign="+")}
            line |= {"better in": f"{row.better_in:.0f} of {row.paired:.0f}", "pairs": f"{row.pairs:.0f}"}
            line |= {"p, pairs": f"{row.p:.2g}", "p, domains": f"{row.p_domains:.2g}"}
        compared.append(line)
    texts = pd.DataFrame({"held-out domain": domains.domain, "accuracy": domains.accuracy.map(percent)})
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
