"""A split by photograph, for benchmarks whose domains hold the same photographs in several styles.

Split domain by domain, as DomainBed does, most photographs of a test domain are trained on in the styles of the other
domains. Here a photograph has one part, the same in all domains, so that none which is tested on was trained on.
"""

import hashlib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal, Protocol

import numpy as np

from ..errors import ProtocolError
from .splits import Split

Part = Literal["train", "validation", "test"]

HELD_OUT = 0.2  # share of the photographs to validate on, and again to test on


class FileDomain(Protocol):
    """A domain of image files."""

    @property
    def name(self) -> str:
        """The domain's name."""

    @property
    def paths(self) -> Sequence[str]:
        """One file per image."""


def photograph_part(file: str) -> Part:
    """The part that a photograph belongs to, by a hash of its file's stem: 60% train, 20% validation, 20% test.

    Folder, domain, extension and trial seed change nothing. The hash is MD5, so that every machine agrees.

    >>> photograph_part("Natural/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg")
    'test'
    """
    digest = hashlib.md5(PurePath(file).stem.encode(), usedforsecurity=False).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < HELD_OUT:
        return "test"
    return "validation" if place < 2 * HELD_OUT else "train"


def split_by_photograph(domains: Sequence[FileDomain], training: Sequence[int]) -> list[Split]:
    """Splits every domain by photograph, in place of `split_domains`.

    A training domain's `inside` are its train photographs; a test domain's, on which its accuracy is reported, its test
    photographs. `outside` are the validation photographs of every domain. A training domain's test photographs and a
    test domain's train photographs are in neither.

    Args:
        domains: All domains of the benchmark, of files whose stems name the photographs.
        training: Positions of those that are trained on.

    Raises:
        ProtocolError: A domain is not made of files, or lacks photographs in one of its parts.
    """
    return [_split(domain, "train" if at in training else "test") for at, domain in enumerate(domains)]


def _split(domain: FileDomain, inside: Part) -> Split:
    if not hasattr(domain, "paths"):
        remedy = f"domain {domain.name!r} is not made of image files; leave the option out"
        raise ProtocolError.of("split_by_photograph", True, remedy)
    parts = np.array([photograph_part(path) for path in domain.paths])
    found = {part: np.flatnonzero(parts == part) for part in (inside, "validation")}
    for part, positions in found.items():
        if not len(positions):
            remedy = f"domain {domain.name!r} has no {part} photographs among its {len(parts)}; add images"
            raise ProtocolError.of("split_by_photograph", True, remedy)
    return Split(inside=found[inside], outside=found["validation"])
