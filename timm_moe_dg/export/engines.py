"""What computes a network's answers: PyTorch, or onnxruntime with a program that is made of the network and checked."""

import argparse
import logging

from torch import Tensor, nn

from ..errors import ArgumentError, ExportError, MissingDependencyError, StorageError
from ..layers import GeoMoeMlp
from ..networks.features import WithFeatures
from .agreement import check_agreement, in_tuple
from .program_cache import cached_program
from .programs import Inputs, first_line
from .sessions import CPU, Session, open_session, providers

TORCH, ONNXRUNTIME, AUTO = ENGINES = ("torch", "onnxruntime", "auto")
_logger = logging.getLogger(__name__)


def add_engine_option(group: argparse._ArgumentGroup) -> None:
    """Adds --engine."""
    what = "what computes: onnxruntime takes a program made of the model, and is checked against PyTorch; auto: that, "
    what += "or torch where it cannot be (default: %(default)s)"
    group.add_argument("--engine", choices=ENGINES, default=TORCH, help=what)


class Engine:
    """Answers for a network: called with images (B, C, H, W), and their metadata, it gives what the network would.

    With onnxruntime the first call opens, or first makes, the program, and compares it with the network; see
    `program_cache` and `agreement`. Its answers are on the network's device.

    Args:
        kind: In `ENGINES`; 'auto' is onnxruntime or, where that cannot be and with a message, torch.
        network: In evaluation mode.
        features: Give what the classifier sees as well, see `WithFeatures`.

    Attributes:
        name: Which engine answers.

    Raises:
        ArgumentError: There is no such engine; or the network has no features to give.
        ExportError: With 'onnxruntime': the network may not be asked through a program.
        MissingDependencyError: With 'onnxruntime': it is not installed.
    """

    def __init__(self, kind: str, network: nn.Module, features: bool = False) -> None:
        if kind not in ENGINES:
            raise ArgumentError.of("engine", kind, f"choose from {', '.join(ENGINES)}")
        self.name = TORCH if kind == TORCH else ONNXRUNTIME
        self._falls_back = kind == AUTO
        self._network = network
        self._asked = WithFeatures(network) if features else network
        self._session: Session | None = None
        if self.name == ONNXRUNTIME:
            try:
                _check_possible(network)
            except (ExportError, MissingDependencyError) as error:
                self._fall_back(error)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Answers about a batch: logits (B, num_classes), and features (B, D) if they are wanted.

        Raises:
            ExportError: With 'onnxruntime': the network cannot be exported or run, or the program differs from it.
            MetadataError: As the network.
            MissingDependencyError: With 'onnxruntime': what exports is not installed.
            StorageError: With 'onnxruntime': the program cannot be kept.
        """
        if self.name == TORCH:
            return in_tuple(self._asked(*inputs))
        if len(inputs) > 1:  # what the network refuses, and a program would not
            self._network.get_submodule("metadata_encoder")(*inputs)
        try:
            return self._run(inputs)
        except (ExportError, MissingDependencyError, StorageError) as error:
            self._fall_back(error)
            return in_tuple(self._asked(*inputs))

    def _run(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Runs the program; the first time, opens and checks it."""
        try:
            session = self._session or open_session(cached_program(self._asked, inputs), inputs[0].device)
            found = session(*inputs)
        except (ExportError, MissingDependencyError, StorageError):
            raise
        except Exception as error:  # the exporter, and onnxruntime, raise whatever they raise
            remedy = f"cannot run this model ({first_line(error)}); give --engine torch"
            raise ExportError.of("engine", ONNXRUNTIME, remedy) from error
        if self._session is None:
            check_agreement(self._asked, found, inputs)
            self._session, self._falls_back = session, False  # from here on, one engine answers about all images
        return found

    def _fall_back(self, error: Exception) -> None:
        """Leaves the answers to PyTorch, if that was asked for.

        Raises:
            Exception: It was not: the one that is given.
        """
        if not self._falls_back:
            raise error
        _logger.warning(f"answers are PyTorch's: {error}")
        self.name = TORCH


def _check_possible(network: nn.Module) -> None:
    """Looks at what can be told without a program.

    Raises:
        ExportError: onnxruntime has nothing for the network's device, or the network refuses images by their metadata,
            which a program cannot.
        MissingDependencyError: onnxruntime is not installed.
    """
    providers(next((one.device for one in network.parameters()), CPU))
    if any(isinstance(module, GeoMoeMlp) and module.shared is None for module in network.modules()):
        remedy = "shared_expert=False leaves nothing for images without metadata, which only PyTorch refuses; "
        raise ExportError.of("engine", ONNXRUNTIME, remedy + "give --engine torch")
