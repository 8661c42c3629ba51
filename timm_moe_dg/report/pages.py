"""The page: facts and pictures put into a template of HTML, in which every name is escaped."""

from functools import partial
from math import isfinite
from pathlib import Path

import jinja2

from ..analysis.curves import plot_learning_curves
from ..analysis.run_view import open_run
from ..analysis.score_plots import plot_confusion, plot_reliability
from ..errors import ArgumentError
from ..storage.atomic import write_text
from .model_pictures import experts_note, model_pictures
from .network_facts import NetworkFacts, Reading, ask
from .pictures import Missing, attempt, inlined
from .run_facts import RESULTS, RunFacts, doubts, read_run
from .sweep_facts import SweepFacts, read_sweep

TEMPLATES = Path(__file__).parent / "templates"


def report(folder: Path, output: Path, reading: Reading) -> None:
    """Writes the page of a run, or of a sweep if the folder holds runs.

    Args:
        folder: Of a run or a sweep.
        output: The page's file.
        reading: How a run's network is looked at.

    Raises:
        ArgumentError: The folder is neither, or has no evaluation yet.
        RecordError: A finished run's records are damaged.
        StorageError: The page cannot be written.
    """
    is_run = (folder / RESULTS).is_file()
    write_text(output, run_page(read_run(folder), reading) if is_run else sweep_page(_sweep(folder)))


def _sweep(folder: Path) -> SweepFacts:
    facts = read_sweep(folder) if folder.is_dir() else None
    if facts is None or not (facts.runs or facts.unfinished):
        remedy = f"holds no run ({RESULTS}), nor runs below it; give a folder of tools/finetune.py or tools/sweep.py"
        raise ArgumentError.of("folder", str(folder), remedy)
    return facts


def run_page(facts: RunFacts, reading: Reading) -> str:
    """The page of one run."""
    draw = partial(plot_learning_curves, facts.records, facts.domains)
    curves = inlined(draw, "Losses and accuracies over the training steps")
    sections = network_sections(facts, reading)
    return render("run.html", facts=facts, doubts=doubts(facts), curves=curves, **sections)


def network_sections(facts: RunFacts, reading: Reading) -> dict[str, object]:
    """What the template takes of the network: each entry is there, or says why it is missing.

    Args:
        facts: The run.
        reading: How the network is looked at.
    """
    view = attempt(lambda: open_run(facts.run.folder, reading.device, reading.batch_size))
    if isinstance(view, Missing):
        return {"network": view, "experts": view, "sections": {}, "pictures": []}
    network = attempt(lambda: ask(view, reading))
    sections = {} if isinstance(network, Missing) else _of_answers(network, view.name)
    return {
        "network": network,
        "experts": experts_note(view.model),
        "sections": sections,
        "pictures": model_pictures(view, reading.data_dir),
    }


def _of_answers(network: NetworkFacts, model: str) -> dict[str, object]:
    return {
        "confusion": inlined(partial(_draw_confusion, network, model), "Confusion matrix of the held-out domains"),
        "calibration": inlined(partial(plot_reliability, network.calibration()), "Accuracy against confidence"),
        "mistakes": attempt(network.worst_mistakes),
        "use": network.expert_use(),
    }


def _draw_confusion(network: NetworkFacts, model: str, path: Path) -> None:
    tested = ", ".join(network.domains[at].name for at in network.test_domains)
    plot_confusion(network.confusion(), network.classes, path, f"{model}\n{tested}")


def sweep_page(facts: SweepFacts) -> str:
    """The page of a sweep."""
    return render("sweep.html", facts=facts, doubts=facts.doubts)


def render(template: str, **values: object) -> str:
    """Fills a template; whatever comes from outside is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    environment.tests["missing"] = lambda value: isinstance(value, Missing)
    return environment.get_template(template).render(values)


def percent(share: float, digits: int = 1) -> str:
    """A share in percent; a dash where there is none."""
    return f"{100 * share:.{digits}f}" if isfinite(share) else "-"
