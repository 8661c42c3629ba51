"""Where published weights come from: what they started as, and what training them measured."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import timm
from timm.models import parse_model_name

from ..cli.arguments import option_words
from ..cli.escape import code, markdown
from ..protocols import Record, training_domain_validation
from ..protocols.options import Arguments
from ..protocols.run_identity import changed_options


@dataclass(frozen=True)
class Origin:
    """Where weights come from.

    Attributes:
        start: What they began as, or are, in words.
        base_model: The Hub repository that they began as; None without one.
        upcycled: Whether they are a plain upcycled model, not trained since.
        records: The evaluations of the run that trained them; empty without a run.
    """

    start: str
    base_model: str | None = None
    upcycled: bool = False
    records: Sequence[Record] = field(default_factory=tuple)

    @property
    def selected(self) -> Record:
        """The evaluation of these weights: the one that training-domain validation picks."""
        return training_domain_validation(self.records)

    @property
    def args(self) -> Arguments:
        """Options of the run."""
        return self.selected.args


def origin_of_run(records: Sequence[Record]) -> Origin:
    """Reads from a run's options what its network began as."""
    args = training_domain_validation(records).args
    if args.get("initial_checkpoint"):
        return Origin(f"the file {code(os.path.basename(args['initial_checkpoint']))}", records=records)
    if not args.get("pretrained"):
        return Origin("random initialization", records=records)
    base_model = published_source(args["model"], args.get("model_kwargs"))
    start = hub_link(base_model) if base_model else "a network of an earlier run"
    return Origin(start, base_model, records=records)


def published_source(model: str, model_kwargs: Arguments | None = None) -> str | None:
    """Returns the Hub repository whose weights `pretrained=True` starts a model from; None for a local folder.

    Args:
        model: As timm names it.
        model_kwargs: Its arguments; a `backbone` among them brings the weights.
    """
    source, name = parse_model_name((model_kwargs or {}).get("backbone", model))
    if source == "hf-hub":
        return name.partition("@")[0]
    cfg = None if source else timm.get_pretrained_cfg(name)
    return cfg.hf_hub_id if cfg else None


def hub_link(repository: str) -> str:
    """Returns a Markdown link to a Hub repository."""
    return f"[{markdown(repository)}](https://huggingface.co/{quote(repository)})"


def training_command(args: Arguments, width: int = 100) -> str:
    """Writes the command that repeats a run, broken into lines that a shell joins.

    Args:
        args: The run's options; those that have their defaults, or were filled in, are left out, and a folder of images
            is given as DATA.
        width: Length at which a line ends.
    """
    options = without_local_paths(changed_options(args))
    options |= {"data_dir": "DATA"} if "data_dir" in options else {}
    groups = [option_words(name, value) for name, value in options.items()]
    lines = ["accelerate launch tools/finetune.py"]
    for group in filter(None, groups):
        words = shlex.join(group)
        if len(lines[-1]) + len(words) < width:
            lines[-1] += f" {words}"
        else:
            lines.append(f"    {words}")
    return " \\\n".join(lines)


def without_local_paths(args: Arguments) -> dict[str, object]:
    """Shortens absolute paths among a run's options to their last part: nobody else has these folders."""
    return {name: _shortened(value) if isinstance(value, str) else value for name, value in args.items()}


def _shortened(value: str) -> str:
    scheme, separator, path = value.rpartition(":")
    return f"{scheme}{separator}{Path(path).name}" if os.path.isabs(path) else value
