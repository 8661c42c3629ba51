"""The folder that is uploaded: weights, configuration, the records of a run, and the origin of its weights."""

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import timm
from timm.data.model_config import resolve_input_data_config
from timm.models import parse_model_name
from torch import nn

from ..cli.arguments import option_words
from ..cli.text import code, markdown, one_line
from ..data.readers.folders import is_hidden
from ..errors import ArgumentError, CheckpointError
from ..networks.build import CONFIG, WEIGHTS, DataConfig, read_config, refuse_ensemble, save_network
from ..networks.calibration import CALIBRATION
from ..networks.trained import label_names, load_trained
from ..protocols.options import Arguments
from ..protocols.records import Record, read_records
from ..protocols.run_identity import changed_options
from ..protocols.selection import training_domain_validation

FIGURES = "figures"  # where tools/visualize.py draws by default
_SATCLIP = "satclip:"


@dataclass(frozen=True)
class Origin:
    """Origin of weights."""

    start: str  # their starting point in words
    base_model: str | None = None  # Hub repository of the starting point
    upcycled: bool = False  # whether they are an upcycled model without any training
    records: Sequence[Record] = ()  # the evaluations of the run that trained them, if there was one

    @property
    def selected(self) -> Record:
        """The evaluation of these weights: the record that training-domain validation selects."""
        return training_domain_validation(self.records)

    @property
    def args(self) -> Arguments:
        """Options of the run."""
        return self.selected.args


def origin_of_run(records: Sequence[Record]) -> Origin:
    """Determines the starting point of a run from its options."""
    args = training_domain_validation(records).args
    if args.get("initial_checkpoint"):
        return Origin(f"the file {code(os.path.basename(args['initial_checkpoint']))}", records=records)
    if not args.get("pretrained"):
        return Origin("random initialization", records=records)
    base_model = published_source(args["model"], args.get("model_kwargs"))
    start = hub_link(base_model) if base_model else "a network of an earlier run"
    return Origin(start, base_model, records=records)


def published_source(model: str, model_kwargs: Arguments | None = None) -> str | None:
    """Returns the Hub repository of the weights that `pretrained=True` loads, None for a local folder."""
    # A mixture on a backbone has no weights of its own: `pretrained` loads those of the backbone.
    source, name = parse_model_name((model_kwargs or {}).get("backbone", model))
    if source == "hf-hub":
        return name.partition("@")[0]
    cfg = None if source else timm.get_pretrained_cfg(name)
    return cfg.hf_hub_id if cfg else None


def hub_link(repository: str) -> str:
    """Returns a Markdown link to a Hub repository."""
    return f"[{markdown(repository)}](https://huggingface.co/{quote(repository)})"


def training_command(args: Arguments, width: int = 100) -> str:
    """Writes the command that repeats a run, with a backslash at the end of each line but the last.

    Options with their default or a filled-in value are left out. DATA stands for the image folder.
    """
    if "average_method" in args:
        runs, method = map(one_line, args["average_of"]), one_line(args["average_method"]).split()
        return f"timm-moe-dg average {shlex.join(runs)} --method {shlex.join(method)} --output DIR"
    options = without_local_paths(changed_options(args))
    # The folder belongs to another machine, and its name says nothing to a reader.
    options |= {"data_dir": "DATA"} if "data_dir" in options else {}
    precision = f" --mixed_precision {args['mixed_precision']}" if args.get("mixed_precision") else ""
    lines = [f"accelerate launch{precision} -m timm_moe_dg finetune"]
    for words in filter(None, (shlex.join(map(one_line, option_words(*entry))) for entry in options.items())):
        if len(lines[-1]) + len(words) < width:
            lines[-1] += f" {words}"
        else:
            lines.append(f"    {words}")
    return " \\\n".join(lines)


def without_local_paths(args: Arguments) -> dict[str, object]:
    """Shortens absolute paths among a run's options to their last part."""
    patterns = ("group_column",)  # may begin with a slash
    return {name: value if name in patterns else _shortened(value) for name, value in args.items()}


def _shortened(value: Any) -> Any:
    if isinstance(value, Mapping):  # such as model_kwargs with a backbone
        return {name: _shortened(item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    # Also of sources with a scheme, such as "local-dir:/home/...".
    scheme, separator, path = ("", "", value) if os.path.isabs(value) else value.partition(":")
    return f"{scheme}{separator}{Path(path).name}" if os.path.isabs(path) else value


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
    calibration = [path for path in (run / "best" / CALIBRATION,) if path.is_file()]
    for path in (run / "best" / CONFIG, run / "best" / WEIGHTS, *calibration, *pages):
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
