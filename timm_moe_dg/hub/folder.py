"""The folder that goes to the Hub: weights, configuration and card, and what a run recorded."""

import json
import os
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import cast

from timm.data.model_config import resolve_input_data_config
from torch import nn

from ..errors import ArgumentError, CheckpointError
from ..networks.build import CONFIG, DataConfig, save_network
from ..networks.trained import label_names, load_trained
from ..protocols import read_records
from ..storage.outcome import lost, verify_model
from .config import WEIGHTS, read_config
from .origin import Origin, origin_of_run, without_local_paths

FIGURES = "figures"  # where tools/visualize.py draws by default
_SATCLIP = "satclip:"


def fill_from_run(folder: Path, run: Path) -> Origin:
    """Copies a finished run: best/, results.jsonl without this machine's paths, and its figures.

    Args:
        folder: Exists and is empty.
        run: The output folder of tools/finetune.py.

    Returns:
        Where the weights come from.

    Raises:
        ArgumentError: This is no finished run, or what would be published of it is a link.
        CheckpointError: It no longer has what it vouches for.
        RecordError: results.jsonl is damaged.
    """
    needed = ("done", "results.jsonl", f"best/{CONFIG}", f"best/{WEIGHTS}")
    lacking = [name for name in needed if not (run / name).is_file()]
    if lacking:
        remedy = f"is no finished run: it lacks {', '.join(lacking)}; give the folder that tools/finetune.py wrote"
        raise ArgumentError.of("run", str(run), remedy)
    if found := lost(run, "results.jsonl", "best"):
        raise CheckpointError(f"run={str(run)!r}: {found}; only what a run has written is published; run it again")
    verify_model(f"local-dir:{run / 'best'}")
    origin = origin_of_run(read_records(run / "results.jsonl"))
    shown = (*sorted(run.glob("*.png")), *run.glob("report.html"))
    figures = sorted((run / FIGURES).glob("*.png"))
    _refuse_links(run, (run / name for name in ("best", FIGURES, *needed)), shown, figures)
    for path in (run / "best" / CONFIG, run / "best" / WEIGHTS, *shown):
        shutil.copyfile(path, folder / path.name)
    for path in figures:
        (folder / FIGURES).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / FIGURES / path.name)
    rows = map(json.loads, (run / "results.jsonl").read_text().splitlines())
    lines = [json.dumps({**row, "args": without_local_paths(row["args"])}, sort_keys=True) for row in rows]
    (folder / "results.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return origin


def _refuse_links(run: Path, *groups: Iterable[Path]) -> None:
    """A link's target lies anywhere on this machine, and would be published in its place."""
    links = [str(path.relative_to(run)) for path in chain(*groups) if path.is_symlink()]
    if links:
        remedy = f"{', '.join(links)}: is a link, whose target would be published; put the file itself in its place"
        raise ArgumentError.of("run", str(run), remedy)


def fill_from_network(folder: Path, network: nn.Module) -> None:
    """Writes a network with the classes and the preprocessing that it knows.

    Args:
        folder: Created if need be.
        network: A timm model.
    """
    config = cast(DataConfig, resolve_input_data_config(network))  # as the weights were trained, a crop included
    save_network(network, folder, classes=label_names(network) or (), config=config)


def load_folder(folder: Path) -> nn.Module:
    """Loads the model as whoever downloads it will, and refuses what would not work for them.

    Raises:
        CheckpointError: The weights do not fit the configuration, class names included, or need a file of this machine.
    """
    network = load_trained(f"local-dir:{folder}")
    config = read_config(folder)
    names = config.get("label_names") or ()
    if names and len(names) != network.num_classes:
        raise CheckpointError(
            f"label_names={len(names)} names in {CONFIG}, but the classifier has {network.num_classes} classes; "
            "give the names of the classes that these weights were trained for"
        )
    encoder = str(config.get("model_args", {}).get("metadata_encoder", ""))
    if encoder.startswith(_SATCLIP) and os.path.exists(encoder.removeprefix(_SATCLIP)):
        raise CheckpointError(
            f"metadata_encoder={encoder!r}: is a file of this machine, which nobody could load the model without; "
            f"train with {_SATCLIP}OWNER/NAME, a repository of the Hub"
        )
    return network
