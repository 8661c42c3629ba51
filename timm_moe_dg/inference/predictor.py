"""Predictions of parts: tables of images with classes, probabilities and what else a network tells of them."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..cli.arguments import LoaderOptions, TrainedModelOptions, default_device, model_keywords, option
from ..cli.text import one_line
from ..cli.values import between, positive_int, share, usable_device
from ..data import file_names
from ..data.domains import FileDomain
from ..errors import ArgumentError, CheckpointError
from ..layers import LocationIdEmbedding
from ..layers.encoders.coverage import distances
from ..layers.reports import RouterOutput, count_first_choices
from ..losses import record_routing, router_outputs
from ..networks.averages import Ensemble, evaluation_view, load_predictor
from ..networks.bands import bands_of
from ..networks.build import Network, warn_of_other_values
from ..networks.calibration import (
    Calibration,
    abstention_threshold,
    calibration_command,
    find_calibration,
    held_out_scores,
    set_threshold,
)
from ..networks.trained import (
    WithFeatures,
    label_names,
    metadata_columns,
    metadata_encoder,
    unknown_metadata,
    uses_metadata,
    warn_of_unknown_metadata,
)
from ..storage.run_folder import warn_of_unfinished
from .image_rows import Decoded, ImageRow, MetadataNames, RowImages, batches, row_loader

Column = list[Any] | np.ndarray  # a value for each image: a text, a number, or a row of an array
STATUS, SET, ABSTAIN = "status", "set", "abstain"
OK, UNREADABLE, UNLIKE, OUTSIDE_COVERAGE, SHARED_EXPERT = (
    *("ok", "unreadable", "unlike"),  # unlike the training images
    *("outside_coverage", "shared_expert"),  # of MoGE: far from the training locations; without a place
)
LOGITS, FEATURES, EXPERTS, DISTANCE = COLUMNS = ("logits", "features", "experts", "distance")
_lock = threading.Lock()  # records and hooks belong to a network, which several threads may share
_logger = logging.getLogger(__name__)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device that computes."""

    device: str | None = option(None, type=usable_device, metavar="NAME",
        help=f"torch device (default here: {default_device()})")


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """The images that have a row, and its columns."""

    skip_unreadable: bool = option(False,
        help="leave out damaged images (default: a row with the status unreadable); stderr lists them in both cases")
    top_k: int = option(1, type=positive_int, metavar="K", help="classes per image (default: %(default)s)")
    columns: Sequence[str] = option((), nargs="+", choices=COLUMNS, metavar="NAME",
        help=f"further columns: {', '.join(COLUMNS)}; experts are those of most tokens in each mixture layer, and "
        "distance is to the centers of MoGE's cells of training locations, km")


@dataclass(frozen=True, kw_only=True)
class CertaintyOptions:
    """Columns that say how certain an answer is. The model has to be calibrated."""

    coverage: float | None = option(None, type=between, metavar="X",
        help="column set: holds the right class with this probability")
    abstain: float | None = option(None, type=share, metavar="X",
        help="column abstain: this share of answers goes to a person")
    calibration: str | None = option(None, metavar="SWEEP",
        help="calibrate on the held-out domains of the runs in this folder (default: on the model's validation images)")
# fmt: on


@dataclass(frozen=True, kw_only=True)
class PartOptions(TrainedModelOptions, ColumnOptions, CertaintyOptions, LoaderOptions, DeviceOptions):
    """All options of the prediction of a part."""


def answer_columns(options: Any) -> list[str]:
    """Returns the names of the columns after an image's path and place."""
    others = [f"{name}_{rank}" for rank in range(2, options.top_k + 1) for name in ("class", "probability")]
    certainty = [name for name, value in {SET: options.coverage, ABSTAIN: options.abstain}.items() if value is not None]
    return ["class", "probability", *others, STATUS, *certainty, *dict.fromkeys(options.columns)]


def prediction_sets(probabilities: Tensor, least: float, classes: Sequence[str]) -> list[list[str]]:
    """(B, C) probabilities -> the classes of at least this probability, from best to worst."""
    ranked = zip(*(part.tolist() for part in probabilities.sort(descending=True)), strict=True)
    return [[classes[c] for p, c in zip(*row, strict=True) if p >= least] for row in ranked]


