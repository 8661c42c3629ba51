"""Names on the map: beside their group, not on other names, inside the world."""

import numpy as np
import pytest

from timm_moe_dg.analysis.map_labels import WORLD, Box, beside, extent


def test_the_extent_leaves_out_the_outermost_and_stays_on_one_side_of_the_date_line():
    random = np.random.default_rng(0)
    rows = np.stack([random.uniform(10, 20, 1000), random.uniform(-5, 5, 1000)], axis=1)
    rows[0] = (100.0, 80.0)
    box = extent(rows, margin=1.0)
    assert box.west == pytest.approx(9.2, abs=0.3)
    assert box.east == pytest.approx(20.8, abs=0.3)
    assert box.north == pytest.approx(5.8, abs=0.3)
    pacific = extent(np.array([[178.0, 0.0], [-176.0, 0.0]]))
    assert pacific.east - pacific.west < 10.0


def test_a_name_is_below_or_where_it_covers_nothing():
    group = Box(-10.0, -10.0, 10.0, 10.0)
    below = beside(group, "name", [group], 8.0)
    assert below.north < group.south
    assert below.center[0] == 0.0
    above = beside(group, "name", [group, below], 8.0)
    assert above.south > group.north
    assert above.overlap(below) == 0.0


@pytest.mark.parametrize("place", [(-175.0, -85.0), (175.0, 85.0), (0.0, -88.0)])
def test_a_name_stays_in_the_world_where_it_can(place):
    box = beside(extent(np.array([place])), "name", [], 8.0)
    assert box.south >= WORLD.south
    assert box.north <= WORLD.north
