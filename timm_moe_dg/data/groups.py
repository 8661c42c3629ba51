"""Groups of images that stay together in splits, such as those of a patient, a plot, a scene or a photograph."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from ..errors import ArgumentError
from .class_names import check_spellings, normalized
from .domains import Domain
from .readers.csv_tables import below, check_unique, name_of_field, parsed, read_csv, require_columns

EXAMPLE = r"such as '(P\d+)_'"


def image_groups(domains: Sequence[Domain], args: Mapping[str, Any]) -> list[list[str]] | None:
    """Returns the name of each image's group, by domain; None if images are split one by one.

    Args:
        domains: Domains of image files.
        args: Options of a run. With `split_by_photograph`, files with the same name but for the extension are a group.
            `group_column` is a column of metadata.csv, or a regular expression that is searched in paths below
            `data_dir`. The texts of its capture groups are the name. `columns` may rename the column `path`.
    """
    given = args.get("group_column")
    if not (given or args.get("split_by_photograph")):
        return None
    if given and args.get("split_by_photograph"):
        raise ArgumentError.of("group_column", given, "add --no-split-by-photograph, since images have one group each")
    argument, value = ("group_column", given) if given else ("split_by_photograph", True)
    for domain in domains:
        if len(domain) and not isinstance(domain.images[0], str | bytes):
            raise ArgumentError.of(argument, value, f"domain {domain.name!r} is not made of image files; leave it out")
    paths = [[domain.file(index) for index in range(len(domain))] for domain in domains]
    if not given:
        return [[PurePath(path).stem for path in files] for files in paths]
    root = Path(args.get("data_dir") or "")
    names = _by_pattern(given, root, paths) if "(" in given else _by_column(given, root, paths, args.get("columns"))
    if lacking := [path for files in paths for path in files if path not in names]:
        place = "does not match" if "(" in given else "has no row in metadata.csv for"
        many = f"{len(lacking)} of {sum(map(len, paths))} images, such as {os.path.relpath(lacking[0], root)!r}"
        raise ArgumentError.of("group_column", given, f"{place} {many}; every image needs a group")
    check_spellings(f"group_column={given!r}", dict.fromkeys(names.values(), ("the data",)), "groups")
    return [[names[path] for path in files] for files in paths]


def _by_pattern(pattern: str, root: Path, paths: Sequence[Sequence[str]]) -> dict[str, str]:
    try:
        search = re.compile(pattern).search
    except re.error as error:
        remedy = f"is no regular expression ({error}); give one {EXAMPLE}"
        raise ArgumentError.of("group_column", pattern, remedy) from error
    matches = {path: search(Path(os.path.relpath(path, root)).as_posix()) for files in paths for path in files}
    names = {path: "/".join(filter(None, match.groups())) for path, match in matches.items() if match}
    return {path: name for path, name in names.items() if name}


def _by_column(
    column: str, root: Path, paths: Sequence[Sequence[str]], columns: Mapping[str, str] | None
) -> dict[str, str]:
    table, path_column = root / "metadata.csv", str((columns or {}).get("path", "path"))
    if not table.is_file():
        remedy = f"is a column, and {str(root)!r} holds no metadata.csv; write it, or give a pattern {EXAMPLE}"
        raise ArgumentError.of("group_column", column, remedy)
    fields = read_csv(table, [path_column])
    require_columns(table, list(fields), [column], f"name one of these, or give a pattern {EXAMPLE}")
    rows = [normalized(path) for path in parsed(table, fields, path_column, below(root), "a path below the folder")]
    check_unique(table, fields, path_column, rows)
    names = dict(zip(rows, parsed(table, fields, column, name_of_field, "the name of a group"), strict=True))
    return {path: names[normalized(path)] for files in paths for path in files if normalized(path) in names}
