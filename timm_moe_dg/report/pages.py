"""Report pages: facts and pictures in an HTML template that escapes all names."""

from functools import partial
from pathlib import Path

import jinja2

from ..analysis.curves import plot_learning_curves
from ..analysis.run_view import open_run
from ..analysis.score_plots import plot_confusion, plot_reliability
from ..errors import ArgumentError
from ..protocols.selection import FEW, counted, images, worst_groups
from ..results.new_site import new_site, percent, recommendation, sentences, site_tables
from ..storage.files import write_text
from .model_pictures import experts_note, model_pictures
from .network_facts import NetworkFacts, ReportSettings, evaluate_network
from .pictures import Missing, attempt, inlined
from .run_facts import RESULTS, RunFacts, cautions, read_run
from .sweep_facts import read_sweep

TEMPLATES = Path(__file__).parent / "templates"


def report(folder: Path, output: Path, settings: ReportSettings) -> None:
    """Writes the page of a run, or of a sweep if the folder holds runs.

    Raises:
        ArgumentError: The folder holds neither a run nor a sweep, or the run has no evaluation yet.
        RecordError: The records of a finished run are damaged.
    """
    if (folder / RESULTS).is_file():
        page = run_page(read_run(folder), settings)
    else:
        facts = read_sweep(folder) if folder.is_dir() else None
        if facts is None or not (facts.runs or facts.unfinished):
            remedy = f"holds no run ({RESULTS} is missing here and below); give a folder of finetune.py or sweep.py"
            raise ArgumentError.of("folder", str(folder), remedy)
        page = render("sweep.html", facts=facts, cautions=facts.cautions)
    write_text(output, page)


def run_page(facts: RunFacts, settings: ReportSettings) -> str:
    """The page of one run."""
    draw = partial(plot_learning_curves, facts.records, facts.domains)
    curves = inlined(draw, "Losses and accuracies over the training steps")
    site, sections = attempt(lambda: new_site([facts.run])), network_sections(facts, settings)
    return render("run.html", facts=facts, site=site, cautions=cautions(facts), curves=curves, few=FEW, **sections)


def network_sections(facts: RunFacts, settings: ReportSettings) -> dict[str, object]:
    """Variables of the template that need the network. A section that cannot be made is `Missing`."""
    folder, data_dir = facts.run.folder, settings.data_dir
    view = attempt(lambda: open_run(folder, settings.device, settings.batch_size, data_dir=data_dir))
    if isinstance(view, Missing):
        return {"network": view, "experts": view, "sections": {}, "pictures": []}
    # A network without its data still has a page: only the sections that need images are missing.
    network = attempt(lambda: evaluate_network(view, settings))
    sections = {} if isinstance(network, Missing) else _score_sections(network)
    return {
        "network": network,
        "experts": experts_note(view.model),
        "sections": sections,
        "pictures": model_pictures(view),
    }


def _score_sections(network: NetworkFacts) -> dict[str, object]:
    names = ", ".join(network.domains[index].name for index in network.test_domains) or "all domains"
    title = f"{network.model}\n{names}"
    confusion = partial(plot_confusion, network.confusion, network.classes, title=title)
    return {
        "confusion": inlined(
            confusion, f"Confusion matrix of {'the held-out' if network.test_domains else 'all'} domains"
        ),
        "calibration": inlined(partial(plot_reliability, network.calibration()), "Accuracy against confidence"),
        "mistakes": attempt(network.worst_mistakes),
        "use": network.expert_use(),
    }


def render(template: str, **values: object) -> str:
    """Fills a template. All values are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,  # class and domain names are file names of anybody's data
        undefined=jinja2.StrictUndefined,  # a misspelled variable is an error, not an empty string
        trim_blocks=True,
        lstrip_blocks=True,
    )
    words = {function.__name__: function for function in (percent, recommendation, sentences, site_tables)}
    environment.filters |= words | {"counted": counted, "images": images, "worst_groups": worst_groups}
    environment.tests["missing"] = lambda value: isinstance(value, Missing)
    return environment.get_template(template).render(values)
