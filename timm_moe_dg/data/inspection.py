"""What the images of domains hold: unreadable ones, values and statistics of bands, and fingerprints.

Fingerprints are of files by names, sizes and the content of a sample, of images in memory by pixels. Names are those
below the domain's folder. Files without compression have equal sizes, whatever they show, so that the content of files
in equal distances counts too: of a few, and of more where sizes repeat.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor
from tqdm.auto import tqdm

from ..errors import ArgumentError, DataError, ImageReadError, check_regular_file
from .bands import Bands
from .domains import Domain, FileDomain, Split, file_names
from .readers.hub_data import HubDomain
from .readers.images import FileFacts, file_facts
from .readers.rasters import EIGHT_BIT, REPAIR, STATED, WHOLE, Pixels

MAX_NAMED = 5  # messages in the log
MAX_PROBED = 16  # files of a domain
FAR = 8  # deviations from a mean
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

_LOGGER = logging.getLogger(__name__)


def drop_unreadable(domains: Sequence[Domain], workers: int = 1) -> tuple[list[Domain], list[str]]:
    """Decodes every image once and leaves out those that fail. Returns the domains and a message for each such image.

    A domain that loses an image has another split, so its results do not compare with those of a complete copy.
    """
    readable: list[Domain] = []
    errors = _read_errors(domains, workers)
    for domain, unreadable in zip(domains, errors, strict=True):
        if unreadable and len(unreadable) == len(domain):
            raise DataError(f"domain={domain.name!r}: none of its {len(domain)} images can be read; {unreadable[0]}")
        readable.append(domain.without(unreadable) if unreadable else domain)
    messages = [message for unreadable in errors for message in unreadable.values()]
    if messages:
        _LOGGER.warning("%d unreadable images left out: %s", len(messages), _first(messages))
    return readable, messages


def check_readable(domains: Sequence[Domain], workers: int = 1) -> None:
    """Decodes every image once. Raises a `DataError` with the number of unreadable images."""
    errors = _read_errors(domains, workers)
    messages = [message.removesuffix(f"; {REPAIR}") for unreadable in errors for message in unreadable.values()]
    if messages:
        counts = f"{len(messages)} of {sum(map(len, domains))} cannot be read"
        raise DataError(f"images: {counts}: {_first(messages)}; repair or remove them, or give --skip-unreadable")


def _read_errors(domains: Sequence[Domain], workers: int) -> list[dict[int, str]]:
    """Decodes every image once. Returns for each domain the positions of those that fail, with messages."""
    total = sum(map(len, domains))
    _LOGGER.info("reading all %d images once, to find those that cannot be decoded", total)
    found: list[dict[int, str]] = [{} for _ in domains]
    # Threads suffice, because Pillow's decoders release the interpreter's lock.
    with ThreadPoolExecutor(max(1, workers)) as pool, tqdm(total=total, unit="image", disable=None) as bar:
        for domain, unreadable in zip(domains, found, strict=True):
            for position, error in enumerate(pool.map(partial(_read_error, domain), range(len(domain)))):
                if error:
                    unreadable[position] = error
                bar.update()
    if not any(found):
        _LOGGER.info("all images can be read")
    return found


def _read_error(domain: Domain, position: int) -> str | None:
    try:
        domain.pixels(position)
    except ImageReadError as error:
        return str(error)
    return None


def _first(messages: Sequence[str]) -> str:
    more = f"; and {len(messages) - MAX_NAMED} more" if len(messages) > MAX_NAMED else ""
    return "; ".join(messages[:MAX_NAMED]) + more


def deep_share(domain: Domain) -> float:
    """Share of files with other values than 8-bit ones among a few, in equal distances. Their first bytes are read."""
    positions = _spread(len(domain), MAX_PROBED)
    return float(np.mean([_is_deep(domain, position) for position in positions])) if positions else 0.0


def _spread(size: int, count: int) -> list[int]:
    """Returns at most `count` positions in equal distances."""
    return np.unique(np.linspace(0, size - 1, count).astype(int)).tolist() if size else []


def warn_of_far_values(domains: Sequence[Domain], mean: Sequence[float], std: Sequence[float]) -> None:
    """Warns of domains whose first image is far from the mean of the training images, such as those of another type."""
    for domain in domains:
        try:
            if len(domain):
                warn_if_far(domain.file(0), domain.pixels(0), mean, std)
        except ImageReadError:  # refused or left out when it is read
            continue


def warn_if_far(name: str, pixels: Pixels, mean: Sequence[float], std: Sequence[float]) -> None:
    """Warns of an image whose bands are many deviations from the mean of the training images."""
    means = _moments(pixels)[0]
    if len(means) == len(mean) and (np.abs(means - mean) > FAR * np.asarray(std)).any():
        found, usual = ([float(f"{value:.3g}") for value in values] for values in (means, mean))
        remedy = f"and those of the training images are {usual}; convert them as the training images were"
        _LOGGER.warning("image=%r: the means of its bands are %s, %s", name, found, remedy)


class BandStatistics(NamedTuple):
    """Statistics of each band over training images."""

    mean: list[float]
    std: list[float]  # 1 if constant
    low: list[float]  # smallest value
    high: list[float]

    def describe(self) -> str:
        """One line for each band, such as "band 1: 0.0046 to 0.0076, mean 0.0061, deviation 0.00088"."""
        rows = zip(self.low, self.high, self.mean, self.std, strict=True)
        lines = [
            f"  band {band}: {low:.3g} to {high:.3g}, mean {mean:.3g}, deviation {std:.3g}"
            for band, (low, high, mean, std) in enumerate(rows, 1)
        ]
        return "\n".join(lines)


def band_statistics(
    domains: Sequence[Domain], splits: Sequence[Split], training: Iterable[int], workers: int = 1
) -> BandStatistics:
    """Computes each band's statistics over the inside parts of training domains. Images weigh the same."""
    images = [(domains[domain], int(position)) for domain in training for position in splits[domain].inside]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        moments = pool.map(lambda image: _moments(image[0].pixels(image[1])), images)
        means, squares, lows, highs = (np.stack(column) for column in zip(*moments, strict=True))
    mean, square = means.mean(axis=0), squares.mean(axis=0)
    variance = square - mean**2
    # A constant band's variance is not exactly 0 but what rounding leaves of it.
    constant = variance <= 1e-12 * np.maximum(square, 1e-30)
    std = np.where(constant, 1.0, np.sqrt(np.maximum(variance, 0)))
    return BandStatistics(mean.tolist(), std.tolist(), lows.min(axis=0).tolist(), highs.max(axis=0).tolist())


