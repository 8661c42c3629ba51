"""Named exceptions: each message gives the argument, its value and the next step.

Every exception takes a single message, so that it survives pickling and the trip out of a data loader's worker.
"""

from typing import Self


class MoeDgError(Exception):
    """Base class of every exception that this package raises on purpose."""


class ArgumentError(MoeDgError, ValueError):
    """An argument has a value that cannot work."""

    @classmethod
    def of(cls, argument: str, value: object, remedy: str) -> Self:
        """Builds the exception from the argument's name, the value it got and what to do about it."""
        return cls(f"{argument}={value!r}: {remedy}")


class OptionError(ArgumentError, TypeError):
    """An option that a network of timm's does not take; also the error which timm itself raises then."""


class RouterError(ArgumentError):
    """A router, top_k, capacity or noise setting that no MoE layer can have."""


class MoeLayersError(ArgumentError):
    """`moe_layers` names blocks that the model does not have, or no block at all."""


class MetadataError(ArgumentError):
    """Metadata of the wrong shape, type or range."""


class CheckpointError(MoeDgError, RuntimeError):
    """A checkpoint lacks weights that the model needs, or holds weights that do not fit."""


class FormatError(MoeDgError, ValueError):
    """What an earlier or a later release wrote down in a form that this one does not read."""


class StorageError(MoeDgError, OSError):
    """A file that cannot be written: the disk is full, or the folder may not be changed."""


class FolderInUseError(ArgumentError):
    """A run folder that another process is writing to."""


class DivergenceError(MoeDgError, ArithmeticError):
    """A training run whose loss or weights are no longer finite."""


class DataError(MoeDgError, ValueError):
    """A data folder that cannot be used: empty, inconsistent between domains, or unknown."""


class ImageReadError(DataError):
    """An image file that cannot be decoded."""


class ProtocolError(ArgumentError):
    """Domains, splits or seeds that leave nothing to train on or to evaluate."""


class MissingDependencyError(MoeDgError, ImportError):
    """A feature needs a package that only an extra installs."""

    @classmethod
    def of(cls, feature: str, package: str, extra: str) -> Self:
        """Builds the exception from the feature asked for, the package it lacks and the extra which brings it."""
        return cls(f"{feature} needs {package}, which is not installed: pip install 'timm_moe_dg[{extra}]'")


class RecordError(MoeDgError, ValueError):
    """A line of a results file that is not a record, or records that a selection rule cannot use."""


class HubError(MoeDgError, RuntimeError):
    """The Hub cannot be reached, refuses, or holds another model under the name that was given."""


class ExportError(ArgumentError):
    """A model that cannot be exported to a format, or a program that does not answer as the model does."""
