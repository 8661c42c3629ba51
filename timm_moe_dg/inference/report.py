"""HTML report of a run or a sweep: one file without a script, with tables, curves, routing and pictures.

A page is a list of sections, and a section a list of blocks. report.html renders and escapes them.
"""

import base64
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from math import isfinite, isnan
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
import pandas as pd

from ..analysis.geography import draw_domains, is_geographic
from ..analysis.maps import draw_attention, draw_experts
from ..analysis.plots import plot_accuracies, plot_learning_curves
from ..analysis.run_view import RunView, open_run
from ..cli.values import LOCAL
from ..comparisons.jobs import Job, tail
from ..data import EvaluationImages, Split, get_benchmark
from ..data.splits import make_splits
from ..errors import ArgumentError, DataError, MoeDgError, RecordError
from ..hub.folder import training_command
from ..metrics import METRICS
from ..networks.calibration import find_calibration
from ..networks.trained import match_classes, takes_metadata
from ..protocols.evaluation import Scores, collect_outputs, unseen_domains
from ..protocols.records import SCORED_ROLES, read_records
from ..protocols.selection import (
    FEW,
    counted,
    headlines,
    one_answer_of,
    training_domain_validation,
    validation_score,
)
from ..results.answer import above, percent
from ..results.comparison import row_texts
from ..results.new_site import new_site, recommendation, sentences, site_tables
from ..results.runs import RESULTS, FinishedRun, domain_names, find_runs, validation_of_most_frequent
from ..results.tables import OPTIONAL_COLUMNS, make_tables
from ..storage.files import write_text
from .evaluated import Evaluated, plot_confusion, plot_reliability


class ReportSettings(NamedTuple):
    """How the network of a run is evaluated for its report."""

    data_dir: str | None = None  # None for the folder that the run used
    device: str = "cpu"
    batch_size: int = 64
    workers: int = 0  # loader processes
    max_images: int = 1000  # largest number for each domain


class Captioned(NamedTuple):
    """A table of texts with its caption; the first column names the rows."""

    caption: str
    frame: pd.DataFrame


class Picture(NamedTuple):
    """A picture inside the page, as a data URI with its caption."""

    uri: str
    caption: str


Block = str | list[str] | Captioned | Picture  # a paragraph, a list, a table, or a picture


def report(folder: Path, output: Path, settings: ReportSettings) -> None:
    """Writes the page of a run, or of a sweep if the folder holds runs.

    Raises:
        ArgumentError: The folder holds neither a run nor a sweep, or the run has no evaluation yet.
        RecordError: The records of a finished run are damaged.
    """
    is_run = (folder / RESULTS).is_file()
    runs, unfinished = ([read_run(folder)], []) if is_run else find_runs([folder])
    if not (runs or unfinished):
        remedy = f"holds no run ({RESULTS} is missing here and below); give a folder of finetune.py or sweep.py"
        raise ArgumentError.of("folder", str(folder), remedy)
    name = folder.resolve().name
    title = f"{runs[0].model} on {runs[0].dataset}" if is_run else f"Sweep {name}"
    # Runs of two sweeps may have one name
    names = {run.folder: name if is_run else str(run.folder.relative_to(folder)) for run in runs}
    sections: dict[str, list[Block]] = {
        "At a new site": _sites(runs) if runs else ["No run is finished yet."],
        "Warnings": [_warnings(runs, unfinished, names)],
        "Results": attempt(lambda: _results(runs)),
        **(_network_sections(folder, settings) if is_run else {}),
        "Runs": [Captioned("Selected by training-domain validation, percent", _run_rows(runs, unfinished, names))],
    }
    if is_run:
        curves = drawn(lambda path: plot_learning_curves(runs[0].records, domain_names(runs[0].records), path), "")
        sections |= {"Learning curves": curves, "Command": [training_command(runs[0].args, width=88)]}
    write_text(output, render(title, f"Folder {name}", sections))


