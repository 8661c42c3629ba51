"""DomainNet, without the images that its authors later listed as duplicates.

Format: DOMAIN/CLASS/IMAGE. The list, which DomainBed publishes as domain_net_duplicates.txt, has one image to a line,
such as clipart/bird/clipart_032_000255.jpg; it is used if it lies in the data folder, beside or among the domains. A
copy from which the listed images were deleted already, as DomainBed's download does, needs no list.
"""

import logging
from pathlib import Path

from ...errors import DataError
from ..domains import DataDir
from .folders import FolderDomain, read_folder

DUPLICATES = "domain_net_duplicates.txt"

_LOGGER = logging.getLogger(__name__)


def read_domain_net(data_dir: DataDir) -> list[FolderDomain]:
    """Reads the domains and leaves out what is listed; says how many images that were.

    Raises:
        DataError: See `read_folder`; or the list is no text.
    """
    if data_dir is None:
        raise DataError("data_dir=None: give --data-dir, the folder of DomainNet's domains")
    root = Path(data_dir)
    domains = read_folder(root)
    lists = [path for path in (root / DUPLICATES, root.parent / DUPLICATES) if path.is_file()]
    if not lists:
        return domains
    listed = _read_list(lists[0])
    kept = [_without(root, domain, listed) for domain in domains]
    left_out = sum(map(len, domains)) - sum(map(len, kept))
    _LOGGER.info("DomainNet: %d of the %d images listed in %s left out", left_out, len(listed), lists[0])
    return kept


def _read_list(path: Path) -> frozenset[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r}: cannot be read as a list of images ({error})") from error
    return frozenset(line.strip() for line in lines if line.strip())


def _without(root: Path, domain: FolderDomain, listed: frozenset[str]) -> FolderDomain:
    names = [Path(path).relative_to(root).as_posix() for path in domain.paths]
    return domain.without({position for position, name in enumerate(names) if name in listed})
