"""Training methods and weight averaging: ERM, 14 domain generalization methods, EMA, moving averages and SWAD."""

from .averaging import Averaging
from .base import POSITIVE, SHARE, Algorithm, Setup
from .erm import ERM
from .registry import ALGORITHMS, AVERAGING, get_algorithm, get_averaging, register_algorithm
from .step import Minibatches, StepContext

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
