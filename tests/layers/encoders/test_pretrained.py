"""Pretrained location encoders, from files made here in the layout of SatCLIP's and GeoCLIP's released ones.

The released weights of GeoCLIP are compared if they are installed.
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.layers.encoders.satclip_checkpoint import released as satclip_checkpoint
from timm_moe_dg.errors import CheckpointError, MetadataError, MissingDependencyError
from timm_moe_dg.layers.encoders.location import spherical_harmonics
from timm_moe_dg.layers.encoders.metadata import MetadataEncoder
from timm_moe_dg.layers.encoders.pretrained import load_geoclip, load_satclip
from timm_moe_dg.networks.build import data_config, save_network
from timm_moe_dg.networks.trained import load_trained

INSTALLED = all(map(importlib.util.find_spec, ("geoclip", "transformers")))
SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 3}
NETWORKS = {
    "moge_tiny": SIZES,
    "erm_le_tiny_patch16": SIZES,
    "moge": {**SIZES, "backbone": "vit_tiny_patch16_224"},
    "erm_le": {**SIZES, "backbone": "vit_tiny_patch16_224"},
}
PLACES = torch.tensor([[13.4, 52.5], [-58.4, -34.6], [180.0, 90.0], [math.nan, 1.0]])  # Berlin, Buenos Aires


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "satclip-vit16-l4.ckpt"
    torch.save(satclip_checkpoint(), path)
    return path


def test_a_released_checkpoint_computes_what_its_network_computes(checkpoint: Path) -> None:
    weights = satclip_checkpoint()["state_dict"]
    lonlat = torch.tensor([[10.0, 50.0], [-120.0, -33.0], [180.0, 0.0]], dtype=torch.float64)
    x = spherical_harmonics(lonlat, 4)
    x[:, [0, 2, 6, 12]] *= math.pi  # the m = 0 terms
    for layer, frequency in (("layers.0", 30.0), ("layers.1", 1.0)):
        nnet = f"model.location.nnet.{layer}"
        x = torch.sin(frequency * (x @ weights[f"{nnet}.weight"].T + weights[f"{nnet}.bias"]))
    nnet = "model.location.nnet.last_layer"
    expected = x @ weights[f"{nnet}.weight"].T + weights[f"{nnet}.bias"]
    torch.testing.assert_close(load_satclip(checkpoint)(lonlat), expected.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(load_satclip(checkpoint).double()(lonlat), expected, atol=1e-4, rtol=1e-4)


def test_it_is_frozen_and_never_drops_features_also_in_a_model_that_trains_around_it(checkpoint: Path) -> None:
    model = timm.create_model("moge_tiny", metadata_encoder=f"satclip:{checkpoint}", **SIZES).train()
    encoder, lonlat = model.metadata_encoder.encoder, torch.rand(8, 2) * 80
    assert torch.equal(encoder.train()(lonlat), encoder.eval()(lonlat))
    encoder.init_weights()
    expected = satclip_checkpoint()["state_dict"]["model.nnet.layers.0.weight"].float()
    torch.testing.assert_close(encoder.first.weight, expected)
    model(torch.randn(4, 3, 16, 16), torch.rand(4, 2)).sum().backward()
    missing = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert missing == {f"metadata_encoder.encoder.{name}" for name, _ in encoder.named_parameters()}
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    assert model.blocks[0].mlp.router.codes.shape == (6, 5)


@pytest.fixture(scope="module")
def released() -> dict[str, Tensor]:
    generator, weights = torch.Generator().manual_seed(0), {}
    for scale in range(3):
        weights[f"LocEnc{scale}.capsule.0.b"] = torch.randn(256, 2, generator=generator) * 16**scale
        for layer, (out, width) in {"capsule.1": (1024, 512), "capsule.3": (1024, 1024), "capsule.5": (1024, 1024),
                                    "head.0": (512, 1024)}.items():  # fmt: skip
            weights[f"LocEnc{scale}.{layer}.weight"] = torch.randn(out, width, generator=generator) * width**-0.5
            weights[f"LocEnc{scale}.{layer}.bias"] = torch.randn(out, generator=generator)
    return weights


@pytest.fixture(scope="module")
def folder(released: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of this name, whose import fails."""
    folder = tmp_path_factory.mktemp("packages")
    weights = folder / "geoclip" / "model" / "weights" / "location_encoder_weights.pth"
    weights.parent.mkdir(parents=True)
    (folder / "geoclip" / "__init__.py").write_text("raise AssertionError('imported')")
    torch.save(released, weights)
    return folder


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the package available. The returned function makes it unavailable."""
    monkeypatch.delitem(sys.modules, "geoclip", raising=False)  # the installed one
    monkeypatch.syspath_prepend(folder)
    original = importlib.util.find_spec

    def remove() -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "geoclip" else original(name))

    return remove


def reference(weights: dict[str, Tensor], latitude: float, longitude: float) -> np.ndarray:
    """The embedding of a place by the paper's equations, in float64."""
    theta = math.asin(math.sqrt(3) / 2 * math.sin(math.radians(latitude)))
    polynomial = np.polynomial.Polynomial([0, 1.340264, 0, -0.081106, 0, 0, 0, 0.000893, 0, 0.003796])
    x = 2 * math.radians(longitude) * math.cos(theta) / (math.sqrt(3) * polynomial.deriv()(theta))
    point, total = np.array([x, polynomial(theta)]) * 66.50336 / 180, 0
    for scale in range(3):
        values = {name: value.double().numpy() for name, value in weights.items() if f"LocEnc{scale}" in name}
        frequencies, *layers = values.values()
        phases = 2 * np.pi * frequencies @ point
        features = np.concatenate([np.cos(phases), np.sin(phases)])
        for index in range(0, 8, 2):
            features = layers[index] @ features + layers[index + 1]
            features = features if index == 6 else features.clip(min=0)
        total += features
    return total


