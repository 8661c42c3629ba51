"""Seeds, splits of domains and choices of test domains, number for number as in DomainBed."""

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np

from ..errors import ArgumentError, ProtocolError
from .domains import Domain, Split, check_spellings, listed, normalized
from .readers.csv_tables import below, name_parser, read_csv

NO_DOMAIN = "none"  # in place of test domains
HELD_OUT_GROUPS = 0.2  # share of the groups of several domains to validate on, and again to test on
EXAMPLE = r"such as '(P\d+)_'"  # of a pattern of groups

Part = Literal["train", "validation", "test"]
_LOGGER = logging.getLogger(__name__)


def seed_hash(*parts: object) -> int:
    """Derives a seed from values with a stable `str`: MD5 of the tuple's text, modulo 2**31 (DomainBed's rule)."""
    digest = hashlib.md5(str(parts).encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % 2**31


def split_domain(size: int, domain: int, *, trial_seed: int, holdout_fraction: float = 0.2) -> Split:
    """DomainBed's split by seed_hash(trial_seed, position). The share `holdout_fraction`, rounded down, goes "out"."""
    positions = np.arange(size)
    # RandomState shuffles an array as it shuffles DomainBed's list.
    np.random.RandomState(seed_hash(trial_seed, domain)).shuffle(positions)
    held_out = int(size * holdout_fraction)
    return Split(inside=positions[held_out:], outside=positions[:held_out])


def split_domains(
    domains: Sequence[Domain],
    training: Sequence[int],
    *,
    trial_seed: int,
    holdout_fraction: float = 0.2,
    positions: Sequence[int] | None = None,
) -> list[Split]:
    """Splits every domain by `split_domain`, except those with an official `split`."""
    if not 0 < holdout_fraction < 1:
        raise ProtocolError.of("holdout_fraction", holdout_fraction, "give a share between 0 and 1, such as 0.2")
    splits = [
        domain.split or split_domain(len(domain), position, trial_seed=trial_seed, holdout_fraction=holdout_fraction)
        for position, domain in zip(positions or range(len(domains)), domains, strict=True)
    ]
    for position in training:
        if domains[position].split is None and not len(splits[position].outside):
            images = f"domain {domains[position].name!r} has {len(domains[position])} images"
            remedy = f"{images}, which leaves none to validate on; add images or raise the fraction"
            raise ProtocolError.of("holdout_fraction", holdout_fraction, remedy)
    return splits


def make_splits(
    domains: Sequence[Domain],
    training: Sequence[int],
    args: Mapping[str, Any],
    *,
    positions: Sequence[int] | None = None,
    checking: bool = False,
) -> list[Split]:
    """Splits every domain as a run with these options does; see `split_domains` and `split_by_group`.

    With `checking`, training domains need validation images.
    """
    how = {"trial_seed": args["trial_seed"], "holdout_fraction": args.get("holdout_fraction", 0.2)}
    by_photograph = bool(args.get("split_by_photograph"))
    groups = image_groups(domains, args)
    if groups is None:
        return split_domains(domains, training if checking else [], **how, positions=positions)
    splits = split_by_group(domains, training, groups, **how, positions=positions, all_shared=by_photograph)
    if checking:
        argument = "split_by_photograph=True" if by_photograph else f"group_column={args['group_column']!r}"
        check_groups(domains, training, groups, splits, argument)
        if not by_photograph:
            _log_groups(argument, groups)
    return splits


def _log_groups(argument: str, groups: Sequence[Sequence[str]]) -> None:
    counts = Counter(name for members in groups for name in set(members))
    if len(counts) == sum(map(len, groups)):
        remedy = "every image has a group of its own, which changes nothing; name another column, or leave it out"
        raise ArgumentError(f"{argument}: {remedy}")
    shared = [name for name, count in counts.items() if count > 1]
    level = logging.WARNING if shared else logging.INFO
    remark = f" ({listed(shared)}), which keep one part in all; some of their images are in no split" if shared else ""
    _LOGGER.log(level, f"{argument}: {len(counts)} groups, {len(shared)} of them in several domains{remark}")


def group_squares(splits: Sequence[Split], groups: Sequence[Sequence[str]]) -> list[list[int]]:
    """Sums (number of images)^2 over the groups in both splits of each domain. Without groups the list is empty."""
    squares = []
    for split, members in zip(splits, groups, strict=False):
        counts = [Counter(members[row] for row in rows) for rows in (split.inside, split.outside)]
        squares.append([sum(number**2 for number in count.values()) for count in counts])
    return squares


def group_part(name: str) -> Part:
    """Assigns a group to a part by a hash of its name: 60% train, 20% validation, 20% test.

    Domain and trial seed have no influence. The hash is MD5, so that every machine agrees.

    >>> group_part("Black_Footed_Albatross_0046_18")
    'test'
    """
    digest = hashlib.md5(name.encode(), usedforsecurity=False).digest()
    # The first 64 bits as a fraction of their range
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    if fraction < HELD_OUT_GROUPS:
        return "test"
    return "validation" if fraction < 2 * HELD_OUT_GROUPS else "train"


def split_by_group(
    domains: Sequence[Domain],
    training: Sequence[int],
    groups: Sequence[Sequence[str]],
    *,
    trial_seed: int,
    holdout_fraction: float,
    positions: Sequence[int] | None = None,
    all_shared: bool = False,
) -> list[Split]:
    """Splits domains so that no group of images is trained on, and validated or tested on as well.

    The groups of one domain are shuffled by seed. The first go out, as many as come nearest to the `holdout_fraction`
    of the images. A group of several domains has the same `group_part` in all. Its images are `inside` a training
    domain if it is for training, `inside` a test domain if it is for testing, and `outside` if it is for validation.
    Otherwise they are in neither. `all_shared` treats all groups so. Official splits stay. See `image_groups` for
    `groups` and `split_domains` for the other arguments.
    """
    # Split domain by domain, most shared groups of a test domain would be trained on in the other domains
    counts = Counter(name for members in groups for name in set(members))
    shared = {name: group_part(name) for name, count in counts.items() if all_shared or count > 1}
    splits = []
    for index, (domain, members) in enumerate(zip(domains, groups, strict=True)):
        seed = seed_hash(trial_seed, positions[index] if positions else index)
        out = _first_groups([name for name in members if name not in shared], seed, holdout_fraction)
        inside: Part = "train" if index in training else "test"
        parts = [shared.get(name, "validation" if name in out else inside) for name in members]
        split = Split(*(np.flatnonzero(np.array(parts) == part) for part in (inside, "validation")))
        splits.append(domain.split or split)
    return splits


def _first_groups(members: Sequence[str], seed: int, share: float) -> set[str]:
    """The first shuffled groups that hold about a share of the images: at least one, and not all."""
    images = Counter(members)
    names = sorted(images)
    np.random.RandomState(seed).shuffle(names)
    sizes = np.cumsum([images[name] for name in names])
    nearest = 1 + np.abs(sizes - share * len(members)).argmin() if names else 0
    return set(names[: min(nearest, max(len(names) - 1, 0))])


def check_groups(
    domains: Sequence[Domain],
    training: Sequence[int],
    groups: Sequence[Sequence[str]],
    splits: Sequence[Split],
    argument: str,
) -> None:
    """Refuses domains without images in a part, and official splits that divide groups; logs what is shared or alone.

    `argument` is the option that groups the images, with its value.
    """
    names: dict[str, set[str]] = {"training": set(), "validation": set(), "test": set()}
    for index, (domain, members, split) in enumerate(zip(domains, groups, splits, strict=True)):
        parts = {"training": split.inside, "validation": split.outside} if index in training else {"test": split.inside}
        for part, rows in parts.items():
            if not len(rows) and not domain.split:
                which = f"{len(members)} images of {listed(set(members))}; add images of other groups"
                raise ProtocolError(f"{argument}: domain {domain.name!r} has no {part} group among its {which}")
            names[part] |= {members[row] for row in rows}
    for first, second in combinations(names, 2):
        if both := names[first] & names[second]:
            which = f"{first} and {second} images of {listed(both)}; correct its split column, or remove it"
            raise ProtocolError(f"{argument}: the data's own split has {which}")
    pairs = {pair for index in training for pair in zip(domains[index].targets, groups[index], strict=True)}
    classes = Counter(int(target) for target, _ in pairs)
    if alone := [repr(domains[0].classes[target]) for target, count in classes.items() if count == 1]:
        _LOGGER.warning(
            "one group holds all training images of the classes %s: training or validation lacks them", listed(alone)
        )


def evaluation_only(domains: Sequence[Domain]) -> list[int]:
    """Returns the positions of the domains that the benchmark reserves for testing by their `role`."""
    return [position for position, domain in enumerate(domains) if domain.role != "train"]


def hold_out(domains: Sequence[Domain], test_domains: Sequence[int]) -> list[Domain]:
    """Returns the domains with the roles that they have when `test_domains` are held out.

    Data with reserved test domains have "id" domains of the groups that are trained on. If no training domain of a
    group is left, all domains of the group are "ood". Other data are returned as they are.
    """
    if not evaluation_only(domains):
        return list(domains)
    trained = {domain.group for index, domain in enumerate(domains) if index not in test_domains}
    held_out = {domains[index].group for index in test_domains if domains[index].role == "train"} - trained
    return [replace(domain, role="ood") if domain.group in held_out else domain for domain in domains]


def domain_positions(
    given: Sequence[int | str], names: Sequence[str], argument: str = "test_domains", groups: Sequence[str] = ()
) -> list[int]:
    """Returns the positions of domains, given as positions (numbers), or as texts that are names or positions.

    The name of a group stands for all its domains. As test domains, the text "none" alone gives no position.
    """
    # Listings of folders may hold another form of the same letters
    given = [normalized(value) if isinstance(value, str) else value for value in given]
    names, groups = (list(map(normalized, texts)) for texts in (names, groups))
    if list(given) == [NO_DOMAIN] and argument == "test_domains":
        if NO_DOMAIN in names:
            remedy = f"means no domain, and is the name of one; give @{names.index(NO_DOMAIN)} for it, or rename it"
            raise ProtocolError.of(argument, [NO_DOMAIN], remedy)
        return []
    positions = []
    for value in given:
        members = [position for position, group in enumerate(groups) if group == value and value not in names]
        positions += members or [value if isinstance(value, int) else _domain_position(value, names, argument)]
    if not set(positions) <= set(range(len(names))):
        raise ProtocolError.of(argument, list(given), f"name domains out of: {_numbered(names)}")
    return positions


def test_positions(given: Sequence[int | str] | None, domains: Sequence[Domain]) -> list[int]:
    """Returns the positions of test domains, see `domain_positions`, with those that the data reserves for testing.

    None stands for these alone, or for the first domain if there are none.
    """
    reserved = evaluation_only(domains)
    if given is None:
        return reserved or [0]
    names, groups = [domain.name for domain in domains], [domain.group for domain in domains]
    positions = domain_positions(given, names, groups=groups)
    # Sorted, so that a name and its group are the same run
    return sorted([*positions, *(set(reserved) - set(positions))]) if reserved else positions


def _domain_position(text: str, names: Sequence[str], argument: str) -> int:
    number = int(text) if text.isdecimal() and str(int(text)) == text else None
    # 1 could mean a folder 01 too
    alike = [text] if text in names else [name for name in names if name.isdecimal() and int(name) == number]
    if number is not None and number < len(names) and alike and names[number] not in alike:
        choices = f"@{number} for {names[number]!r}, or @{names.index(alike[0])} for {alike[0]!r}"
        raise ProtocolError.of(argument, [text], f"is a position and the name of another domain; give {choices}")
    if alike:
        return names.index(alike[0])
    if number is not None:
        return number
    raise ProtocolError.of(argument, [text], f"no domain is called {text}; choose from: {_numbered(names)}")


def _numbered(names: Sequence[str]) -> str:
    return ", ".join(f"{position} {name}" for position, name in enumerate(names))


def training_domains(names: Sequence[str], test_domains: Sequence[int]) -> list[int]:
    """Returns the positions of the training domains: all but the test domains."""
    unknown = [position for position in test_domains if not 0 <= position < len(names)]
    if unknown or len(set(test_domains)) < len(test_domains):
        raise ProtocolError.of("test_domains", list(test_domains), f"name different domains out of: {_numbered(names)}")
    training = [position for position in range(len(names)) if position not in test_domains]
    if not training:
        remedy = f"every domain is held out and none is left to train on; hold out fewer of: {_numbered(names)}"
        raise ProtocolError.of("test_domains", list(test_domains), remedy)
    return training


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
    check_spellings(f"group_column={given!r}", ((name, "the data") for name in names.values()), "groups")
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
    path_column = str((columns or {}).get("path", "path"))
    if not (root / "metadata.csv").is_file():
        remedy = f"is a column, and {str(root)!r} holds no metadata.csv; write it, or give a pattern {EXAMPLE}"
        raise ArgumentError.of("group_column", column, remedy)
    table = read_csv(root / "metadata.csv", [path_column])
    table.require([column], f"name one of these, or give a pattern {EXAMPLE}")
    rows = [normalized(path) for path in table.parsed(path_column, below(root), "a path below the folder")]
    table.check_unique(path_column, rows)
    names = dict(zip(rows, table.parsed(column, name_parser(columns), "the name of a group"), strict=True))
    return {path: names[normalized(path)] for files in paths for path in files if normalized(path) in names}
