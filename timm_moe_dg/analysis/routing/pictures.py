"""The same picture in several domains: what pictures are called, and which to show side by side."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ...data import Domain, FolderDomain
from ...errors import DataError


def picture_key(path: str) -> str:
    """CLASS/IMAGE of a file, without its extension: what copies of a picture in several domains have in common."""
    return f"{Path(path).parent.name}/{Path(path).stem}"


def picture_names(domain: Domain) -> list[str] | None:
    """A name for each image, by which other domains may hold the same picture: its own, or a file's; None without."""
    if domain.pictures is not None:
        return list(domain.pictures)
    return [picture_key(path) for path in domain.paths] if isinstance(domain, FolderDomain) else None


def class_index(domains: Sequence[Domain], name: str | None) -> int:
    """The index of a class by its name; of the first class for None.

    Raises:
        DataError: There is no such class.
    """
    classes = domains[0].classes
    if name is not None and name not in classes:
        shown = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
        raise DataError(f"class={name!r}: no such class; choose from {shown}")
    return 0 if name is None else classes.index(name)


def choose_pictures(domains: Sequence[Domain], target: int, number: int) -> list[list[int | None]]:
    """Positions of a class's images, a row for each domain; the same picture is in the same column.

    Pictures that more domains share come first. Where domains share none, each row has images of its own.

    Args:
        domains: All rows.
        target: Index of the class.
        number: Columns, at most.

    Returns:
        For each domain a list of positions; None where it lacks the picture.

    Raises:
        DataError: No domain has an image of the class.
    """
    own = [[position for position, label in enumerate(domain.targets) if label == target] for domain in domains]
    if not any(own):
        raise DataError(f"class={domains[0].classes[target]!r}: no domain has an image of it; name another class")
    names = [picture_names(domain) for domain in domains]
    at = [{each[p]: p for p in rows} for each, rows in zip(names, own, strict=True) if each is not None]
    held = Counter(name for positions in at for name in positions)
    if len(at) < len(domains) or max(held.values()) < 2:
        width = min(number, max(map(len, own)))
        return [[*rows[:width], *([None] * (width - len(rows)))] for rows in own]
    columns = [name for name, _ in held.most_common(number)]
    return [[positions.get(name) for name in columns] for positions in at]
