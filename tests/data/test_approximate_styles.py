"""The filters against loops over pixels, and their properties."""

import numpy as np
import pytest

from timm_moe_dg.data.approximate_styles import (
    APPROXIMATE_STYLES,
    LUMINANCE,
    candy,
    kuwahara,
    mosaic,
    shaken_points,
    voronoi_cells,
)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (33, 46, 3)).astype(np.uint8)


@pytest.mark.parametrize("style", APPROXIMATE_STYLES)
def test_a_style_is_a_function_of_the_pixels_that_changes_them_and_keeps_shape_and_type(pixels, style):
    before = pixels.copy()
    first, second = APPROXIMATE_STYLES[style](pixels), APPROXIMATE_STYLES[style](pixels)
    assert np.array_equal(first, second)
    assert np.array_equal(pixels, before)
    assert first.shape == pixels.shape
    assert first.dtype == np.uint8
    assert np.abs(first.astype(int) - pixels).mean() > 5


def test_candy_has_five_levels_and_leaves_gray_gray(pixels):
    assert set(np.unique(candy(pixels))) <= {0, 63, 127, 191, 255}
    gray = np.repeat(pixels[..., :1], 3, axis=2)
    levels = candy(gray)
    assert np.array_equal(levels[..., 0], levels[..., 1])
    assert np.array_equal(levels[..., 0], levels[..., 2])


def test_each_pixel_belongs_to_the_nearest_of_all_points():
    points = shaken_points(40, 57, 9).reshape(-1, 2)
    rows, columns = np.mgrid[:40, :57]
    distances = (points[:, 0] - rows[..., None]) ** 2 + (points[:, 1] - columns[..., None]) ** 2
    found = np.take_along_axis(distances, voronoi_cells(40, 57, 9)[..., None], -1)[..., 0]
    assert np.array_equal(found, distances.min(-1))


def test_a_cell_has_one_color_its_mean_but_for_its_dark_edge(pixels):
    cells, drawn = voronoi_cells(33, 46, 14), mosaic(pixels)
    for cell in np.unique(cells):
        inside = cells == cell
        colors, counts = np.unique(drawn[inside], axis=0, return_counts=True)
        mean = pixels[inside].mean(0)
        assert len(colors) <= 2
        assert any(np.abs(color - np.floor(mean)).max() <= 1 for color in colors) or counts.max() < 8
        assert all(np.abs(color - mean * share).max() <= 1.5
                   for color in colors for share in [1.0 if color.sum() > 0.7 * mean.sum() else 0.35])  # fmt: skip


def test_kuwahara_equals_the_loop_over_pixels_and_windows(pixels):
    small, radius = pixels[:9, :11], 3
    padded = np.pad(small.astype(float), ((radius, radius), (radius, radius), (0, 0)), mode="edge")
    expected = np.empty(small.shape)
    for row in range(9):
        for column in range(11):
            windows = [padded[row + down : row + down + radius + 1, column + right : column + right + radius + 1]
                       for down in (0, radius) for right in (0, radius)]  # fmt: skip
            best = min(windows, key=lambda window: (window @ LUMINANCE).var())
            expected[row, column] = best.mean((0, 1))
    np.testing.assert_allclose(kuwahara(small, radius), expected, atol=1e-6)


def test_kuwahara_keeps_an_edge_sharp():
    step = np.zeros((12, 12, 3), np.uint8)
    step[:, 6:] = 200
    np.testing.assert_allclose(kuwahara(step, 3), step, atol=1e-6)
