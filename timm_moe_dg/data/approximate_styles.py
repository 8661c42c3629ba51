"""Three filters that stand in for learned styles: the same picture drawn otherwise, by nothing but arithmetic.

They are deterministic functions of the pixels. They are no reproduction of the styles whose names they carry, so their
results say nothing about figures that were published for those.
"""

from collections.abc import Callable

import numpy as np

Filter = Callable[[np.ndarray], np.ndarray]

LUMINANCE = np.array([0.299, 0.587, 0.114])
PALETTE = np.array([[24, 22, 38], [72, 44, 40], [122, 66, 34], [170, 106, 52], [204, 160, 96], [236, 222, 180]], float)


def candy(pixels: np.ndarray) -> np.ndarray:
    """Saturates and posterizes: (H, W, 3) uint8 -> (H, W, 3) uint8, of five levels per channel."""
    gray = (pixels @ LUMINANCE)[..., None]
    saturated = np.clip(gray + 2.5 * (pixels - gray), 0, 255)
    return (np.round(saturated / 63.75) * 63.75).astype(np.uint8)


def mosaic(pixels: np.ndarray, side: int = 14) -> np.ndarray:
    """Fills the Voronoi cells of a shaken grid with their mean color and darkens their edges.

    Args:
        pixels: (H, W, 3) uint8.
        side: Distance of the grid's points.

    Returns:
        (H, W, 3) uint8.
    """
    height, width = pixels.shape[:2]
    cells = voronoi_cells(height, width, side)
    numbers = np.unique(cells, return_inverse=True)[1].reshape(cells.shape)
    counts = np.bincount(numbers.ravel())
    sums = [np.bincount(numbers.ravel(), weights=pixels[..., channel].ravel()) for channel in range(3)]
    filled = (np.stack(sums, 1) / counts[:, None])[numbers]
    edges = np.zeros(cells.shape, bool)
    edges[1:] |= cells[1:] != cells[:-1]
    edges[:, 1:] |= cells[:, 1:] != cells[:, :-1]
    filled[edges] *= 0.35
    return filled.astype(np.uint8)


def voronoi_cells(height: int, width: int, side: int) -> np.ndarray:
    """(H, W) number of the nearest point of a shaken grid, the same for every picture of this size.

    A point keeps to the middle half of its square, so the nearest one is never further than the next square.
    """
    points = shaken_points(height, width, side)
    rows, columns = np.mgrid[:height, :width]
    best, cells = np.full((height, width), np.inf), np.zeros((height, width), int)
    for down in (0, 1, 2):
        for right in (0, 1, 2):
            square = rows // side + down, columns // side + right  # the points begin one square outside the picture
            distance = (points[square][..., 0] - rows) ** 2 + (points[square][..., 1] - columns) ** 2
            nearer = distance < best
            best[nearer] = distance[nearer]
            cells[nearer] = (square[0] * points.shape[1] + square[1])[nearer]
    return cells


def shaken_points(height: int, width: int, side: int) -> np.ndarray:
    """(R, C, 2) row and column of a point in each square of a grid that reaches a square beyond the picture."""
    shape = -(-height // side) + 2, -(-width // side) + 2
    corners = np.moveaxis(np.mgrid[: shape[0], : shape[1]], 0, -1) - 1
    return (corners + np.random.RandomState(0).uniform(0.25, 0.75, (*shape, 2))) * side


def udnie(pixels: np.ndarray, radius: int = 4) -> np.ndarray:
    """Kuwahara's filter, half mixed with a palette of earth colors by brightness.

    Each pixel takes the mean of that one of the four windows at its corners whose brightness varies least.

    Args:
        pixels: (H, W, 3) uint8.
        radius: A window has radius + 1 pixels a side.

    Returns:
        (H, W, 3) uint8.
    """
    smooth = kuwahara(pixels, radius)
    at = np.clip(smooth @ LUMINANCE / 255 * (len(PALETTE) - 1), 0, len(PALETTE) - 1)
    return (0.5 * smooth + 0.5 * PALETTE[np.round(at).astype(int)]).astype(np.uint8)


def kuwahara(pixels: np.ndarray, radius: int) -> np.ndarray:
    """(H, W, 3) uint8 -> (H, W, 3) float64; the picture is extended by repeating its edges."""
    height, width = pixels.shape[:2]
    padded = np.pad(pixels.astype(float), ((radius, radius), (radius, radius), (0, 0)), mode="edge")
    gray = padded @ LUMINANCE
    layers = np.concatenate([padded, gray[..., None], gray[..., None] ** 2], -1)
    means = _window_means(layers, radius + 1)
    corners = [means[down : down + height, right : right + width] for down in (0, radius) for right in (0, radius)]
    stacked = np.stack(corners)  # (4, H, W, 5)
    # Rounded, so that windows which vary alike are not told apart by the last bits of a sum
    variance = np.round(stacked[..., 4] - stacked[..., 3] ** 2, 6)
    return np.take_along_axis(stacked, variance.argmin(0)[None, ..., None], 0)[0, ..., :3]


def _window_means(layers: np.ndarray, side: int) -> np.ndarray:
    """(H, W, C) -> (H - side + 1, W - side + 1, C): mean of the window that begins at each place."""
    sums = np.pad(layers, ((1, 0), (1, 0), (0, 0))).cumsum(0).cumsum(1)
    return (sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]) / side**2


APPROXIMATE_STYLES: dict[str, Filter] = {"Candy": candy, "Mosaic": mosaic, "Udnie": udnie}
