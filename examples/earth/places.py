"""Prints what coordinates alone reach in docs/results/earth.md: nearest neighbors on the sphere, without a pixel.

    python examples/earth/places.py

The number of neighbors is chosen by training-domain validation, for each held-out continent.
"""

from collections.abc import Iterable

import numpy as np
from sklearn.neighbors import KNeighborsClassifier

from timm_moe_dg.data import Domain, get_benchmark
from timm_moe_dg.data.splits import hold_out, test_positions

NEIGHBORS = (1, 3, 5, 10, 20, 50)
CONTINENTS = ("africa", "asia", "europe", "north_america", "oceania", "south_america")


def rows(domains: Iterable[Domain], *, out: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Latitude and longitude in radians, and labels, of a part of domains."""
    points, labels = [], []
    for domain in domains:
        assert domain.split is not None
        assert domain.metadata is not None
        part = domain.split.outside if out else domain.split.inside
        points.append(np.deg2rad(domain.metadata[part][:, ::-1]))
        labels.append(np.asarray(domain.targets)[part])
    return np.concatenate(points), np.concatenate(labels)


def accuracies(continent: str) -> tuple[float, float, float]:
    """Returns the accuracy overall and on the worst continent in known places, and on the one that is held out."""
    domains = get_benchmark("blue_marble").read(None)
    domains = hold_out(domains, test_positions([continent], domains))
    training, known, unseen = ([domain for domain in domains if domain.role == role] for role in ("train", "id", "ood"))
    networks = [KNeighborsClassifier(k, metric="haversine").fit(*rows(training)) for k in NEIGHBORS]
    validation = [np.mean([network.score(*rows([domain], out=True)) for domain in training]) for network in networks]
    chosen = networks[int(np.argmax(validation))]
    worst = min(chosen.score(*rows([domain])) for domain in known)
    return float(chosen.score(*rows(known))), float(worst), float(chosen.score(*rows(unseen)))


if __name__ == "__main__":
    by_continent = {continent: accuracies(continent) for continent in CONTINENTS}
    for continent, (overall, worst, unseen) in by_continent.items():
        print(f"{continent}: id overall {overall:.1%}, worst {worst:.1%}, unseen {unseen:.1%}")
    print("mean: id overall {:.1%}, worst {:.1%}, unseen {:.1%}".format(*np.mean(list(by_continent.values()), axis=0)))
