"""Fingerprints of data: of files by names, sizes and the content of a sample, of images in memory by pixels.

Names are those below the domain's folder. Files without compression have equal sizes, whatever they show, so that the
content of files in equal distances counts too: of a few, and of more where sizes repeat.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import check_regular_file
from .domains import Domain, file_names
from .readers.hub_data import HubDomain

Fingerprint: TypeAlias = Sequence[Mapping[str, Any]]  # a table for each domain: its name, its size and digests

DIGITS = 12  # hexadecimal ones of a digest
SAMPLED, SAMPLED_OF_EQUAL = 64, 512  # files of a domain whose content is read
SAMPLED_BYTES = 1 << 16  # at the start, in the middle and at the end of a file
UNKNOWN = -1  # size of a file that is not known
# entry of a domain's table -> its name in messages
PARTS: Mapping[str, str] = {
    "images": "the number of images",
    "names": "the names of images",
    "contents": "the sizes or pixels of images",
    "sample": "the content of images",
    "labels": "the labels",
    "metadata": "the metadata",
    "split": "the official split",
    "readable": "the images that can be read",
}
FILES = tuple(part for part in PARTS if part != "readable")  # known without reading all images


def is_fingerprint(value: object) -> bool:
    """Whether a value, as read from a file, has the form of a fingerprint."""
    tables = value if isinstance(value, list) else [None]
    return all(isinstance(table, dict) and isinstance(table.get("name"), str) for table in tables)


def fingerprint(domains: Sequence[Domain]) -> list[dict[str, Any]]:
    """Computes the fingerprint of a benchmark's domains."""
    tables = []
    for domain in domains:
        names, contents, sample = _images(domain)
        split = domain.split and digest(domain.split.inside.astype(np.int64), domain.split.outside.astype(np.int64))
        labels = digest(json.dumps(domain.classes).encode(), np.asarray(domain.targets, np.int64))
        metadata = None if domain.metadata is None else digest(np.asarray(domain.metadata))
        images = {"name": domain.name, "images": len(domain), "names": names, "contents": contents, "sample": sample}
        tables.append({**images, "labels": labels, "metadata": metadata, "split": split})
    return tables


def with_readable(tables: Fingerprint, domains: Sequence[Domain]) -> list[dict[str, Any]]:
    """Completes a fingerprint by the names that are left in domains from which unreadable images were removed."""
    pairs = zip(tables, domains, strict=True)
    return [{**table, **({"readable": _images(d)[0]} if len(d) < table["images"] else {})} for table, d in pairs]


def short(tables: Fingerprint) -> str:
    """Returns one digest of a whole fingerprint."""
    return digest(json.dumps(list(tables), sort_keys=True).encode())


def same_images(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two domains hold the same images, whatever their names, labels and metadata are."""
    parts = ("images", "names", "contents", "readable")
    return all(first.get(part) == second.get(part) for part in parts) and _same_sample(first, second)


def difference(before: Fingerprint, now: Fingerprint, parts: Sequence[str] = tuple(PARTS)) -> str | None:
    """Describes the first difference between two fingerprints; None if some parts of all domains are the same."""
    names, old_names = ([table["name"] for table in tables] for tables in (now, before))
    if names != old_names:
        return f"the domains are {', '.join(names)} and were {', '.join(old_names)}"
    for old, new in zip(before, now, strict=True):
        for part in parts:
            if not (_same_sample(old, new) if part == "sample" else old.get(part) == new.get(part)):
                counts = f" ({new[part]}, and it was {old.get(part)})" if part == "images" else ""
                return f"domain {new['name']!r} differs in {PARTS[part]}{counts}"
    return None


def _same_sample(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether the content of two domains is the same, or not recorded for one of them."""
    return None in (first.get("sample"), second.get("sample")) or first["sample"] == second["sample"]


def digest(*parts: np.ndarray | bytes) -> str:
    """Returns the first digits of the SHA-256 of arrays, with their types and shapes, and of bytes."""
    sha = hashlib.sha256()
    for part in parts:
        array = np.frombuffer(part, np.uint8) if isinstance(part, bytes) and part else np.asarray(part)
        sha.update(f"{array.dtype.str}{array.shape}".encode())
        sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()[:DIGITS]


def _images(domain: Domain) -> tuple[str, str | None, str | None]:
    """Digests of the images' names, of sizes or pixels, and of a sample; None for neither files nor arrays."""
    images = domain.images
    if isinstance(domain, HubDomain):
        paths, sizes = domain.stored()
        return *_files(paths, sizes), digest(*(_content(domain.content(index)) for index in _sampled(sizes)))
    if len(images) and isinstance(images[0], str | bytes):
        paths = images if isinstance(images, np.ndarray) and images.dtype.kind == "S" else file_names(images)
        sizes = np.full(len(paths), UNKNOWN)
        return *_files(paths, sizes), digest(*(_content(os.fsdecode(paths[index])) for index in _sampled(sizes)))
    names = digest("\n".join(domain.file(index) for index in range(len(images))).encode())
    arrays = all(isinstance(image, np.ndarray) for image in images)
    return names, digest(b"".join(image.tobytes() for image in images)) if arrays else None, None


def _files(paths: np.ndarray, sizes: np.ndarray) -> tuple[str, str]:
    """Digests of paths below the folder that all of them share, and of sizes, which are filled in where unknown."""
    letters = paths[:, None].view(np.uint8)
    shared = (letters == letters[0]).all(axis=0)
    start = bytes(letters[0, : len(shared) if shared.all() else shared.argmin()]).rfind(os.sep.encode()) + 1
    unknown = np.flatnonzero(sizes == UNKNOWN)
    sizes[unknown] = np.fromiter(map(_size, paths[unknown].tolist()), np.int64, len(unknown))
    # The type of the paths may have room for longer ones of other domains
    end = int((np.flatnonzero(letters.any(axis=0)) + 1).max(initial=start))
    return digest(letters[:, start:end]), digest(sizes)


def _sampled(sizes: np.ndarray) -> list[int]:
    """Positions of the files whose content is read."""
    count = SAMPLED if 2 * len(np.unique(sizes)) > len(sizes) else SAMPLED_OF_EQUAL
    return np.unique(np.linspace(0, len(sizes) - 1, count).astype(int)).tolist() if len(sizes) else []


def _content(image: str | bytes) -> bytes:
    """Parts of a file, or an image in memory."""
    if isinstance(image, bytes):
        return image
    try:
        check_regular_file(image)
        with open(image, "rb") as file:
            size, parts = os.fstat(file.fileno()).st_size, list[bytes]()
            for start in (0, size // 2, size - SAMPLED_BYTES):
                file.seek(max(0, start))
                parts.append(file.read(SAMPLED_BYTES))
            return b"".join(parts)
    except OSError:  # the image is refused when it is read
        return b""


def _size(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # the image is refused when it is read
        return UNKNOWN
