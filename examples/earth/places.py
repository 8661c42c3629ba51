"""Prints what GeoCLIP's features of a place reach in docs/results/earth.md, without a pixel.

    python examples/earth/places.py  # needs the package geoclip

A linear classifier, whose penalty is chosen by training-domain validation, for each held-out continent. `timm-moe-dg
compare --dataset blue_marble --rows places` has the nearest neighbors.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from timm_moe_dg.data import Domain, get_benchmark
from timm_moe_dg.data.splits import hold_out, test_positions
from timm_moe_dg.layers.encoders.pretrained import load_geoclip

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
CONTINENTS = ("africa", "asia", "europe", "north_america", "oceania", "south_america")


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
    networks = linear_on_geoclip()
    by_continent = {continent: accuracies(continent, networks) for continent in CONTINENTS}
    for continent, (overall, worst, unseen) in by_continent.items():
        print(f"{continent}: id overall {overall:.1%}, worst {worst:.1%}, unseen {unseen:.1%}")
    print("mean: id overall {:.1%}, worst {:.1%}, unseen {:.1%}".format(*np.mean(list(by_continent.values()), axis=0)))
