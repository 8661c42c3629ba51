"""Sprites: classes follow from parts, domains show the same animals, and every pixel's part is known."""

import importlib
import sys

import numpy as np
import pytest
from scipy.ndimage import maximum_filter, minimum_filter

from examples.sprites import ANGLES, CLASSES, PARTS, SIZE, sprites
from tests.data.files import signature
from timm_moe_dg.algorithms.hparams import SEARCH_SPACES
from timm_moe_dg.data import benchmarks, get_benchmark
from timm_moe_dg.errors import ArgumentError


@pytest.fixture(scope="module")
def domains():
    return {domain.name: domain for domain in sprites(48)}


@pytest.fixture(scope="module")
def paper(domains):
    return domains["paper"]


def test_a_class_is_its_decisive_attributes(paper):
    names = np.array(paper.attribute_names)
    for target, held in zip(paper.targets, paper.attributes, strict=True):
        values = dict(name.split("::") for name in names[held])
        assert "-".join(values[part] for part in ("body", "ears", "tail")) == CLASSES[target]
    assert np.bincount(paper.targets).tolist() == [6] * 8
    legs = paper.attributes[:, list(names).index("legs::thin")]
    assert 0.2 < legs.mean() < 0.8  # the others vary


def test_classes_show_in_the_part_maps_and_left_is_left(paper):
    down, right = np.mgrid[:SIZE, :SIZE]
    for index, target in enumerate(paper.targets):
        body, ears, tail = CLASSES[target].split("-")
        area = {name: paper.part_maps[index] == position for position, name in enumerate(PARTS)}
        assert (right[area["tail"]].max() - right[area["body"]].mean() > 15.5) == (tail == "long")
        lowest = right[area["body"]][down[area["body"]] == down[area["body"]].max() - 1]
        assert (np.ptp(lowest) > 14) == (body == "square")
        near_the_tip = area["left ear"] & (down == down[area["left ear"]].min() + 3)
        assert (near_the_tip.sum() <= 5) == (ears == "pointed")
        for part in ("ear", "leg"):
            assert right[area[f"left {part}"]].mean() < right[area[f"right {part}"]].mean()


def test_part_maps_are_where_the_colors_are(paper):
    """On paper every part has one color: away from edges, pixels of one part are equal."""
    for image, parts in zip(paper.images[:8], paper.part_maps[:8], strict=True):
        same = maximum_filter(parts, 5) == minimum_filter(parts, 5)
        for part in np.unique(parts):
            assert len(np.unique(image[same & (parts == part)], axis=0)) <= 1


def test_turning_is_counter_clockwise(monkeypatch):
    monkeypatch.setitem(ANGLES, "turned", 90.0)
    domains = {domain.name: domain for domain in sprites.__wrapped__(8)}
    np.testing.assert_array_equal(domains["turned"].part_maps, np.rot90(domains["paper"].part_maps, axes=(1, 2)))
    turned, upright = (np.stack(domains[name].images).astype(int) for name in ("turned", "paper"))
    assert abs(turned - np.rot90(upright, axes=(1, 2))).max() <= 1


def test_the_same_in_every_release_and_another_with_another_seed():
    assert signature("sprites") == "72f433d695db"
    assert [np.mean(domain.images) for domain in sprites()] == pytest.approx(
        [194.07, 62.38, 137.75, 222.85, 194.08], abs=0.02
    )
    first, again, other = (np.stack(sprites.__wrapped__(8, seed)[2].images) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_domain_loses_images_with_their_annotations(paper):
    fewer = paper.without({*range(len(paper))} - {3})
    assert fewer.image(0).tobytes() == paper.image(3).tobytes()
    for column in ("targets", "part_maps", "attributes", "pictures"):
        np.testing.assert_array_equal(getattr(fewer, column), getattr(paper, column)[3:4])


def test_the_data_set_is_found_once_the_example_is_imported(monkeypatch):
    monkeypatch.delitem(benchmarks._ROWS, "sprites")
    monkeypatch.delitem(sys.modules, "examples.sprites")
    with pytest.raises(ArgumentError, match="dataset='sprites'"):
        get_benchmark("sprites")
    importlib.import_module("examples.sprites")
    row = get_benchmark("sprites")
    domains = row.read(None)
    assert row.domains == tuple(domain.name for domain in domains)
    assert {row.classes} == {domain.classes for domain in domains}
    assert domains[0].image(0).size == (row.image_size, row.image_size)
    assert (row.steps, row.checkpoint_freq, row.hparams["lr"], row.hparams["batch_size"]) == (801, 200, 2e-3, 8)
    assert set(SEARCH_SPACES[row.search_space]) == set(row.hparams)
