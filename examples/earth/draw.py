"""Draws the pictures of docs/results/earth.md and the README.

    python examples/earth/draw.py output/earth_all/moge docs/pictures/earth_map.png

The run is of MoGE on all six continents. The upper part shows tiles that look alike and have other climates. The map
shows the expert with the largest weight at each place on land, and black lines between the main climates.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.ndimage import gaussian_filter

from timm_moe_dg.analysis.geography import coastlines, domains_at
from timm_moe_dg.analysis.run_view import open_run
from timm_moe_dg.analysis.style import expert_color, picture
from timm_moe_dg.data.readers.blue_marble import blue_marble, cut_tiles, read_climates, read_earth, values_at

# Place, longitude, latitude: pairs of tiles that look alike
TILES = (
    ("Congo", 20.5, 1.0),
    ("Virginia", -79.0, 37.5),
    ("Finland", 27.0, 63.0),
    ("Sahara", 10.0, 24.0),
    ("Iran", 56.0, 33.0),
    ("Tibet", 88.0, 33.0),
)
STEP = 0.5  # degrees of the map's cells


def climate_numbers(lonlat: np.ndarray) -> np.ndarray:
    """Main climates (1 to 5, ocean 0) at places (N, 2), uint8 (N,)."""
    numbers, names = read_climates()
    letters = np.array(["ABCDE".find(name[0]) + 1 if name != "Ocean" else 0 for name in names], dtype=np.uint8)
    return letters[values_at(numbers, lonlat)]


def draw(run: Path, path: Path) -> None:
    """Draws tiles and map."""
    model = open_run(run).model
    longitude, latitude = np.arange(-180 + STEP / 2, 180, STEP), np.arange(-56 + STEP / 2, 78, STEP)
    lonlat = np.stack(np.meshgrid(longitude, latitude), axis=-1).reshape(-1, 2)
    experts = domains_at(model, torch.as_tensor(lonlat, dtype=torch.float32)).numpy()
    climates = climate_numbers(lonlat)
    shape = len(latitude), len(longitude)
    colors = np.array([[int(expert_color(e)[i : i + 2], 16) for i in (1, 3, 5)] for e in range(6)], dtype=np.uint8)
    image = np.where(((climates == 0) | (experts < 0))[:, None], 255, colors[experts]).reshape(*shape, 3)
    tiles = cut_tiles(read_earth(), np.array([place[1:] for place in TILES], dtype=float))
    names = {name[0]: name[2:] for name in blue_marble()[0].classes}
    with picture(path, 8.0, 5.6) as figure:
        parts: Any = figure.subfigures(2, 1, height_ratios=[1.15, 2.0])
        above, below = parts
        for axes, tile, (name, *place) in zip(above.subplots(1, len(TILES)), tiles, TILES, strict=True):
            axes.imshow(tile, interpolation="nearest")
            letter = "-ABCDE"[climate_numbers(np.array([place]))[0]]
            axes.set_title(f"{name}\n{names[letter]}", fontsize=13)
            axes.axis("off")
        axes = below.subplots()
        axes.imshow(image, extent=(-180, 180, latitude[0] - STEP / 2, latitude[-1] + STEP / 2), origin="lower")
        borders = climates.reshape(shape)
        for climate in range(1, 6):
            # Smooth by a degree, or mountains become black
            inside = gaussian_filter((borders == climate).astype(float), 1 / STEP)
            near = gaussian_filter((borders > 0).astype(float), 1 / STEP)
            share = np.where(borders > 0, inside / near.clip(1e-6), np.nan)
            axes.contour(longitude, latitude, share, [0.5], colors="black", linewidths=0.7)
        for line in coastlines():
            axes.plot(*line.T, color="#808080", linewidth=0.4)
        axes.set(xlim=(-170, 180), ylim=(-56, 78))
        axes.axis("off")
        axes.set_title("Colors: MoGE's experts. Lines: climates", fontsize=13)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