def _is_deep(domain: Domain, position: int) -> bool:
    if isinstance(domain.images[position], str | bytes):
        facts = file_facts(domain.file(position))
        return facts is not None and facts.values != EIGHT_BIT
    try:
        return isinstance(domain, FileDomain) and isinstance(domain.pixels(position), Tensor)
    except ImageReadError:
        return False


def with_decided_values(domains: Sequence[Domain], bands: Bands) -> list[Domain]:
    """Decides by some files of each domain whether values are physical: real numbers, or follow a stated scale.

    Raises:
        DataError: Some files of whole numbers state a scale, and others none.
        ArgumentError: Bands are given by their number alone, and files name them in different orders.
    """
    facts = dict[str, FileFacts]()
    for domain in domains:
        if len(domain) and isinstance(domain.images[0], str | bytes):
            files = map(domain.file, _spread(len(domain), MAX_PROBED))
            facts |= {file: known for file in files if (known := file_facts(file)) is not None}
    stated = [file for file, known in facts.items() if known.values == STATED]
    plain = [file for file, known in facts.items() if known.values in (EIGHT_BIT, WHOLE)]
    if stated and plain:
        counts = f"{len(stated)} of {len(facts)} files that were looked at state a scale, such as {stated[0]!r}"
        raise DataError(f"images: {counts}, and {len(plain)} none, such as {plain[0]!r}; give all of them one")
    orders = {known.band_names: file for file, known in facts.items() if any(known.band_names)}
    if bands.is_rgb:  # other words for the same colors are no other order
        colors = Counter(frozenset(names) for names in orders)
        orders = {names: file for names, file in orders.items() if colors[frozenset(names)] > 1}
    if not bands.names and len(orders) > 1:
        (first, one), (second, other), *_ = orders.items()
        listed = f"{one!r} has {', '.join(first)}, and {other!r} {', '.join(second)}"
        remedy = f"files name their bands in different orders: {listed}; give --bands"
        raise ArgumentError.of("in_chans", bands.count, remedy)
    is_physical = bool(facts) and not plain
    return [replace(domain, bands=replace(domain.bands, physical=is_physical)) for domain in domains]


