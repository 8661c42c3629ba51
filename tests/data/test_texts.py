"""Texts behave as a list of strings does, and take the memory of their letters."""

import pickle
import tracemalloc

import numpy as np
import pytest

from timm_moe_dg.data.texts import Texts, take

WORDS = ["", "a", "caf\u00e9/\u30c6.png", "\udcff.png", "a", "x" * 300]


@pytest.mark.parametrize("number", [0, 1, 6, 25_001])
def test_they_are_what_a_list_is(number: int) -> None:
    words = [f"{WORDS[at % len(WORDS)]}{at}" for at in range(number)]
    texts = Texts(iter(words))
    assert texts == words
    assert list(texts) == words
    assert list(reversed(texts)) == words[::-1]
    assert len(texts) == number
    assert [texts[at] for at in range(-number, number)] == words * 2
    assert texts[1:20:3] == words[1:20:3]
    assert pickle.loads(pickle.dumps(texts)) == words
    for outside in (number, -number - 1):
        with pytest.raises(IndexError):
            texts[outside]


def test_they_grow_and_differ() -> None:
    texts = Texts(WORDS[:2])
    texts.extend(WORDS[2:])
    assert texts == WORDS
    assert texts != WORDS[:-1]
    assert texts != [*WORDS[:-1], "y"]


def test_entries_are_taken_in_the_order_of_their_positions() -> None:
    positions = np.array([5, 0, 2, 2])
    expected = [WORDS[at] for at in positions]
    assert isinstance(take(Texts(WORDS), positions), Texts)
    assert take(Texts(WORDS), positions) == take(WORDS, positions) == expected
    np.testing.assert_array_equal(take(np.arange(6) * 10, positions), positions * 10)


def test_a_path_takes_its_letters_and_eight_bytes() -> None:
    tracemalloc.start()
    texts = Texts(f"folder/image_{number:06}.png" for number in range(50_000))
    size = tracemalloc.get_traced_memory()[0] / len(texts)
    tracemalloc.stop()
    assert size < 1.3 * (len(texts[0]) + 8)  # a list of strings takes 81 bytes for each
