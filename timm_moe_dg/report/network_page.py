"""The sections of a run's page that need its network and its data."""

from functools import partial
from pathlib import Path

from ..analysis.run_view import open_run
from ..analysis.score_plots import plot_confusion, plot_reliability
from .model_pictures import experts_note, model_pictures
from .network_facts import NetworkFacts, Reading, ask
from .pictures import Missing, attempt, inlined
from .run_facts import RunFacts


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
