"""Prints what coordinates alone reach in docs/results/earth.md, without a pixel.

    python examples/earth/places.py
    python examples/earth/places.py --geoclip  # needs the package geoclip

Nearest neighbors on the sphere, or a linear classifier on GeoCLIP's features of a place. The number of neighbors, or
the penalty, is chosen by training-domain validation, for each held-out continent.
"""

import argparse
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from timm_moe_dg.data import Domain, get_benchmark
from timm_moe_dg.data.splits import hold_out, test_positions
from timm_moe_dg.layers.encoders.pretrained import load_geoclip

NEIGHBORS = (1, 3, 5, 10, 20, 50)
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
CONTINENTS = ("africa", "asia", "europe", "north_america", "oceania", "south_america")


def neighbors() -> list[ClassifierMixin]:
    """Nearest neighbors by great-circle distance."""
    radians = FunctionTransformer(lambda lonlat: np.deg2rad(lonlat[:, ::-1]))
    return [make_pipeline(radians, KNeighborsClassifier(number, metric="haversine")) for number in NEIGHBORS]


def linear_on_geoclip() -> list[ClassifierMixin]:
    """Linear classifiers on the features of GeoCLIP's frozen encoder."""
    encoder = load_geoclip().eval()

    @torch.no_grad()
    def features(lonlat: np.ndarray) -> np.ndarray:
        return torch.nn.functional.normalize(encoder(torch.tensor(lonlat).float()), dim=1).numpy()

    parts = (FunctionTransformer(features), StandardScaler())
    return [make_pipeline(*parts, LogisticRegression(C=penalty, max_iter=300)) for penalty in PENALTIES]


def rows(domains: Iterable[Domain], *, out: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Longitude and latitude in degrees, and labels, of a part of domains."""
    points, labels = [], []
    for domain in domains:
        assert domain.split is not None
        assert domain.metadata is not None
        part = domain.split.outside if out else domain.split.inside
        points.append(domain.metadata[part])
        labels.append(np.asarray(domain.targets)[part])
    return np.concatenate(points), np.concatenate(labels)


def accuracies(continent: str, networks: Sequence[ClassifierMixin]) -> tuple[float, float, float]:
    """Returns the accuracy overall and on the worst continent in known places, and on the one that is held out."""
    domains = get_benchmark("blue_marble").read(None)
    domains = hold_out(domains, test_positions([continent], domains))
    training, known, unseen = ([domain for domain in domains if domain.role == role] for role in ("train", "id", "ood"))
    for network in networks:
        network.fit(*rows(training))
    validation = [np.mean([network.score(*rows([domain], out=True)) for domain in training]) for network in networks]
    chosen = networks[int(np.argmax(validation))]
    worst = min(chosen.score(*rows([domain])) for domain in known)
    return float(chosen.score(*rows(known))), float(worst), float(chosen.score(*rows(unseen)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geoclip", action="store_true", help="a linear classifier on GeoCLIP's features of a place")
    networks = linear_on_geoclip() if parser.parse_args().geoclip else neighbors()
    by_continent = {continent: accuracies(continent, networks) for continent in CONTINENTS}
    for continent, (overall, worst, unseen) in by_continent.items():
        print(f"{continent}: id overall {overall:.1%}, worst {worst:.1%}, unseen {unseen:.1%}")
    print("mean: id overall {:.1%}, worst {:.1%}, unseen {:.1%}".format(*np.mean(list(by_continent.values()), axis=0)))
