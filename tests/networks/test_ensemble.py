"""Ensembles: each member sees the image in its own way, and answers with its own order of classes."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from timm_moe_dg.data import evaluation_transform
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.networks.averages import Ensemble, evaluation_view, load_predictor
from timm_moe_dg.networks.build import build_network, data_config, save_network
from timm_moe_dg.networks.trained import WithFeatures, load_trained

CLASSES = ("cat", "dog", "owl")
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8))


def member(names=CLASSES, seed=0, **preprocessing):
    """A network and its preprocessing; sizes, means and deviations may be given."""
    torch.manual_seed(seed)
    network = timm.create_model("test_vit", num_classes=len(names), dynamic_img_size=True).eval()
    network.pretrained_cfg["label_names"] = list(names)
    return network, data_config(network, **preprocessing)


def expected(members, image=IMAGE):
    """The mean of probabilities by class name, each from the member's own transform."""
    total = dict.fromkeys(CLASSES, 0.0)
    for network, config in members:
        view = evaluation_transform(config["input_size"][1:], config["mean"], config["std"])
        with torch.no_grad():
            probabilities = network(view(image)[None]).softmax(1)[0].tolist()
        for name, value in zip(network.pretrained_cfg["label_names"], probabilities, strict=True):
            total[name] += value / len(members)
    return torch.tensor([total[name] for name in CLASSES])


@pytest.mark.parametrize(
    "second",
    [
        {},
        {"mean": [0.1, 0.2, 0.3]},
        {"std": [2.0, 2.0, 2.0]},
        {"img_size": 96},
        {"names": ("owl", "cat", "dog"), "mean": [0.1, 0.2, 0.3], "img_size": 192},
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_each_member_has_its_own_preprocessing_and_classes_in_any_order_of_members(second, swapped, tmp_path):
    members = [member(), member(seed=1, **second)]
    members = members[::-1] if swapped else members
    for number, (network, config) in enumerate(members):
        save_network(network, tmp_path / str(number), network.pretrained_cfg["label_names"], config)
    ensemble = load_predictor(f"local-dir:{tmp_path}")
    with torch.no_grad():
        probabilities = ensemble(evaluation_view(ensemble)(IMAGE)[None]).softmax(1)[0]
    names = ensemble.pretrained_cfg["label_names"]
    by_name = torch.stack([probabilities[list(names).index(name)] for name in CLASSES])
    torch.testing.assert_close(by_name, expected(members), rtol=0, atol=1e-6)


def test_features_lie_side_by_side():
    networks = [member()[0], member(seed=1)[0]]
    images = torch.randn(2, 3, 160, 160)
    logits, features = WithFeatures(Ensemble(networks))(images)
    assert features.shape == (2, 2 * networks[0].num_features)
    torch.testing.assert_close(logits, Ensemble(networks)(images))


@pytest.mark.parametrize("names", [("cat", "dog", "yak"), ("cat", "dog"), ("cat", "dog", "owl", "yak")])
def test_members_of_other_classes_are_refused(names):
    with pytest.raises(ArgumentError, match=r"classes=\['cat', .*other classes than the first one"):
        Ensemble([member()[0], member(names)[0]])


def test_where_one_network_is_needed_the_message_names_a_member(tmp_path):
    for number in range(2):
        save_network(member()[0], tmp_path / str(number), CLASSES, member()[1])
    for load in (load_trained, lambda name: build_network(name, None, pretrained=True)):
        with pytest.raises(ArgumentError, match=rf"is an ensemble of 2 networks, .* give one: .*{tmp_path.name}.0"):
            load(f"local-dir:{tmp_path}")
