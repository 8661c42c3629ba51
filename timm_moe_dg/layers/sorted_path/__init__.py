"""The fast path of the experts: assignments sorted by expert, for eager mode and for torch.compile."""

from .activations import SortedActivation, sorted_activation
from .compiled import compiled_experts
from .experts import Operands, sorted_experts

__all__ = [
    "Operands",
    "SortedActivation",
    "compiled_experts",
    "sorted_activation",
    "sorted_experts",
]
