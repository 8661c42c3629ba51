"""The same picture in several domains lines up."""

import numpy as np
import pytest

from timm_moe_dg.analysis.routing.chosen_images import choose_pictures, class_index, picture_names
from timm_moe_dg.data import FolderDomain
from timm_moe_dg.data.readers.digits import DigitsDomain
from timm_moe_dg.errors import DataError


def domain(*paths):
    return FolderDomain(paths[0][0], ("cat", "dog"), [0 if "/cat/" in path else 1 for path in paths], paths)


def test_the_same_stem_stands_in_one_column():
    domains = [domain("a/cat/1.png", "a/cat/2.png", "a/dog/9.png"), domain("b/dog/9.png", "b/cat/2.jpg", "b/cat/3.jpg")]
    assert choose_pictures(domains, 0, 2, by_path=True) == [[1, 0], [1, None]]  # 2 is in both, comes first; then 1
    assert choose_pictures(domains, 0, 9, by_path=True) == [[1, 0, None], [1, None, 2]]
    assert choose_pictures(domains, 1, 4, by_path=True) == [[2], [0]]
    # The same file names in each hospital are other patients
    assert choose_pictures(domains, 0, 9) == [[0, 1], [1, 2]]
    assert picture_names(domains[0], by_path=False) is None


def test_domains_without_common_pictures_or_names_have_their_own():
    domains = [domain("a/cat/1.png", "a/cat/2.png"), domain("b/cat/3.png", "b/dog/4.png")]
    assert choose_pictures(domains, 0, 2, by_path=True) == [[0, 1], [0, None]]
    nameless = DigitsDomain("a", ("cat", "dog"), [1, 0, 0], [np.zeros((2, 2), np.uint8)] * 3)
    assert picture_names(nameless, by_path=True) is None
    assert choose_pictures([nameless, nameless], 0, 5) == [[1, 2], [1, 2]]


def test_classes_are_named():
    domains = [domain("a/cat/1.png")]
    assert (class_index(domains, None), class_index(domains, "dog")) == (0, 1)
    with pytest.raises(DataError, match=r"class='cow': no such class; choose from cat, dog"):
        class_index(domains, "cow")
    with pytest.raises(DataError, match="class='dog': no domain has an image"):
        choose_pictures(domains, 1, 3)