def _moments(pixels: Pixels) -> tuple[np.ndarray, ...]:
    """Means of one image's bands and of their squares, and extremes, in float64."""
    values = pixels.double().numpy() if isinstance(pixels, Tensor) else np.asarray(pixels).transpose(2, 0, 1) / 255
    pixel = (1, 2)  # the axes; values without data are NaN
    means = np.nanmean(values, axis=pixel), np.nanmean(values**2, axis=pixel)
    return *means, np.nanmin(values, axis=pixel), np.nanmax(values, axis=pixel)


def warn_of_copies(domains: Sequence[Domain], held_out: Collection[int]) -> None:
    """Warns of held-out files with the bytes of a training file. Only files of equal size are read."""
    by_size: dict[int, tuple[list[str], list[str]]] = {}
    for index, domain in enumerate(domains):
        if len(domain) and isinstance(domain.images[0], str | bytes):
            for file in map(domain.file, range(len(domain))):
                by_size.setdefault(_size(os.fsencode(file)), ([], []))[index in held_out].append(file)
    copies = list[str]()
    for training, others in by_size.values():
        if training and others:
            digests = {_whole_digest(file) for file in training}
            copies += [file for file in others if _whole_digest(file) in digests]
    if copies:
        text = "%d images of held-out domains are copies of training images, such as %r; their accuracy is no test"
        _LOGGER.warning(text, len(copies), copies[0])


def _whole_digest(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


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
        return _files(*domain.stored(), domain.content)
    if len(images) and isinstance(images[0], str | bytes):
        paths = images if isinstance(images, np.ndarray) and images.dtype.kind == "S" else file_names(images)
        return _files(paths, np.full(len(paths), UNKNOWN), domain.file)
    names = digest("\n".join(domain.file(index) for index in range(len(images))).encode())
    arrays = all(isinstance(image, np.ndarray) for image in images)
    return names, digest(b"".join(image.tobytes() for image in images)) if arrays else None, None


def _files(paths: np.ndarray, sizes: np.ndarray, content: Callable[[int], str | bytes]) -> tuple[str, str, str]:
    """Digests of paths below their common folder, of sizes, which are filled in where unknown, and of a sample."""
    letters = paths[:, None].view(np.uint8)
    shared = (letters == letters[0]).all(axis=0)
    start = bytes(letters[0, : len(shared) if shared.all() else shared.argmin()]).rfind(os.sep.encode()) + 1
    unknown = np.flatnonzero(sizes == UNKNOWN)
    sizes[unknown] = np.fromiter(map(_size, paths[unknown].tolist()), np.int64, len(unknown))
    # The type of the paths may have room for longer ones of other domains
    end = int((np.flatnonzero(letters.any(axis=0)) + 1).max(initial=start))
    sampled = _spread(len(sizes), SAMPLED if 2 * len(np.unique(sizes)) > len(sizes) else SAMPLED_OF_EQUAL)
    sample = digest(*(_content(content(index)) for index in sampled))
    return digest(letters[:, start:end]), digest(sizes), sample


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