@dataclass
class Part:
    """The predictions of a part: columns of equal length by name, in the order of its images."""

    number: int
    images: int = 0
    table: dict[str, Column] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)  # paths of images that cannot be decoded
    reason: str = ""  # of the first of them
    unknown: int = 0  # rows without metadata
    partial: int = 0  # rows that lack some of them

    def __len__(self) -> int:
        return len(self.table["path"])


class LoadedModel:
    """A trained network with what its answers need.

    Args:
        name: As `--model` has it, for messages.
        network: In evaluation mode.
        calibration: That of `network`. None for none.
        img_size: Side of the input in pixels. None for the network's own.
    """

    def __init__(
        self, name: str, network: Network, calibration: Calibration | None = None, img_size: int | None = None
    ) -> None:
        self.name, self.network, self.calibration = name, network, calibration
        self.temperature = calibration.temperature if calibration else 1.0
        self.device = next(network.parameters()).device
        self.classes = label_names(network) or tuple(map(str, range(network.num_classes)))
        self.bands, self.view = bands_of(network), evaluation_view(network, img_size)
        # Whether the calibration judges images by their features, too
        self.judges_features = len(getattr(calibration, "distributions", ())) > 1


def load_model(options: Any, network: Network | None = None) -> LoadedModel:
    """Loads the model of `TrainedModelOptions`, on the device of `DeviceOptions`.

    A given network takes its place. It has no calibration, and stays on its device unless the options name one.
    """
    if network is not None:
        return LoadedModel(options.model, network.to(options.device) if options.device else network)
    warn_of_unfinished(options.model)
    device, local = default_device(), os.environ.get("LOCAL_RANK", "")
    if device == "cuda" and local.isdecimal():  # each process on a machine has a GPU of its own
        device = f"cuda:{int(local) % torch.cuda.device_count()}"
    network = load_predictor(options.model, **model_keywords(options)).to(options.device or device)
    return LoadedModel(options.model, network, find_calibration(options.model, network), options.img_size)