def test_a_place_has_the_embedding_of_its_equations_with_longitude_first(
    released: dict[str, Tensor], package: Callable[[], None]
) -> None:
    encoder = load_geoclip().double()
    for longitude, latitude in [(13.4, 52.5), (-58.4, -34.6), (180.0, 0.0), (-180.0, -90.0), (30.0, 90.0)]:
        embedding = encoder(torch.tensor([[longitude, latitude]], dtype=torch.float64))[0]
        np.testing.assert_allclose(embedding.detach(), reference(released, latitude, longitude), atol=1e-8)


@pytest.mark.skipif(not INSTALLED, reason="needs the extra geoclip")
def test_the_released_weights_give_the_packages_own_embeddings() -> None:
    from geoclip import LocationEncoder

    generator = torch.Generator().manual_seed(0)
    lonlat = (torch.rand(1000, 2, generator=generator) * 2 - 1) * torch.tensor([180.0, 90.0])
    edges = [[0, 90], [10, -90], [180, 0], [-180, 0], [180, 45], [-180, 90]]
    lonlat = torch.cat([lonlat, torch.tensor(edges, dtype=torch.float32)])
    with torch.no_grad():
        torch.testing.assert_close(load_geoclip()(lonlat), LocationEncoder()(lonlat.flip(1)), atol=1e-6, rtol=0)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Takes three steps, and returns the encoder's tensors of before."""
    before = {key: value.clone() for key, value in model.metadata_encoder.state_dict().items()}
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model.train()(torch.randn(4, 3, 16, 16), PLACES).square().sum().backward()
        optimizer.step()
    return before


@pytest.mark.parametrize(("name", "frozen"), zip(NETWORKS, (True, False, False, True), strict=True))
def test_a_network_trains_around_it_or_with_it_and_is_loaded_without_the_package(
    name: str, frozen: bool, package: Callable[[], None], tmp_path: Path
) -> None:
    model = timm.create_model(name, metadata_encoder="geoclip", metadata_frozen=frozen, **NETWORKS[name])
    before, after = trained(model), model.metadata_encoder.state_dict()
    unchanged = {key for key in before if torch.equal(before[key], after[key])}
    assert unchanged == (set(before) if frozen else {f"encoder.scales.{scale}.0.frequencies" for scale in range(3)})
    save_network(model.eval(), tmp_path, ["a", "b", "c"], data_config(model))
    package()
    loaded = load_trained(f"local-dir:{tmp_path}")
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(loaded(images, PLACES), model(images, PLACES))
    assert loaded.metadata_encoder.encoder.scales[0][7].bias.requires_grad is not frozen
    with pytest.raises(MissingDependencyError, match=r"^metadata_encoder='geoclip' needs geoclip.*\[geoclip\]'$"):
        timm.create_model(name, metadata_encoder="geoclip", **NETWORKS[name])
    with pytest.raises(MissingDependencyError):
        MetadataEncoder(load_geoclip())(images, PLACES)


def test_damaged_files_and_another_width_are_refused(
    package: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MetadataError, match=r"^metadata_features=64: 'geoclip'"):
        timm.create_model("moge_tiny", metadata_encoder="geoclip", metadata_features=64, **SIZES)
    path = tmp_path / "geoclip" / "model" / "weights" / "location_encoder_weights.pth"
    path.parent.mkdir(parents=True)
    (tmp_path / "geoclip" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for write in (lambda: path.write_bytes(b""), lambda: torch.save([1], path), lambda: torch.save({"a": 1}, path)):
        write()
        with pytest.raises(CheckpointError, match=r"^source='.*weights\.pth': is not GeoCLIP's"):
            load_geoclip()
