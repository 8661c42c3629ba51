"""Algorithms: what a step minimises, given the model and one minibatch per training domain."""

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import ArgumentError
from .adversarial import CDANN, DANN
from .alignment import CORAL, MMD
from .averaging import Averaging, ExponentialAverage, MovingAverage
from .base import Algorithm, ForwardPass, Minibatches, Setup, StepContext
from .erm import ERM
from .fish import Fish
from .fishr import Fishr
from .group_dro import GroupDRO
from .irm import IRM
from .miro import MIRO
from .mixup import Mixup
from .mldg import MLDG
from .rdm import RDM
from .sd import SD
from .swad import SWAD
from .swad_released import ReleasedSWAD
from .vrex import VREx

# DomainBed's names
ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType(
    {
        "ERM": ERM,
        "IRM": IRM,
        "VREx": VREx,
        "GroupDRO": GroupDRO,
        "Mixup": Mixup,
        "MLDG": MLDG,
        "CORAL": CORAL,
        "MMD": MMD,
        "DANN": DANN,
        "CDANN": CDANN,
        "Fish": Fish,
        "Fishr": Fishr,
        "RDM": RDM,
        "SD": SD,
        "MIRO": MIRO,
    }
)
AVERAGING: Mapping[str, type[Averaging]] = MappingProxyType(
    {"ema": ExponentialAverage, "moving": MovingAverage, "swad": SWAD, "swad_released": ReleasedSWAD}
)


def get_algorithm(name: str) -> type[Algorithm]:
    """Looks up an algorithm by its name in `ALGORITHMS`.

    Raises:
        ArgumentError: There is no such algorithm.
    """
    if name not in ALGORITHMS:
        raise ArgumentError.of("algorithm", name, f"choose from {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def get_averaging(name: str) -> type[Averaging]:
    """Looks up a way of averaging by its name in `AVERAGING`.

    Raises:
        ArgumentError: There is no such way.
    """
    if name not in AVERAGING:
        raise ArgumentError.of("averaging", name, f"choose from {', '.join(AVERAGING)}")
    return AVERAGING[name]


__all__ = [
    "ALGORITHMS",
    "AVERAGING",
    "ERM",
    "Algorithm",
    "Averaging",
    "ForwardPass",
    "Minibatches",
    "Setup",
    "StepContext",
    "get_algorithm",
    "get_averaging",
]
