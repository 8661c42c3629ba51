"""Digits on the globe: an offline benchmark of concept shift, where a label's meaning depends on the place.

Format: scikit-learn's 1,797 real digits (see `digits`), enlarged to 32 x 32 pixels, each placed at coordinates in five
training continents, or in the held-out one. The image says nothing about the place.
Labels: a continent writes its digits as they are, or swaps 6 and 9, or exchanges even and odd (0 with 1, 2 with 3,
...), or does both. Between continents one rule gives way to the other smoothly: which one holds at a point is drawn
with the probabilities of `rule_probabilities`. Whoever ignores the place can follow one rule only.
Splits: train, id_val and id_test on the five continents, ood_test on Oceania, whose rule is the plain one, as in most
places, but whose coordinates were never seen. No digit is in two splits; within a split every digit is placed once on
each continent, so that continents differ in nothing but the rule.
"""

import numpy as np

from .digits import CLASSES, enlarge, load_digits
from .places import Places, PlacesDomain, domains_of

# Center (longitude, latitude) and radius of a cap, degrees; then the rule
CONTINENTS = {
    "Africa": (20.0, 2.0, 28.0, "both"),
    "Asia": (92.0, 45.0, 28.0, "swap"),
    "Europe": (15.0, 51.0, 19.0, "plain"),
    "North America": (-100.0, 46.0, 26.0, "plain"),
    "South America": (-60.0, -14.0, 26.0, "parity"),
    "Oceania": (134.0, -26.0, 16.0, "plain"),
}
HELD_OUT = "Oceania"
BORDER = 5.0  # degrees over which one rule's odds against its neighbor fall by a factor of e
SIZES = {"train": 997, "id_val": 200, "id_test": 300, "ood_test": 300}
SEED = 0

_DIGITS = np.arange(10)
_SWAP = np.array([0, 1, 2, 3, 4, 5, 9, 7, 8, 6])
_PARITY = _DIGITS ^ 1
RULES = {"plain": _DIGITS, "swap": _SWAP, "parity": _PARITY, "both": _SWAP[_PARITY]}


def geo_digits() -> list[PlacesDomain]:
    """Builds the benchmark; it is the same every time.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    images, digits = load_digits("geo_digits")
    random = np.random.default_rng(SEED)
    dealt = random.permutation(len(images))
    rows, columns = [], []
    for part, size in SIZES.items():
        own, dealt = dealt[:size], dealt[size:]
        for continent in CONTINENTS:
            if (continent == HELD_OUT) == (part == "ood_test"):
                rows.append(own)
                columns.append((part, continent))
    sizes = [len(own) for own in rows]
    parts, groups = (np.repeat([column[kind] for column in columns], sizes) for kind in (0, 1))
    lonlat = np.concatenate([_points(random, name, size) for (_, name), size in zip(columns, sizes, strict=True)])
    order = np.concatenate(rows)
    large = [enlarge(image) for image in images]
    pixels = [large[index] for index in order]
    return domains_of(Places(CLASSES, pixels, _labels(random, digits[order], lonlat), lonlat, parts, groups))


def rule_probabilities(lonlat: np.ndarray) -> np.ndarray:
    """How likely each rule of `RULES` holds at each point: a softmax over continents of (radius - distance) / BORDER.

    Args:
        lonlat: (N, 2) degrees.

    Returns:
        (N, 4), rows sum to 1.
    """
    depth = np.stack([cap[2] - _distance(lonlat, cap[:2]) for cap in CONTINENTS.values()], axis=1) / BORDER
    odds = np.exp(depth - depth.max(axis=1, keepdims=True))
    shares = odds / odds.sum(axis=1, keepdims=True)
    member = np.array([[cap[3] == rule for rule in RULES] for cap in CONTINENTS.values()])
    return shares @ member


def _labels(random: np.random.Generator, digits: np.ndarray, lonlat: np.ndarray) -> np.ndarray:
    thresholds = rule_probabilities(lonlat).cumsum(axis=1)
    rule = (random.random((len(digits), 1)) > thresholds[:, :-1]).sum(axis=1)
    return np.stack(list(RULES.values()))[rule, digits]


def _points(random: np.random.Generator, continent: str, number: int) -> np.ndarray:
    """Draws points uniformly from a continent's cap, as (number, 2) float32 degrees."""
    longitude, latitude, radius, _ = CONTINENTS[continent]
    height = random.uniform(np.cos(np.radians(radius)), 1.0, number)  # equal heights cut a cap into equal areas
    turn = random.uniform(0.0, 2 * np.pi, number)
    width = np.sqrt(1 - height**2)
    north, east = width * np.cos(turn), width * np.sin(turn)
    sine, cosine = np.sin(np.radians(latitude)), np.cos(np.radians(latitude))
    out = height * cosine - north * sine
    up = height * sine + north * cosine
    degrees = [longitude + np.degrees(np.arctan2(east, out)), np.degrees(np.arcsin(up))]
    wrapped = (degrees[0] + 180.0) % 360.0 - 180.0
    return np.stack([wrapped, degrees[1]], axis=1).astype(np.float32)


def _distance(lonlat: np.ndarray, center: tuple[float, float]) -> np.ndarray:
    """Great-circle distance of points (N, 2) to a center, in degrees."""
    lon, lat = np.radians(lonlat.astype(np.float64)).T
    lon0, lat0 = np.radians(center)
    cosine = np.sin(lat) * np.sin(lat0) + np.cos(lat) * np.cos(lat0) * np.cos(lon - lon0)
    return np.degrees(np.arccos(cosine.clip(-1.0, 1.0)))
