"""Training methods and weight averages by name: ERM, 14 methods of domain generalization, EMA, averages and SWAD.

The state of training beside weights and the optimizer's. An evaluation changes none of it.

| state | changed by | read by | in a checkpoint |
|---|---|---|---|
| routers' counts, sums of thresholds | training forwards | `after_step`, which empties them | no: empty between steps |
| routers' bias, thresholds | `after_step`, if the network was trained | routing | network |
| record of routing, expert outputs, D3G's other heads, taps | training forwards | losses of the same step | no |
| BatchNorm's statistics | training forwards, also a discriminator's; `Fish` interpolates | evaluation | network |
| `GroupDRO`'s weights, `Fishr`'s variances | steps that float16 does not skip | the next step | algorithm |
| count of steps (`Counting`) | each step, also a skipped one | annealing, the discriminator's turns | algorithm |
| a discriminator and its Adam, `MIRO`'s variances | their steps | the network's loss | algorithm, optimizer |
| averages of weights | each step; SWAD's by validation losses too | evaluation | averaging |
| sums of losses (`StepMeter`) | each step; empty after an evaluation | records | meter |
| random numbers, images, learning rates | follow from the number of the step | the step | no |

`record_routing` lets an evaluation overwrite the record of routing, and losses of such a record are refused.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TypeVar

from ..errors import ArgumentError, choices
from .adversarial import CDANN, DANN
from .averaging import SWAD, Averaging, ExponentialAverage, MovingAverage, ReleasedSWAD
from .base import ERM, Algorithm, Minibatches, Setup, StepContext
from .hparams import POSITIVE, SHARE
from .matching import CORAL, MMD, Fishr
from .meta import MLDG, Fish
from .regularized import MIRO, SD, Mixup
from .risks import IRM, RDM, GroupDRO, VREx

__all__ = [
    "ALGORITHMS",
    "AVERAGING",
    "ERM",
    "POSITIVE",
    "SHARE",
    "Algorithm",
    "Averaging",
    "Minibatches",
    "Setup",
    "StepContext",
    "get_algorithm",
    "get_averaging",
    "register_algorithm",
]

Method = TypeVar("Method", bound=type[Algorithm])

_METHODS = (ERM, IRM, VREx, GroupDRO, Mixup, MLDG, CORAL, MMD, DANN, CDANN, Fish, Fishr, RDM, SD, MIRO)
_algorithms: dict[str, type[Algorithm]] = {method.__name__: method for method in _METHODS}  # DomainBed's names
ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType(_algorithms)
AVERAGING: Mapping[str, type[Averaging]] = MappingProxyType(
    {"ema": ExponentialAverage, "moving": MovingAverage, "swad": SWAD, "swad_released": ReleasedSWAD}
)


def register_algorithm(method: Method) -> Method:
    """Class decorator: adds an algorithm to `ALGORITHMS` under the name of its class, which must not be taken.

    >>> @timm_moe_dg.algorithms.register_algorithm
    ... class MyMethod(timm_moe_dg.algorithms.ERM):
    ...     HPARAMS = {"my_lambda": 1.0}
    >>> timm_moe_dg.algorithms.get_algorithm("MyMethod").HPARAMS
    {'my_lambda': 1.0}
    """
    name = method.__name__
    if not issubclass(method, Algorithm):
        raise ArgumentError.of("algorithm", name, "must be a subclass of timm_moe_dg.algorithms.Algorithm")
    if name in _algorithms:
        raise ArgumentError.of("algorithm", name, "is registered already; give the class another name")
    _algorithms[name] = method
    return method


def get_algorithm(name: str) -> type[Algorithm]:
    """Looks up an algorithm in `ALGORITHMS`. MODULE:CLASS first imports the module that registers it."""
    module, _, class_name = name.rpartition(":")
    if module:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module exists, and an import inside it fails
            raise ArgumentError.of("algorithm", name, f"no module {module!r}; install it or set PYTHONPATH") from None
    if class_name not in ALGORITHMS:
        raise ArgumentError.of("algorithm", name, f"{choices(ALGORITHMS)}, or give MODULE:CLASS")
    return ALGORITHMS[class_name]


def get_averaging(name: str) -> type[Averaging]:
    """Looks up a weight average in `AVERAGING`. An unknown name is an `ArgumentError`."""
    if name not in AVERAGING:
        raise ArgumentError.of("averaging", name, f"choose from {', '.join(AVERAGING)}")
    return AVERAGING[name]
