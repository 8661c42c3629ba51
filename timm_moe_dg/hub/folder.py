"""The folder that is uploaded: weights, configuration, card, and the records of a run."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import cast

from timm.data.model_config import resolve_input_data_config
from torch import nn

from ..data.readers.folders import is_hidden
from ..errors import ArgumentError, CheckpointError
from ..networks.build import CONFIG, DataConfig, read_config, refuse_ensemble, save_network
from ..networks.calibration import CALIBRATION
from ..networks.trained import label_names, load_trained
from ..protocols.records import read_records
from .origin import Origin, origin_of_run, without_local_paths

WEIGHTS = "model.safetensors"
FIGURES = "figures"  # where tools/visualize.py draws by default
_SATCLIP = "satclip:"
_logger = logging.getLogger(__name__)


def fill_from_run(folder: Path, run: Path, with_report: bool = False) -> Origin:
    """Copies best/, results.jsonl and the figures of a finished run to an empty folder. Returns the weights' origin.

    Local paths in results.jsonl are shortened. report.html shows images of the data, so it needs `with_report`. A link
    among the files to publish is an `ArgumentError`.
    """
    refuse_ensemble(run / "best")
    needed = ("done", "results.jsonl", f"best/{CONFIG}", f"best/{WEIGHTS}")
    missing = [name for name in needed if not (run / name).is_file()]
    if missing:
        remedy = f"is not a finished run, {', '.join(missing)} missing; give an output folder of tools/finetune.py"
        raise ArgumentError.of("run", str(run), remedy)
    origin = origin_of_run(read_records(run / "results.jsonl"))
    pages = (*_pictures(run), *(run.glob("report.html") if with_report else ()))
    figures = _pictures(run / FIGURES)
    # A link may lead to any file of this machine, and the upload would publish that file.
    published = (*(run / name for name in ("best", FIGURES, *needed, f"best/{CALIBRATION}")), *pages, *figures)
    if links := [str(path.relative_to(run)) for path in published if path.is_symlink()]:
        remedy = f"{', '.join(links)} is a link, and its target would be published; replace it by the file itself"
        raise ArgumentError.of("run", str(run), remedy)
    written = (run / "best" / WEIGHTS).stat().st_mtime
    if older := [str(path.relative_to(run)) for path in (*pages, *figures) if path.stat().st_mtime < written]:
        _logger.warning(
            f"{', '.join(older)}: older than the network in best/, and perhaps of another; write them again"
        )
    calibration = run / "best" / CALIBRATION
    for path in (
        run / "best" / CONFIG,
        run / "best" / WEIGHTS,
        *([calibration] if calibration.is_file() else []),
        *pages,
    ):
        shutil.copyfile(path, folder / path.name)
    for path in figures:
        (folder / FIGURES).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / FIGURES / path.name)
    rows = map(json.loads, (run / "results.jsonl").read_text().splitlines())
    lines = [json.dumps({**row, "args": without_local_paths(row["args"])}, sort_keys=True) for row in rows]
    (folder / "results.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return origin


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.png") if not is_hidden(path.name))


def fill_from_network(folder: Path, network: nn.Module) -> None:
    """Writes a timm model with its class names and its preprocessing. The folder is created if needed."""
    config = cast(DataConfig, resolve_input_data_config(network))  # the preprocessing of training, crop included
    save_network(network, folder, classes=label_names(network) or (), config=config)


def load_folder(folder: Path) -> nn.Module:
    """Loads the model in a folder, and refuses a model that could not be used after a download."""
    network = load_trained(f"local-dir:{folder}")
    config = read_config(folder / CONFIG)
    names = config.get("label_names") or ()
    if names and len(names) != network.num_classes:
        raise CheckpointError(
            f"label_names={len(names)} names in {CONFIG}: the classifier has {network.num_classes} classes; "
            "give the names of the classes that these weights were trained on"
        )
    encoder = str(config.get("model_args", {}).get("metadata_encoder", ""))
    if encoder.startswith(_SATCLIP) and os.path.exists(encoder.removeprefix(_SATCLIP)):
        raise CheckpointError(
            f"metadata_encoder={encoder!r}: is a local file, so nobody else could load the model; "
            f"train with {_SATCLIP}OWNER/NAME, a repository of the Hub"
        )
    return network