def render(title: str, subtitle: str, sections: dict[str, list[Block]]) -> str:
    """Fills the template. All texts are escaped, because names of classes and domains are those of anybody's files."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(title=title, subtitle=subtitle, sections=sections)


def attempt(make: Callable[[], list[Block]]) -> list[Block]:
    """The blocks that a function makes, or the reason why it cannot, so that the rest of the page is written."""
    try:
        return make()
    except (MoeDgError, OSError) as error:
        return [str(error)]


def drawn(draw: Callable[[Path], object], caption: str, name: str = "picture.png") -> list[Block]:
    """The picture that `draw` writes to a path with this name, or the reason why there is none."""

    def make() -> list[Block]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            draw(path)
            uri = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        return [Picture(uri, caption)]

    return attempt(make)


def read_run(folder: Path) -> FinishedRun:
    """Reads a run, finished or not. The last line of an unfinished run may be incomplete."""
    records = read_records(folder / RESULTS, unfinished=not _job(folder).is_finished)
    if not records:
        raise ArgumentError.of("run", str(folder), "has no evaluation yet; wait for the first one")
    return FinishedRun(folder, records)


def _job(folder: Path) -> Job:
    resolved = folder.resolve()  # "." has no name, and the log is named after the run
    return Job(resolved.name, (), folder, resolved.parent / "logs" / f"{resolved.name}.log")


def _warnings(runs: Sequence[FinishedRun], unfinished: Sequence[Path], names: Mapping[Path, str]) -> list[str]:
    """What a reader should know beside the numbers, with the names of the runs that a warning is about."""
    by_text: dict[str, list[str]] = defaultdict(list)
    for folder in unfinished:
        by_text["Not finished, and left out of the tables"].append(folder.name)
    for run in runs:
        for text in cautions(run):
            by_text[text].append(names[run.folder])
    if len({run.seeds[0] for run in runs}) == 1:
        by_text["All results are of one trial seed, so no difference can be told from chance"] = []
    listed = {text: ", ".join([*of[:5], *(["..."] if len(of) > 5 else [])]) for text, of in by_text.items()}
    return [f"{text}: {of}" if of and len(names) + len(unfinished) > 1 else text for text, of in listed.items()]


def cautions(run: FinishedRun) -> list[str]:
    """What a reader should know beside the numbers of a run."""
    texts, first, classes, job = [], run.records[0], run.args.get("num_classes"), _job(run.folder)
    if not job.is_finished:
        texts.append(f"Not finished ({job.state()}), so the numbers will change")
        # The log of a run that diverges ends with this error
        lines = tail(job.log).splitlines() if job.log.is_file() else []
        texts += [f"Diverged ({line.strip()})" for line in lines if "DivergenceError" in line][-1:]
    if not all(isfinite(loss) for record in run.records for loss in record.losses.values()):
        texts.append("Diverged, since losses are not finite")
    selected = training_domain_validation(run.records)
    score = validation_score(selected)
    zero, name = validation_of_most_frequent(first), "the most frequent class"
    if isnan(zero):
        zero, name = 1 / classes if classes else 0.0, "guessing"
    if zero and not score > above(zero):  # NaN counts too
        texts.append(f"Selection is hardly above {name} ({percent(zero)}%), so its step means little")
    texts += [answer.capitalize()] if (answer := one_answer_of(selected)) else []
    validated = first.images(first.training_domains, "out")
    if validated is not None and validated < FEW:
        texts.append(f"Selection rests on {validated} validation images of the training domains")
    return texts


def _sites(runs: Sequence[FinishedRun]) -> list[Block]:
    """The accuracy to expect at a new site, for each data set."""
    blocks: list[Block] = []
    for _, of_data in groupby(sorted(runs, key=lambda run: run.dataset), key=lambda run: run.dataset):
        blocks += attempt(partial(_site, list(of_data)))
    return blocks


def _site(runs: Sequence[FinishedRun]) -> list[Block]:
    site = new_site(runs)
    return [recommendation(site), sentences(site), *(Captioned(*item) for item in site_tables(site).items())]


def _results(runs: Sequence[FinishedRun]) -> list[Block]:
    """The tables by selection rule with the papers' figures, and as bars if there are several runs."""
    tables = make_tables(runs, further=[OPTIONAL_COLUMNS["validation"]])
    if not tables:
        raise RecordError(f"runs={len(runs)} finished: not enough for a table of any selection rule")
    blocks: list[Block] = drawn(lambda path: plot_accuracies(tables, path), "") if len(runs) > 1 else []
    for table in tables:
        texts = row_texts(table, papers=True)
        blocks.append(Captioned(table.title, texts.loc[:, (texts != "missing").any()]))
        if table.missing:
            blocks += ["Missing runs:", list(table.missing)]
    return blocks


def _run_rows(runs: Sequence[FinishedRun], unfinished: Sequence[Path], names: Mapping[Path, str]) -> pd.DataFrame:
    rows: list[dict[str, object]] = []
    for run in runs:
        record = training_domain_validation(run.records)
        headline, validated = headlines(record)[0], record.images(record.training_domains, "out")
        reported = percent(headline.value) + headline.counted if run.test_domains else "-"
        validation = percent(validation_score(record)) + counted(validated)
        row = {"run": names[run.folder], "state": _job(run.folder).state(), "selected step": record.step}
        rows.append({**row, "score": METRICS[record.metric], "validation": validation, "reported": reported})
    for folder in unfinished:
        job = _job(folder)
        rows.append({"run": job.name, "state": f"{job.state()}, {job.progress()}"})
    return pd.DataFrame(rows).astype(object).fillna("-")


