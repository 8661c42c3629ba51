"""Predictions by PyTorch, or by an ONNX program of the model that tools/export.py wrote."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..cli.arguments import option
from ..errors import ArgumentError, ExportError
from ..networks.averages import Ensemble
from ..networks.build import Network
from ..networks.trained import WithFeatures, network_digest
from .programs import (
    DIGEST,
    INPUTS,
    OUTPUTS,
    as_tuple,
    first_line,
    open_session,
    run_session,
    sample_metadata,
)

Engine: TypeAlias = Callable[..., tuple[Tensor, ...]]
IMAGES, METADATA = INPUTS
LOGITS, FEATURES = OUTPUTS
EXPORTED_OPTIONS = ("coverage_radius", "expert_mode")
COMPARED_IMAGES = 8
# Share of the largest logit: far above rounding, which is about 1e-6, and far below the effect of other weights
TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The program that computes predictions."""

    engine: str | None = option(
        None,
        metavar="FILE",
        help="compute with onnxruntime and this ONNX program of the model, written by tools/export.py (default: "
        "compute with PyTorch)",
    )


def make_engine(options: Any, network: Network, input_size: Sequence[int], features: bool = False) -> Engine:
    """Returns a function from images (B, C, H, W), and metadata where the model reads any, to logits.

    It returns a tuple on the network's device: logits (B, num_classes) and, with `features`, the classifier's inputs
    (B, D). The network is that of `--model`, in evaluation mode, and `input_size` the (C, H, W) of its images.
    `options` has the attribute `engine`, and those of `EXPORTED_OPTIONS` that the command takes, for the messages.
    """
    if options.engine is None:
        if features:
            network = network.with_features() if isinstance(network, Ensemble) else WithFeatures(network)
        forward = network
        return lambda *inputs: as_tuple(forward(*inputs))
    if isinstance(network, Ensemble):
        remedy = "computes one network, and the model is an ensemble; leave it out"
        raise ArgumentError.of("engine", options.engine, remedy)
    given = {name: getattr(options, name, None) for name in EXPORTED_OPTIONS}
    return ProgramEngine(options.engine, network, input_size, features, given)


class ProgramEngine:
    """An ONNX program in place of a network; the arguments are those of `make_engine`.

    A file that was exported from another network is refused by the digest that it carries. The first batch is also
    given to the network, to recognize a runtime that computes other logits.
    """

    def __init__(
        self, path: str, network: Network, input_size: Sequence[int], features: bool, given: Mapping[str, object]
    ) -> None:
        if not Path(path).is_file():
            raise ArgumentError.of("engine", path, "no such file; write it with tools/export.py --formats onnx")
        self._path, self._network, self._compared = path, network, False
        self._device = next(network.parameters()).device
        self._session = open_session(Path(path), self._device)
        self._unknown = sample_metadata(network, 1)
        nodes = [*self._session.get_inputs(), *self._session.get_outputs()]
        shapes = {node.name: tuple(node.shape[1:]) for node in nodes}
        has_features = shapes.pop(FEATURES, None) is not None
        expected = {IMAGES: tuple(input_size), LOGITS: (network.num_classes,)}
        if self._unknown is not None:
            expected[METADATA] = tuple(self._unknown.shape[1:])
        if shapes != expected:
            remedy = f"is not a program of this model: its shapes are {shapes}, the model's {expected}"
            raise ArgumentError.of("engine", path, f"{remedy}; export it again with tools/export.py")
        self._check_digest(given)
        if features and not has_features:
            remedy = "does not return the features that this command saves; export it again with --features"
            raise ArgumentError.of("engine", path, remedy)

    def _check_digest(self, given: Mapping[str, object]) -> None:
        # A few images cannot tell networks apart that differ little, or only at other places
        exported = self._session.get_modelmeta().custom_metadata_map.get(DIGEST)
        if exported != network_digest(self._network):
            for name, value in given.items():
                if value is not None and exported is not None:
                    remedy = "cannot change a program; export it with this option, or leave --engine out"
                    raise ArgumentError.of(name, value, remedy)
            change = "was exported from another network, or with another coverage radius or expert mode"
            change = "carries no digest of its network" if exported is None else change
            again = "timm-moe-dg export --model NAME --formats onnx --features --output DIR"
            raise ExportError.of("engine", self._path, f"{change}; export it again: {again}")

    def __call__(self, images: Tensor, metadata: Tensor | None = None) -> tuple[Tensor, ...]:
        """Runs the program on a batch."""
        inputs: tuple[Tensor, ...] = (images,)
        if self._unknown is not None:
            if metadata is None:
                metadata = self._unknown.to(self._device).expand(len(images), *self._unknown.shape[1:])
            else:
                # Raises for metadata out of range, which a program does not check
                self._network.metadata_encoder(images, metadata)
            inputs += (metadata,)
        try:
            outputs = run_session(self._session, inputs)
        except Exception as error:  # onnxruntime's errors have no common class
            remedy = f"onnxruntime cannot run it ({first_line(error)}); leave --engine out"
            raise ExportError.of("engine", self._path, remedy) from error
        outputs = tuple(output.to(self._device) for output in outputs)
        if not self._compared:
            self._compare(outputs[0][:COMPARED_IMAGES], [part[:COMPARED_IMAGES] for part in inputs])
            self._compared = True
        return outputs

    @torch.no_grad()
    def _compare(self, logits: Tensor, inputs: Sequence[Tensor]) -> None:
        expected = self._network(*inputs)
        differences = (logits - expected).abs().amax(1)
        # Negated, so that NaN differs
        differing = ~(differences <= TOLERANCE * expected.abs().max())
        # A near tie between two experts moves single images, other weights move all of them
        if 2 * differing.sum() > len(expected):
            remedy = f"its logits differ from those of --model by up to {differences.max():.1e}"
            raise ExportError.of("engine", self._path, f"{remedy}; export the model again, or leave --engine out")
