"""Exceptions of the package. Every message gives the argument, its value and the next step."""

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import timm
from timm.models import parse_model_name, split_model_name_tag


# Every exception takes a single message, because those of a loader's worker are pickled
class MoeDgError(Exception):
    """Base class of the package's exceptions.

    >>> issubclass(timm_moe_dg.errors.CheckpointError, timm_moe_dg.errors.MoeDgError)
    True
    """


class ArgumentError(MoeDgError, ValueError):
    """An argument has a value that cannot work."""

    @classmethod
    def of(cls, argument: str, value: object, remedy: str) -> Self:
        """Makes the exception from the argument's name, its value and a remedy."""
        return cls(f"{argument}={value!r}: {remedy}")


class OptionError(ArgumentError, TypeError):
    """An option that a model or function does not take; also a TypeError, as timm and Python raise in this case.

    >>> timm.create_model("gmoe_tiny_patch16", num_expert=4)
    Traceback (most recent call last):
    timm_moe_dg.errors.OptionError: num_expert=4: MoeVisionTransformer has no such option; did you mean num_experts?
    """


class RouterError(ArgumentError):
    """A router, top_k, capacity or noise setting that a mixture cannot have."""


class MoeLayersError(ArgumentError):
    """A `moe_layers` that names no block, or a block that the model does not have."""


class MetadataError(ArgumentError):
    """Metadata of the wrong shape, type or range.

    >>> timm.create_model("moge_tiny")(torch.randn(1, 3, 224, 224), torch.tensor([[52.5, 120.4]]))
    Traceback (most recent call last):
    timm_moe_dg.errors.MetadataError: latitude=120...: ... in -90..90 degrees; are longitude and latitude swapped?
    """


class CheckpointError(MoeDgError, RuntimeError):
    """A checkpoint that is damaged, lacks weights, or has weights that do not fit the model."""


class FormatError(MoeDgError, ValueError):
    """A file in the format of another version of the package."""


class StorageError(MoeDgError, OSError):
    """A file that cannot be written, because of a full disk or a missing permission."""


class FolderInUseError(ArgumentError):
    """A run folder that is locked by another process or call."""


class RunInterruptedError(MoeDgError, KeyboardInterrupt):
    """A run that was asked to end by Ctrl-C, an interrupted kernel or SIGTERM, after its checkpoint was written.

    Attributes:
        exit_code: Exit status, as shells report it for a process that the signal ended.
    """

    exit_code = 128 + 2


class DivergenceError(MoeDgError, ArithmeticError):
    """A training run whose loss or weights are no longer finite."""


class ProcessLostError(MoeDgError, RuntimeError):
    """Another process of a run ended, or did not answer in time."""


class DataError(MoeDgError, ValueError):
    """A data folder that is empty, unknown, or inconsistent between domains."""


class ImageReadError(DataError):
    """An image file that cannot be decoded."""


class ProtocolError(ArgumentError):
    """Domains, splits or seeds that leave nothing to train on or to evaluate."""


class MissingDependencyError(MoeDgError, ImportError):
    """A feature whose package is installed by an extra alone."""

    @classmethod
    def of(cls, feature: str, package: str, extra: str) -> Self:
        """Makes the exception from the feature, the missing package and the extra that installs it."""
        return cls(f"{feature} needs {package}, which is not installed: pip install 'timm_moe_dg[{extra}]'")


@contextmanager
def needs(feature: str, package: str, extra: str) -> Iterator[None]:
    """Turns a failed import into a `MissingDependencyError`, see `MissingDependencyError.of`."""
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError.of(feature, package, extra) from error


class RecordError(MoeDgError, ValueError):
    """A line of a results file that is not a record, or records that a selection rule cannot use."""


class HubError(MoeDgError, RuntimeError):
    """A request that the Hub refused, or a Hub that cannot be reached."""


class ExportError(ArgumentError):
    """A model that cannot be exported, or an exported program whose outputs differ from the model's."""


def check_regular_file(path: str | os.PathLike[str]) -> None:
    """Raises an OSError for folders, devices and pipes. A file that does not exist passes."""
    # Opening a named pipe would wait for a writer forever
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file")


def too_many_open_files(error: Exception) -> bool:
    """Whether an error says that the process has too many open files, which is no fault of the file it reads."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def choices(names: Iterable[str]) -> str:
    """Returns the remedy for a name that is not registered: the names that are, and how to register one's own.

    >>> timm_moe_dg.errors.choices(["cosine", "linear"])
    'choose from cosine, linear, or import the module that registers yours: --import MODULE, in Python imports=[...]'
    """
    import_remedy = "import the module that registers yours: --import MODULE, in Python imports=[...]"
    return f"choose from {', '.join(names)}, or {import_remedy}"


def did_you_mean(word: str, names: Iterable[str], count: int = 1) -> str:
    """Returns a question with the names that look most like a misspelled word, or "" if none does.

    >>> timm_moe_dg.errors.did_you_mean("num_expert", ["num_experts", "top_k"])
    'did you mean num_experts?'
    """
    near = difflib.get_close_matches(word, list(names), n=count)
    return f"did you mean {', '.join(near)}?" if near else ""


def check_name(name: str, argument: str = "model", saved: bool = False) -> None:
    """Raises an `ArgumentError`, which lists the nearest names, if there is no such network, tag or kind of source.

    Saved networks bring their weights, and their tag does not matter.
    """
    try:
        source, model = parse_model_name(name)
    except ValueError as error:
        raise ArgumentError.of(argument, name, str(error)) from error
    architecture = split_model_name_tag(model)[0]
    if source is not None:
        return
    if not timm.is_model(architecture):
        remedy = did_you_mean(architecture, timm.list_models(), 5) or "timm.list_models() lists all"
        raise ArgumentError.of(argument, name, f"no such model; {remedy}")
    try:
        timm.get_pretrained_cfg(architecture if saved else model)
    except RuntimeError as error:
        tags = ", ".join(name.partition(".")[2] for name in timm.list_pretrained(f"{architecture}.*")) or "none"
        raise ArgumentError.of(argument, name, f"no such weights; {architecture} has {tags}") from error