def _network_sections(folder: Path, settings: ReportSettings) -> dict[str, list[Block]]:
    """Scores and routing of the selected network on images that it was not trained on, and pictures of it."""
    try:
        view = open_run(folder, settings.device, settings.batch_size, data_dir=settings.data_dir)
    except (MoeDgError, OSError) as error:
        return {"The selected network": [str(error)]}

    def picture(draw: Callable[..., object], file: str, caption: str, **options: object) -> list[Block]:
        return drawn(lambda path: draw(view, path.parent, **options), caption, file)

    pictures: list[Block] = [f"{type(view.model).__name__} is a dense model without experts."]
    if any(hasattr(module, "record_routing") for module in view.model.modules()):
        caption = "The first expert of each patch, or of each image, in the last block with experts."
        pictures = picture(draw_experts, "experts.png", caption)
    with suppress(MoeDgError, OSError):  # without its data
        # One map is enough for a page, of "id" images if the data has some
        for role in [role for role in SCORED_ROLES if is_geographic(view, role)][:1]:
            caption = "The routed expert with the largest weight at each place."
            pictures += picture(draw_domains, "map.png", caption, role=role)
    caption = "Attention of the class token in the last block, by head."
    pictures += picture(draw_attention, "attention.png", caption, columns=2)
    return {"The network on new images": attempt(lambda: _scores(view, settings)), "Experts and attention": pictures}


def _scores(view: RunView, settings: ReportSettings) -> list[Block]:
    evaluated = evaluate_network(view, settings)
    tested = evaluated.test_domains
    names = [domain.name + " (tested)" * (index in tested) for index, domain in enumerate(evaluated.domains)]
    scores = pd.DataFrame(evaluated.assessment.domains, columns=Scores._fields)
    texts = scores.drop(columns="images").dropna(axis=1, how="all").map(percent)
    texts.columns = texts.columns.str.replace("_", " ")
    texts.insert(0, "images", scores.images.map(str))
    texts.insert(0, "domain", names)
    title = f"{evaluated.model}\n{evaluated.counted_name}"
    return [
        Captioned("Scores by domain, in percent", texts),
        *drawn(lambda path: plot_confusion(evaluated.confusion, evaluated.classes, path, title), "Confusions."),
        *drawn(lambda path: plot_reliability(evaluated.calibration_groups, path), "Below the line: overconfident."),
    ]


def evaluate_network(view: RunView, settings: ReportSettings) -> Evaluated:
    """Evaluates the network on the reported part of held-out domains and on out-splits of the others."""
    tested, most = list(view.args["test_domains"]), settings.max_images
    args = {**view.args, **({"data_dir": view.data_dir} if view.data_dir else {})}
    training = [index for index in range(len(view.domains)) if index not in tested]
    splits = make_splits(view.domains, training, args)
    for index, split in enumerate(splits):
        inside, outside = (most, 0) if index in tested else (0, most)
        if index in tested and get_benchmark(view.args["dataset"]).reported_split(view.domains) == "whole":
            split = Split(np.sort(np.concatenate([split.inside, split.outside])), split.outside)
        splits[index] = Split(_sample(split.inside, inside), _sample(split.outside, outside))
    if not any(len(split.inside) + len(split.outside) for split in splits):
        raise DataError(f"dataset={view.args['dataset']!r}: has no image that the network was not trained on")
    domains, parts, positions = match_classes(view.model, view.domains, splits)
    with_metadata = takes_metadata(view.model, domains, view.columns)
    new_images = EvaluationImages(domains, parts, view.transform, with_metadata=with_metadata)
    calibration = find_calibration(f"{LOCAL}{view.folder / 'best'}", view.model)
    temperature = calibration.temperature if calibration else 1.0
    batches = view.evaluation_batches(new_images, settings.workers)
    outputs = collect_outputs(view.model, batches, positions, temperature=temperature)
    # Held-out domains with images, first those that are not "id", or else all domains
    present = set((outputs.group // 2).tolist())
    choices = (unseen_domains(domains, tested), tested, range(len(domains)))
    scored = next(filter(None, ([index for index in choice if index in present] for choice in choices)))
    return Evaluated(view.name, new_images, outputs, tested, scored)


def _sample(positions: np.ndarray, most: int) -> np.ndarray:
    # A fixed seed gives the same images each time. Sorted positions keep the order of the data.
    return positions[np.sort(np.random.default_rng(0).permutation(len(positions))[:most])]
