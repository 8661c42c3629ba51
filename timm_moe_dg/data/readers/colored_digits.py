"""Coloured digits: a shortcut that turns around, DomainBed's ColoredMNIST recipe on scikit-learn's digits.

Format: the 1,797 digits of `digits`, enlarged to 32 x 32 pixels; red or green ink on black. ColoredMNIST has two
channels; here the third one of an RGB image is zero throughout, so that any timm model takes it.
Classes: whether the digit is below 5, with a quarter of the labels flipped, so that nobody who reads shapes alone can
be right more often than 75% of the time.
Domains: how often the ink says the (flipped) label. "+90%" and "+80%" are right that often, "-90%" is wrong that often;
whoever learns the colour in the first two fails on the third.
"""

import numpy as np

from .digits import ASSIGNMENT_SEED, DigitsDomain, enlarge, load_digits

CLASSES = ("5 to 9", "0 to 4")
LABEL_NOISE = 0.25
COLOR_NOISE = {"+90%": 0.1, "+80%": 0.2, "-90%": 0.9}  # how often the colour is not that of the label


def colored_digits() -> list[DigitsDomain]:
    """Builds the three domains; they are the same every time, while DomainBed draws its own anew for every run.

    Digits are dealt out in turn in the order of a fixed permutation, as in `rotated_digits`, and no digit is in two
    domains. The two kinds of noise are drawn for all digits, in that order, from the same generator.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    images, digits = load_digits("colored_digits")
    random = np.random.RandomState(ASSIGNMENT_SEED)
    dealt = random.permutation(len(images))
    labels = (digits < 5) ^ (random.uniform(size=len(images)) < LABEL_NOISE)
    chance = random.uniform(size=len(images))
    domains = []
    for position, (name, noise) in enumerate(COLOR_NOISE.items()):
        own = dealt[position :: len(COLOR_NOISE)]
        colored = np.stack([_ink(images[index], labels[index] ^ (chance[index] < noise)) for index in own])
        domains.append(DigitsDomain(name, labels[own].astype(int).tolist(), colored, CLASSES))
    return domains


def _ink(image: np.ndarray, green: bool) -> np.ndarray:
    """Ink (8, 8) -> RGB, uint8 (32, 32, 3), with the grey levels in one channel: red is 0, green 1, as ColoredMNIST."""
    colored = np.zeros((*(enlarged := enlarge(image)).shape, 3), dtype=np.uint8)
    colored[..., int(green)] = enlarged
    return colored
