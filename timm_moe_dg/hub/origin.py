"""Origin of published weights: their starting point, and the records of their training."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import timm
from timm.models import parse_model_name

from ..cli.arguments import option_words
from ..cli.text import code, markdown, one_line
from ..protocols.options import Arguments
from ..protocols.records import Record
from ..protocols.run_identity import changed_options
from ..protocols.selection import training_domain_validation


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
