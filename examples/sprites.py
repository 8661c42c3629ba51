"""Sprites: synthetic animals in five styles, with the part of every pixel known. Importing this file registers them.

    timm-moe-dg visualize data --import examples.sprites --dataset sprites

Format: 400 animals of 48 x 48 pixels, drawn from signed distances with numpy. Nothing is downloaded or read.
Classes: eight, all combinations of a round or square body, pointed or round ears, and a long or short tail. The shape
of head and legs, size, position and colors are random and independent of the class.
Domains: paper (plain light ground, a color for each part), night (dark ground, light colors), stripes (striped ground,
animals of one color), sketch (black lines on white) and turned (paper's, turned by 30 degrees counter-clockwise). Every
animal is in all five domains at the same position. A held-out domain therefore shows known animals in an unknown style.
"""

import math
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from typing import ClassVar, NamedTuple

import numpy as np
from PIL import Image

from timm_moe_dg.data import Benchmark, Domain, register_benchmark
from timm_moe_dg.data.benchmark import DEFAULTS

SIZE = 48  # pixels
PARTS = ("background", "tail", "left leg", "right leg", "body", "left ear", "right ear", "head")  # in painting order
SHAPES = {
    "body": ("round", "square"),
    "ears": ("pointed", "round"),
    "tail": ("long", "short"),
    "head": ("round", "square"),
    "legs": ("thin", "thick"),
}
DECISIVE = ("body", "ears", "tail")
CLASSES = tuple("-".join(shapes) for shapes in product(*(SHAPES[name] for name in DECISIVE)))
ATTRIBUTES = tuple(f"{name}::{shape}" for name, shapes in SHAPES.items() for shape in shapes)
# Colors of tail, legs, body, ears and head, from 0 to 1
_PAPER = ((0.8, 0.4, 0.2), (0.2, 0.3, 0.6), (0.5, 0.3, 0.2), (0.7, 0.2, 0.3), (0.3, 0.5, 0.3))
_NIGHT = ((0.4, 0.8, 0.8), (0.8, 0.8, 0.4), (0.6, 0.6, 0.8), (0.4, 0.8, 0.5), (0.8, 0.6, 0.7))
_OF_PARTS = [0, 1, 1, 2, 3, 3, 4]  # the color of each part without the background
ANGLES = {"paper": 0.0, "night": 0.0, "stripes": 0.0, "sketch": 0.0, "turned": 30.0}


@dataclass(frozen=True, eq=False)
class SpritesDomain(Domain[np.ndarray]):
    """The animals in one style: `images` are uint8 (48, 48, 3)."""

    part_maps: np.ndarray = field(kw_only=True, repr=False)  # int64 (N, 48, 48), indices of `part_names`
    attributes: np.ndarray = field(kw_only=True, repr=False)  # bool (N, A), which attributes each animal has
    part_names: ClassVar[tuple[str, ...]] = PARTS  # the first is the background
    attribute_names: ClassVar[tuple[str, ...]] = ATTRIBUTES  # GROUP::VALUE

    def image(self, index: int) -> Image.Image:
        """Returns one animal as an RGB image of 48 x 48 pixels."""
        return Image.fromarray(self.images[index])


class Animals(NamedTuple):
    """Shapes, positions, sizes and colors of N animals."""

    shapes: dict[str, np.ndarray]  # for each name in `SHAPES`, (N,) the index of the shape
    offset: np.ndarray  # (N, 2) pixels from the middle, right and down
    scale: np.ndarray  # (N,) size
    colors: np.ndarray  # (N, 8, 3) of the parts, the background's first, from 0 to 1


# Drawing takes a second, and a process may read the benchmark several times.
@cache
def sprites(num_pictures: int = 400, seed: int = 0) -> tuple[SpritesDomain, ...]:
    """Draws the five domains, the same every time. The classes take turns."""
    targets = np.arange(num_pictures) % len(CLASSES)
    animals = draw_animals(targets, np.random.default_rng(seed))
    attributes = np.stack([animals.shapes[name] == value for name in SHAPES for value in (0, 1)], axis=1)
    names = [f"animal_{index:04d}" for index in range(num_pictures)]
    domain = partial(SpritesDomain, classes=CLASSES, targets=targets.tolist(), attributes=attributes, pictures=names)
    domains = []
    for name, angle in ANGLES.items():
        distances = part_distances(animals, angle)
        images = (_painted(name, animals, distances) * 255).round().astype(np.uint8)
        domains.append(domain(name, images=list(images), part_maps=_part_maps(distances), angle=angle))
    return tuple(domains)


def draw_animals(targets: np.ndarray, random: np.random.Generator) -> Animals:
    """Draws all properties of animals that do not follow from their classes (N,)."""
    number = len(targets)
    shapes = {name: targets >> (len(DECISIVE) - 1 - position) & 1 for position, name in enumerate(DECISIVE)}
    shapes |= {name: random.integers(0, 2, number) for name in SHAPES if name not in DECISIVE}
    offset = random.uniform(-1.5, 1.5, (number, 2)).astype(np.float32)
    scale = random.uniform(0.88, 1.0, (number,)).astype(np.float32)
    return Animals(shapes, offset, scale, random.random((number, len(PARTS), 3), dtype=np.float32))


