"""Who is trained on and who is held out: seeds, the split of a domain, and the choice of test domains.

Seeds and splits are DomainBed's, number for number, so that results of both can share a table.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from ..errors import ProtocolError
from .domains import Domain, Split

SEED_RANGE = 2**31


def seed_hash(*parts: object) -> int:
    """Derives a seed from anything with a stable `str`: MD5 of the tuple's text, modulo 2**31 (DomainBed's rule)."""
    digest = hashlib.md5(str(parts).encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % SEED_RANGE


def split_domain(size: int, domain: int, *, trial_seed: int, holdout_fraction: float = 0.2) -> Split:
    """Splits one domain as DomainBed does (main split, seed_hash(trial_seed, domain)).

    Args:
        size: Number of images in the domain.
        domain: The domain's position in the benchmark, held-out domains counted.
        trial_seed: Repetition of the experiment.
        holdout_fraction: Share of the images that goes "out", rounded down.
    """
    positions = np.arange(size)  # which is shuffled as DomainBed's list is
    np.random.RandomState(seed_hash(trial_seed, domain)).shuffle(positions)
    held_out = int(size * holdout_fraction)
    return Split(inside=positions[held_out:], outside=positions[:held_out])


def split_domains(
    domains: Sequence[Domain], training: Sequence[int], *, trial_seed: int, holdout_fraction: float = 0.2
) -> list[Split]:
    """Splits every domain; see `split_domain`. A domain with an official `split` keeps it, an empty part included.

    Args:
        domains: All domains of the benchmark.
        training: Positions of those that are trained on; each of them that is split here must keep images
            for validation.
        trial_seed: Repetition of the experiment.
        holdout_fraction: Share of each domain that goes "out".

    Raises:
        ProtocolError: `holdout_fraction` is not between 0 and 1, or leaves a training domain nothing to validate on.
    """
    if not 0 < holdout_fraction < 1:
        raise ProtocolError.of("holdout_fraction", holdout_fraction, "give a share between 0 and 1, such as 0.2")
    splits = [
        domain.split or split_domain(len(domain), position, trial_seed=trial_seed, holdout_fraction=holdout_fraction)
        for position, domain in enumerate(domains)
    ]
    for position in training:
        if domains[position].split is None and not len(splits[position].outside):
            raise ProtocolError.of(
                "holdout_fraction",
                holdout_fraction,
                f"domain {domains[position].name!r} has {len(domains[position])} images, which leaves none to validate "
                "on; add images or raise the fraction",
            )
    return splits


def evaluation_only(domains: Sequence[Domain]) -> list[int]:
    """Returns the positions of the domains that the benchmark sets apart for testing, by their `role`; often none."""
    return [position for position, domain in enumerate(domains) if domain.role != "train"]


def training_domains(names: Sequence[str], test_domains: Sequence[int], set_apart: Sequence[int] = ()) -> list[int]:
    """Returns the positions of the domains that are trained on: all but the test domains.

    Args:
        names: Domain names, in the benchmark's order.
        test_domains: Positions of the domains to hold out.
        set_apart: Positions that can only be test domains.

    Raises:
        ProtocolError: A position does not exist or comes twice, a domain that is set apart is missing, or nothing is
            left to train on or to test on.
    """
    listing = ", ".join(f"{position} {name}" for position, name in enumerate(names))
    unknown = [position for position in test_domains if not 0 <= position < len(names)]
    if unknown or not test_domains or len(set(test_domains)) < len(test_domains):
        raise ProtocolError.of("test_domains", list(test_domains), f"name different domains out of: {listing}")
    missing = [position for position in set_apart if position not in test_domains]
    if missing:
        remedy = f"the data set apart {missing} for testing too; add them"
        raise ProtocolError.of("test_domains", list(test_domains), remedy)
    kept = [position for position in range(len(names)) if position not in test_domains]
    if not kept:
        raise ProtocolError.of(
            "test_domains",
            list(test_domains),
            f"every domain is held out and none is left to train on; hold out fewer of: {listing}",
        )
    return kept
