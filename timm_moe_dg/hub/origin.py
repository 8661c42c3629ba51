"""Where published weights come from: what they started as, and what training them measured."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import timm
from timm.models import parse_model_name

from ..cli.arguments import option_words
from ..protocols import Record, training_domain_validation
from ..protocols.options import NOT_IDENTITY
from ..results.runs import domain_names


class DomainResult(NamedTuple):
    """Accuracy of the published weights on one domain.

    Attributes:
        domain: Its name, or its position where the records do not know it.
        held_out: Whether it took no part in training.
        inside: Share of right answers on the in-split; NaN where that is empty.
        outside: Likewise on the out-split.
    """

    domain: str
    held_out: bool
    inside: float
    outside: float


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
    def args(self) -> Mapping[str, Any]:
        """Options of the run."""
        return self.selected.args

    def domain_results(self) -> list[DomainResult]:
        """Returns what the selected evaluation measured, one row a domain."""
        record = self.selected
        names = domain_names([record])
        held_out = [position in record.test_domains for position in range(len(names))]
        return [DomainResult(*row) for row in zip(names, held_out, record.in_acc, record.out_acc, strict=True)]


def origin_of_run(records: Sequence[Record]) -> Origin:
    """Reads from a run's options what its network began as."""
    args = training_domain_validation(records).args
    if args.get("initial_checkpoint"):
        return Origin(f"the file `{os.path.basename(args['initial_checkpoint'])}`", records=records)
    if not args.get("pretrained"):
        return Origin("random initialization", records=records)
    base_model = published_source(args["model"], args.get("model_kwargs"))
    start = hub_link(base_model) if base_model else "a network of an earlier run"
    return Origin(start, base_model, records=records)


def published_source(model: str, model_kwargs: Mapping[str, Any] | None = None) -> str | None:
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
    return f"[{repository}](https://huggingface.co/{repository})"


def training_command(args: Mapping[str, Any], width: int = 100) -> str:
    """Writes the command that repeats a run, every option spelled out, broken into lines that a shell joins.

    Args:
        args: The run's options; a folder of images is given as DATA.
        width: Length at which a line ends.
    """
    unsaid = NOT_IDENTITY - {"data_dir"} | {"test_envs", "domains"}
    given = {name: value for name, value in args.items() if name not in unsaid and value not in (None, [], {})}
    known = without_local_paths(given) | ({"data_dir": "DATA"} if "data_dir" in given else {})
    groups = [
        option_words(f"--{name.replace('_', '-')}", value, name == "model_kwargs") for name, value in known.items()
    ]
    lines = ["accelerate launch tools/finetune.py"]
    for group in filter(None, groups):
        words = shlex.join(group)
        if len(lines[-1]) + len(words) < width:
            lines[-1] += f" {words}"
        else:
            lines.append(f"    {words}")
    return " \\\n".join(lines)


def without_local_paths(args: Mapping[str, Any]) -> dict[str, Any]:
    """Shortens absolute paths among a run's options to their last part: nobody else has these folders."""
    return {name: _shortened(value) if isinstance(value, str) else value for name, value in args.items()}


def _shortened(value: str) -> str:
    scheme, separator, path = value.rpartition(":")
    return f"{scheme}{separator}{Path(path).name}" if os.path.isabs(path) else value