class Predictor:
    """A model and the options by which it predicts parts, those of `PartOptions`.

    Raises:
        ArgumentError: The model has no such columns, or is calibrated on too few images.
    """

    def __init__(self, options: Any, model: LoadedModel) -> None:
        self.options, self.model, network = options, model, model.network
        if options.top_k > network.num_classes:
            raise ArgumentError.of("top_k", options.top_k, f"the model has {network.num_classes} classes")
        self._coverage: Any = getattr(getattr(network, "metadata_encoder", None), "coverage", None)
        self._check_columns()
        self.reads_metadata = hasattr(network, "metadata_encoder")
        has_ids = isinstance(metadata_encoder(network), LocationIdEmbedding)
        self.names = MetadataNames(has_ids, metadata_columns(network))
        self.columns = ["path", *self.names.all[:2], *answer_columns(options)]
        self.least, self.confident = thresholds(options, model.calibration)
        has_features = FEATURES in options.columns or model.judges_features
        self._forward = WithFeatures(network) if has_features else network
        reads_places = self.reads_metadata and not has_ids
        self._images = RowImages(model.view, self.names, model.bands, reads_places)

    @torch.inference_mode()
    def parts(self, parts: Iterable[tuple[int, list[ImageRow]]]) -> Iterator[Part]:
        """Predicts numbered parts in order. They are read while earlier ones are predicted."""
        rows = batches(self._noted(parts), self.options.batch_size)
        loader = row_loader(self._images, rows, self.options.workers, pin_memory=self.model.device.type == "cuda")
        part, pieces = Part(-1), list[dict[str, Column]]()
        for decoded in tqdm(loader, unit="batch", disable=None):
            part.number = decoded.batch.part
            part.images += len(decoded.batch.rows)
            read = set(decoded.positions)
            missing = [row.path for i, row in enumerate(decoded.batch.rows) if i not in read]
            part.unreadable += missing
            part.reason = part.reason or "".join(decoded.reasons[:1])
            table: dict[str, Column] = {}
            if read:
                metadata = decoded.metadata.numpy()
                is_unknown = unknown_metadata(metadata, self.names.columns)
                part.unknown += int(is_unknown.sum())
                if self.names.columns:
                    part.partial += int((np.isnan(metadata).any(axis=1) & ~is_unknown).sum())
                with _lock, record_routing(self.model.network) if EXPERTS in self.options.columns else nullcontext():
                    table = self._predicted(decoded)
            if missing and not self.options.skip_unreadable:
                table = self._with_unreadable(table, decoded)
            pieces += [table] if table else []
            if decoded.batch.is_last:
                part.table = {name: _joined([piece[name] for piece in pieces]) for name in self.columns}
                self._report(part)
                yield part
                part, pieces = Part(-1), []

    def _check_columns(self) -> None:
        wanted, network = self.options.columns, self.model.network
        if EXPERTS in wanted and isinstance(network, Ensemble):
            raise ArgumentError.of("columns", EXPERTS, "are those of one network, not of an ensemble; leave them out")
        if EXPERTS in wanted and not any(hasattr(module, "record_routing") for module in network.modules()):
            raise ArgumentError.of("columns", EXPERTS, f"{self.model.name} has no mixture layers; leave them out")
        if DISTANCE in wanted and self._coverage is None:
            remedy = f"{self.model.name} stores no training locations; leave it out"
            raise ArgumentError.of("columns", DISTANCE, remedy)

    def _noted(self, parts: Iterable[tuple[int, list[ImageRow]]]) -> Iterator[tuple[int, list[ImageRow]]]:
        """Warns of values of the first part that the network was not trained on, and of images that come twice."""
        is_first = True
        for number, rows in parts:
            files = [row.path for row in rows if row.member is None]
            if is_first and files:
                names = file_names(files)
                domains = [FileDomain[str](files[0], (), [0] * len(files), names, bands=self.model.bands)]
                warn_of_other_values(self.model.network, domains)
                is_first = False
            if doubled := len(rows) - len({row.path for row in rows}):
                _logger.warning(f"part {number}: {doubled} images come twice, and have a row each time")
            yield number, rows

    def _report(self, part: Part) -> None:
        """Logs images of a part that are left out, or that have no metadata."""
        remedy = "; give their places with --metadata" if part.unknown == len(part) else ""
        warn_of_unknown_metadata(self.model.network, part.unknown, len(part), remedy)
        if part.partial:
            _logger.warning(f"{part.partial} of {len(part)} images lack some of {', '.join(self.names.all)}")
        if part.unreadable:
            listed = one_line(", ".join(part.unreadable))
            _logger.warning(f"unreadable: {len(part.unreadable)} of {part.images} images: {listed}")
            _logger.warning(f"the first one: {part.reason}")

    def _predicted(self, decoded: Decoded) -> dict[str, Column]:
        paths = [decoded.batch.rows[position].path for position in decoded.positions]
        metadata = decoded.metadata if self.names.ids else decoded.metadata.float()
        is_known = (metadata >= 0).any() if self.names.ids else not metadata.isnan().all()
        metadata = metadata.to(self.model.device)
        given = [metadata[:, 0] if self.names.ids else metadata] if self.reads_metadata and is_known else []
        images = decoded.images.to(self.model.device, non_blocking=True)
        output = self._forward(images, *given)
        logits, *features = output if isinstance(output, tuple) else (output,)
        probabilities = (logits.float() / self.model.temperature).softmax(dim=1)
        if not (finite := probabilities.isfinite().all(dim=1)).all():
            bad = paths[int((~finite).nonzero()[0])]
            raise CheckpointError(f"model={self.model.name!r}: its logits of {bad!r} are NaN; give another checkpoint")
        places = dict(zip(self.names.all[:2], decoded.metadata.T.tolist(), strict=False))
        table: dict[str, Column] = {"path": paths, **places}
        # As without a temperature, which rounding could change. Of equal logits the first, as in evaluations
        order = logits.argsort(dim=1, descending=True, stable=True)[:, : self.options.top_k]
        ranks = zip(probabilities.gather(1, order).T.tolist(), order.T.tolist(), strict=True)
        for rank, (values, classes) in enumerate(ranks, 1):
            suffix = f"_{rank}" if rank > 1 else ""
            table[f"class{suffix}"] = [self.model.classes[index] for index in classes]
            table[f"probability{suffix}"] = [round(value, 6) for value in values]
        table[STATUS] = self._statuses(images, features, decoded.metadata, given)
        if SET in self.columns:
            table[SET] = prediction_sets(probabilities.cpu(), self.least, self.model.classes)
        if ABSTAIN in self.columns:
            table[ABSTAIN] = (probabilities.amax(1) < self.confident).tolist()
        further: dict[str, Callable[[], Column]] = {
            LOGITS: lambda: logits.float().cpu().numpy(),
            FEATURES: lambda: features[0].float().cpu().numpy(),
            EXPERTS: lambda: _experts(router_outputs(self.model.network), len(paths)),
            DISTANCE: lambda: distances(self._coverage, metadata[:, :2]).tolist(),
        }
        return table | {name: further[name]() for name in self.options.columns}

    def _statuses(
        self, images: Tensor, features: Sequence[Tensor], metadata: Tensor, given: Sequence[Tensor]
    ) -> list[str]:
        """The status of each image, the gravest one if several hold."""
        statuses = np.full(len(images), OK, dtype=object)
        is_routed = uses_metadata(self.model.network, images, *given)
        if getattr(self.model.network, "expert_mode", None) == "routed":
            is_unknown = unknown_metadata(metadata.numpy(), self.names.columns)
            outside = SHARED_EXPERT if self._coverage is None else OUTSIDE_COVERAGE
            statuses[~is_routed.cpu().numpy()] = outside  # or a location id of no training image
            statuses[is_unknown] = SHARED_EXPERT
        if self.model.calibration is not None:
            judged = features[0] if self.model.judges_features else None
            statuses[self.model.calibration.unlike(images, judged, is_routed).cpu().numpy()] = UNLIKE
        return statuses.tolist()

    def _with_unreadable(self, table: Mapping[str, Column], decoded: Decoded) -> dict[str, Column]:
        """Adds a row without an answer for each image of a batch that cannot be decoded."""
        rows = list[dict[str, Any]]()
        for row in decoded.batch.rows:
            places = zip(self.names.all[:2], row.metadata or self.names.unknown, strict=False)
            rows.append({**dict.fromkeys(self.columns), "path": row.path, STATUS: UNREADABLE, **dict(places)})
        for name, column in table.items():
            for position, value in zip(decoded.positions, listed(column), strict=True):
                rows[position][name] = value
        return {name: [row[name] for row in rows] for name in self.columns}


