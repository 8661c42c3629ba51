"""Pretrained SatCLIP encoders, from checkpoints made here in the released files' layout."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.layers.encoders.satclip_checkpoint import released
from timm_moe_dg.errors import CheckpointError
from timm_moe_dg.layers import load_satclip, spherical_harmonics


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "satclip-vit16-l4.ckpt"
    torch.save(released(), path)
    return path


def test_a_released_checkpoint_computes_what_its_network_computes(checkpoint: Path) -> None:
    weights = released()["state_dict"]
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


def test_it_is_frozen_and_never_drops_features(checkpoint: Path) -> None:
    encoder = load_satclip(checkpoint)
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    lonlat = torch.rand(8, 2) * 80
    assert torch.equal(encoder.train()(lonlat), encoder.eval()(lonlat))
    before = encoder.first.weight.clone()
    encoder.init_weights()
    assert torch.equal(encoder.first.weight, before)


def test_a_model_takes_it_by_name_and_trains_around_it(checkpoint: Path) -> None:
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 2}
    model = timm.create_model("moge_tiny", metadata_encoder=f"satclip:{checkpoint}", **sizes).train()
    torch.testing.assert_close(
        model.metadata_encoder.encoder.first.weight.double(), released()["state_dict"]["model.nnet.layers.0.weight"],
        check_dtype=False, atol=1e-6, rtol=1e-6,
    )  # fmt: skip
    model(torch.randn(4, 3, 16, 16), torch.rand(4, 2)).sum().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == [f"metadata_encoder.encoder.{name}.{kind}" for name in ("first", "hidden", "last")
                       for kind in ("weight", "bias")]  # fmt: skip
    assert model.blocks[0].mlp.router.codes.shape == (6, 5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"capacity": 7}, r"first.weight is .*hyper-parameters say"),
        ({"legendre_polys": 5}, r"first.weight is .*hyper-parameters say"),
        ({"embed_dim": 256}, r"last.weight is .*hyper-parameters say"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3"),
        ({"pe_type": "fcnet"}, "pe_type is 'fcnet'"),
        ({"le_type": "grid"}, "le_type is 'grid'"),
        ({"harmonics_calculation": "closed-form"}, "harmonics_calculation is 'closed-form'"),
        ({"capacity": None}, "lack capacity"),
    ],
)
def test_other_sizes_and_kinds_are_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    torch.save(released(**changed), tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=message):
        load_satclip(tmp_path / "other.ckpt")


def test_missing_layers_are_named(tmp_path: Path) -> None:
    content = released()
    del content["state_dict"]["model.location.nnet.layers.1.bias"]
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"hidden.bias is missing"):
        load_satclip(tmp_path / "other.ckpt")


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("save", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_an_arbitrary_pickle_is_refused_and_not_executed(save: Any, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    save({"state_dict": {}, "hyper_parameters": Trap(sprung)}, tmp_path / "trap.ckpt")
    with pytest.raises(CheckpointError, match="weights alone"):
        load_satclip(tmp_path / "trap.ckpt")
    assert not sprung.exists()


def test_files_that_are_something_else(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.ckpt")
    (tmp_path / "text.ckpt").write_text("<html>")
    for name, message in (
        ("list.ckpt", "no state_dict"),
        ("text.ckpt", "weights alone"),
        ("none.ckpt", "no such file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_satclip(tmp_path / name)


def test_the_hub_is_asked_for_the_released_file_name(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "timm_moe_dg.layers.encoders.pretrained.hf_hub_download", lambda *args: asked.append(args) or str(checkpoint)
    )
    assert load_satclip("microsoft/SatCLIP-ViT16-L10").degrees == 4
    assert asked == [("microsoft/SatCLIP-ViT16-L10", "satclip-vit16-l10.ckpt")]