def part_distances(animals: Animals, angle: float = 0.0) -> np.ndarray:
    """Signed distances of pixels to all parts but the background: (7, N, 48, 48) pixels, negative inside."""
    # float32 throughout: half the memory of (7, N, 48, 48) distances
    middle = np.arange(SIZE, dtype=np.float32) - np.float32((SIZE - 1) / 2)
    down, right = np.meshgrid(middle, middle, indexing="ij")
    sine, cosine = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    # Every pixel's coordinates turned back, where the animals stand upright
    upright = right * cosine - down * sine, right * sine + down * cosine
    scale = animals.scale[:, None, None]
    x, y = ((pixels - animals.offset[:, axis, None, None]) / scale for axis, pixels in enumerate(upright))
    second = {name: shape[:, None, None].astype(bool) for name, shape in animals.shapes.items()}
    leg_width = np.where(second["legs"], np.float32(3.8), np.float32(2.4))
    long_tail, short_tail = _segment(x, y, (7.0, 6.0), (16.5, -5.0)), _segment(x, y, (7.0, 6.0), (11.5, 2.0))
    parts = {
        "tail": np.where(second["tail"], short_tail, long_tail) - 2.8,
        "left leg": _box(x + 5.0, y - 17.5, leg_width, 4.5),
        "right leg": _box(x - 5.0, y - 17.5, leg_width, 4.5),
        "body": np.where(second["body"], _box(x, y - 5.0, 10.0, 9.6), np.hypot(x, y - 5.0) - 9.6),
        "left ear": _ear(-x, y, second["ears"]),
        "right ear": _ear(x, y, second["ears"]),
        "head": np.where(second["head"], _box(x, y + 8.5, 6.4, 6.4), np.hypot(x, y + 8.5) - 7.3),
    }
    return np.stack([parts[name] for name in PARTS[1:]]) * scale


def _ear(x: np.ndarray, y: np.ndarray, is_round: np.ndarray) -> np.ndarray:
    """Distance to the right ear, a triangle with its tip up or a disc. The left ear is its mirror image."""
    outer = 0.99 * (x - 8.5) + 0.1 * (y + 11.0)
    inner = -0.77 * (x - 6.0) - 0.64 * (y + 22.0)
    pointed = np.maximum(np.maximum(outer, inner), y + 9.0)
    return np.where(is_round, np.hypot(x - 7.0, y + 15.0) - 5.4, pointed)


def _box(x: np.ndarray, y: np.ndarray, width: np.ndarray | float, height: float) -> np.ndarray:
    """Distance to a box about 0, by the larger excess over half its width or height."""
    return np.maximum(abs(x) - width, abs(y) - height)


def _segment(x: np.ndarray, y: np.ndarray, start: tuple[float, float], end: tuple[float, float]) -> np.ndarray:
    along_x, along_y = end[0] - start[0], end[1] - start[1]
    away_x, away_y = x - start[0], y - start[1]
    share = ((away_x * along_x + away_y * along_y) / (along_x**2 + along_y**2)).clip(0.0, 1.0)
    return np.hypot(away_x - share * along_x, away_y - share * along_y)


def _part_maps(distances: np.ndarray) -> np.ndarray:
    # Parts are listed in painting order, so the last one that a pixel lies in is on top. The background is 0.
    inside = distances < 0
    topmost = len(distances) - inside[::-1].argmax(axis=0)
    return np.where(inside.any(axis=0), topmost, 0)


def _paint(ground: np.ndarray, colors: np.ndarray, distances: np.ndarray, line: float = 0.0) -> np.ndarray:
    """Paints the parts over the ground, with smooth edges, and with black outlines if `line` gives their width."""
    canvas = np.broadcast_to(ground, (*distances.shape[1:], 3))
    for part, distance in enumerate(distances):
        cover = (0.5 - distance).clip(0.0, 1.0)[..., None]
        canvas = canvas * (1 - cover) + cover * colors[:, part, None, None]
        if line:
            canvas = canvas * (1 - (line - abs(distance)).clip(0.0, 1.0)[..., None])
    return canvas


def _painted(style: str, animals: Animals, distances: np.ndarray) -> np.ndarray:
    """Animals in a style: (N, 48, 48, 3), from 0 to 1."""
    colors = animals.colors
    first, noise = colors[:, :1, None], 0.3 * (colors[:, 1:] - 0.5)
    if style == "night":
        return _paint(0.15 * first, np.array(_NIGHT, np.float32)[_OF_PARTS] + noise, distances)
    if style == "stripes":
        diagonal = np.add.outer(np.arange(SIZE), np.arange(SIZE))
        stripe = (np.sin(diagonal[None] * (0.5 + 0.5 * animals.scale[:, None, None])) > 0)[..., None]
        ground = np.where(stripe, 0.6 + 0.4 * first, 0.4 + 0.4 * colors[:, 1:2, None])
        return _paint(ground, np.repeat(0.3 * colors[:, 2:3], len(distances), axis=1), distances)
    if style == "sketch":
        return _paint(np.ones_like(first), np.ones_like(colors[:, 1:]), distances, line=1.2)
    return _paint(0.85 + 0.15 * first, np.array(_PAPER, np.float32)[_OF_PARTS] + noise, distances)


register_benchmark(
    Benchmark(
        name="sprites",
        reader=lambda data_dir: sprites(),
        domains=tuple(ANGLES),
        classes=CLASSES,
        hparams={**DEFAULTS, "lr": 2e-3, "batch_size": 8},
        search_space="digits",
        steps=801,
        checkpoint_freq=200,
        augmentation="none",
        image_size=SIZE,
        source="drawn by this example",
        license="Apache-2.0",
        layout="no folder",
        takes_data_dir=False,
    )
)
