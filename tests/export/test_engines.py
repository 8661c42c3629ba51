"""Engines answer alike; where onnxruntime cannot, that is one error or, if asked for, one message and PyTorch."""

import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.models.backbones import BACKBONES
from tests.models.cases import BY_NAME, randomize
from timm_moe_dg.errors import ArgumentError, ExportError, MetadataError, MissingDependencyError, StorageError
from timm_moe_dg.export import engines, program_cache
from timm_moe_dg.export.engines import Engine

TOKYO = torch.tensor([[139.7, 35.7]])
PLACES = torch.tensor([[139.0, 36.0], [float("nan"), 20.0], [-120.0, -33.0], [140.5, 35.0], [0.0, 0.0]])
NEAR_TOKYO = [True, False, False, True, False]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(program_cache.ENVIRONMENT, str(tmp_path / "cache"))


def small(name, **options):
    torch.manual_seed(0)
    return randomize(BY_NAME[name].small(depth=1, moe_layers=[0], num_experts=3, **options), std=0.15).eval()


def near_tokyo():
    """A model that routes what was taken within 500 km of Tokyo."""
    network = small("moge_tiny")
    network.set_coverage(TOKYO)
    network.set_coverage_radius(500.0)
    return network


def convolutions():
    torch.manual_seed(0)
    return randomize(BACKBONES["Mlp, channels last"].mixture(moe_layers="last_two"), std=0.15).eval()


@dataclass
class Kind:
    """A network, the metadata that it is given, which images they decide about, and the side of these."""

    make: object
    metadata: torch.Tensor | None = None
    routed: list[bool] | None = None
    side: int = 32

    def inputs(self):
        images = torch.randn(5, 3, self.side, self.side, generator=torch.Generator().manual_seed(0))
        return (images,) if self.metadata is None else (images, self.metadata)


KINDS = {
    "gmoe": Kind(lambda: small("gmoe_tiny_patch16")),
    "sfmoe": Kind(lambda: small("sfmoe_small")),
    "convolutions": Kind(convolutions, side=64),
    "moge without metadata": Kind(lambda: small("moge_tiny")),
    "moge with coordinates, and coverage": Kind(near_tokyo, PLACES, NEAR_TOKYO),
    "moge with location ids": Kind(
        lambda: small("moge_small_patch32_384"), torch.tensor([3, -1, 322, 0, 3]), [True, False, True, True, True], 64
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_onnxruntime_gives_the_logits_and_features_of_pytorch_for_batches_of_any_size(kind, monkeypatch):
    network, inputs = KINDS[kind].make(), KINDS[kind].inputs()
    with torch.inference_mode():
        expected = Engine("torch", network, features=True)(*inputs)
        if KINDS[kind].routed:  # the metadata matter
            shared = network(inputs[0])
            assert ((expected[0] - shared).abs().amax(1) > 1e-2).tolist() == KINDS[kind].routed
        engine = Engine("onnxruntime", network, features=True)
        for size in (1, 5, 2):  # it is recorded with the first
            found = engine(*(one[:size] for one in inputs))
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs[:size], rtol=0, atol=1e-4)
        assert engine.name == "onnxruntime"
        monkeypatch.setattr(program_cache, "save_onnx", None)  # the program is there
        (again, _) = Engine("onnxruntime", KINDS[kind].make(), features=True)(*inputs)
    torch.testing.assert_close(again, expected[0], rtol=0, atol=1e-4)


@pytest.fixture
def runtime(monkeypatch):
    """Replaces export and onnxruntime by a function of the network's inputs."""

    def put(program):
        monkeypatch.setattr(engines, "cached_program", lambda network, inputs: None)
        monkeypatch.setattr(engines, "open_session", lambda path, device: program)

    return put


def images(number=5):
    return torch.randn(number, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def fails(error):
    def program(*inputs):
        raise error

    return program


FAULTS = {
    "wrong logits": (lambda *inputs: (torch.zeros(len(inputs[0]), 10),), ExportError, "5 of 5 images differ"),
    "not a number": (lambda *inputs: (torch.full((len(inputs[0]), 10), torch.nan),), ExportError, "5 of 5 images"),
    "cannot run": (fails(RuntimeError("NOT_IMPLEMENTED\nfor this")), ExportError, r"RuntimeError: NOT_IMPLEMENTED\)"),
    "no disk": (fails(StorageError("cache='x': is full")), StorageError, "cache='x'"),
    "no exporter": (fails(MissingDependencyError("needs onnx")), MissingDependencyError, "needs onnx"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_is_one_error_or_with_auto_one_message_and_the_answer_of_pytorch(fault, runtime, caplog):
    program, error, message = FAULTS[fault]
    runtime(program)
    network = small("gmoe_tiny_patch16")
    with pytest.raises(error, match=message):
        Engine("onnxruntime", network)(images())
    assert not caplog.records
    engine = Engine("auto", network)
    for _ in range(2):
        (found,) = engine(images())
        torch.testing.assert_close(found, network(images()))
    assert engine.name == "torch"
    (record,) = caplog.records
    assert record.getMessage().startswith("answers are PyTorch's: ")


@pytest.mark.parametrize("kind", ["onnxruntime", "auto", "torch"])
def test_onnxruntime_that_is_not_installed(kind, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # what an import of a missing package meets
    network = small("gmoe_tiny_patch16")
    if kind == "onnxruntime":
        with pytest.raises(MissingDependencyError, match=r"needs onnxruntime, .*timm_moe_dg\[export\]"):
            Engine(kind, network)
        return
    engine = Engine(kind, network)
    torch.testing.assert_close(engine(images())[0], network(images()))
    assert (engine.name, len(caplog.records)) == ("torch", 1 if kind == "auto" else 0)


def test_a_network_that_cannot_be_exported(caplog):
    class Undecided(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :2] if x.sum() > 0 else x.flatten(1)[:, 2:4]

    network = Undecided().eval()
    with pytest.raises(ExportError, match=r"engine='onnxruntime': cannot run this model \(\w+: .*--engine torch$"):
        Engine("onnxruntime", network)(images())
    engine = Engine("auto", network)
    torch.testing.assert_close(engine(images())[0], network(images()))
    assert engine.name == "torch"


def test_one_engine_answers_about_all_images(runtime):
    network = small("gmoe_tiny_patch16")
    calls = []

    def program(x):
        calls.append(len(x))
        if len(calls) == 3:
            raise MemoryError
        return (network(x),)

    runtime(program)
    engine = Engine("auto", network)
    engine(images())
    engine(images(3))
    with pytest.raises(ExportError, match="MemoryError"):
        engine(images())
    assert calls == [5, 3, 5]


def test_what_a_network_refuses_is_refused_by_each_engine(runtime):
    network = small("moge_tiny")
    runtime(lambda *inputs: (network(*inputs),))
    swapped = torch.tensor([[35.7, 139.7]]).repeat(5, 1)
    for kind in engines.ENGINES:
        with pytest.raises(MetadataError, match="swapped"):
            Engine(kind, network)(images(), swapped)


def test_a_network_that_refuses_images_by_their_metadata_is_left_to_pytorch(caplog):
    network = small("moge_tiny", shared_expert=False)
    with pytest.raises(ExportError, match=r"engine='onnxruntime': shared_expert=False .*--engine torch"):
        Engine("onnxruntime", network)
    assert Engine("auto", network).name == "torch"
    assert "shared_expert=False" in caplog.text


def test_an_engine_that_there_is_not():
    with pytest.raises(ArgumentError, match="engine='tensorrt': choose from torch, onnxruntime, auto"):
        Engine("tensorrt", nn.Identity())