def thresholds(options: Any, calibration: Calibration | None) -> tuple[float, float]:
    """Returns the least probability of a class in a set, and of an answer that goes to no person."""
    given = {name: value for name in ("coverage", "abstain") if (value := getattr(options, name)) is not None}
    if not given:
        if options.calibration is not None:
            raise ArgumentError.of("calibration", options.calibration, "has no effect alone; add --coverage")
        return 0.0, 0.0
    if calibration is None:
        remedy = f"{options.model} is not calibrated: {calibration_command(options.model)}"
        raise ArgumentError.of(*next(iter(given.items())), remedy)
    scores = calibration.validation
    if options.calibration is not None:
        scores = held_out_scores(Path(options.calibration), calibration)
    least = 0.0 if options.coverage is None else set_threshold(scores.of_target, options.coverage)
    return least, 0.0 if options.abstain is None else abstention_threshold(scores.confidence, options.abstain)


def _experts(routing: Mapping[str, RouterOutput], images: int) -> np.ndarray:
    """(B, L) int32: the first choice of most tokens of each image in each mixture layer; -1 if none was routed."""
    columns = []
    for layer in routing.values():
        counts = count_first_choices(layer, images)
        columns.append(counts.argmax(1).masked_fill(counts.sum(1) == 0, -1))
    return torch.stack(columns, dim=1).int().cpu().numpy()


def _joined(pieces: Sequence[Column]) -> Column:
    if pieces and all(isinstance(piece, np.ndarray) for piece in pieces):
        return np.concatenate(pieces)
    return [value for piece in pieces for value in listed(piece)]


def listed(column: Column) -> list[Any]:
    """Returns a column as a list."""
    return column.tolist() if isinstance(column, np.ndarray) else column
