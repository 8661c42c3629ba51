"""The check that every metric starts with."""

from torch import Tensor

from ..errors import ArgumentError

_COUNT = {2: "two", 3: "three"}


def check_vectors(**vectors: Tensor) -> None:
    """Refuses tensors that are not vectors of one length; the names are those of the caller's arguments.

    Raises:
        ArgumentError: The shapes differ, or are not of one dimension.
    """
    shapes = [tuple(vector.shape) for vector in vectors.values()]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ArgumentError.of(", ".join(vectors), shapes, f"give {_COUNT[len(shapes)]} vectors of equal length")
