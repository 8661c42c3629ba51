"""A program's answers are the model's; anything that is not the model's program is refused with one line."""

import copy
import sys
from argparse import Namespace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import onnx
import pytest
import torch

from tests.models.backbones import BACKBONES
from tests.models.cases import BY_NAME, randomize
from timm_moe_dg.errors import ArgumentError, ExportError, MetadataError, MissingDependencyError
from timm_moe_dg.export import engine, programs
from timm_moe_dg.export.engine import make_engine
from timm_moe_dg.export.programs import CUDA_PROVIDER, DIGEST, export_model, network_digest, open_session
from timm_moe_dg.networks.trained import WithFeatures

TOKYO = torch.tensor([[139.7, 35.7]])
PLACES = torch.tensor([[139.0, 36.0], [float("nan"), 20.0], [-120.0, -33.0], [140.5, 35.0], [0.0, 0.0]])


def small(name, **options):
    torch.manual_seed(0)
    return randomize(BY_NAME[name].small(depth=1, moe_layers=[0], num_experts=3, **options), std=0.15).eval()


def near_tokyo():
    """A model that routes images taken within 500 km of Tokyo."""
    network = small("moge_tiny")
    network.set_coverage(TOKYO)
    network.set_coverage_radius(500.0)
    return network


def convolutions():
    torch.manual_seed(0)
    return randomize(BACKBONES["Mlp, channels last"].mixture(moe_layers="last_two"), std=0.15).eval()


def option(path):
    return Namespace(engine=None if path is None else str(path))


def images(number=5, side=32):
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(0))


# A model, its metadata, which images these change, and the side of the images
KINDS = {
    "convolutions": (convolutions, None, None, 64),
    "coordinates and coverage": (near_tokyo, PLACES, [True, False, False, True, False], 32),
    "location ids": (partial(small, "moge_small_patch32_384"), torch.tensor([3, -1, 322, 0, 3]), [1, 0, 1, 1, 1], 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_program_gives_the_logits_and_features_of_pytorch_for_batches_of_any_size(kind, tmp_path):
    make, metadata, changed, side = KINDS[kind]
    network, inputs = make(), (images(side=side), *([] if metadata is None else [metadata]))
    export_model(WithFeatures(network).eval(), inputs, tmp_path, "onnx")
    by_torch, by_program = (
        make_engine(option(path), network, (3, side, side), features=True) for path in (None, tmp_path / "model.onnx")
    )
    expected = by_torch(*inputs)
    for size in (1, 5, 2):
        for output, reference in zip(by_program(*(part[:size] for part in inputs)), expected, strict=True):
            torch.testing.assert_close(output, reference[:size], rtol=0, atol=1e-4)
    if metadata is not None:
        shared = network(inputs[0])
        assert ((expected[0] - shared).abs().amax(1) > 1e-2).tolist() == changed
        torch.testing.assert_close(by_program(inputs[0])[0], shared, rtol=0, atol=1e-4)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Returns a function that makes an engine whose program is a Python function."""

    def make(network, function, shapes=None, features=False, exported=None, **options):
        shapes = {"images": (3, 32, 32), "logits": (10,), **(shapes or {})}
        nodes = [SimpleNamespace(name=name, shape=["batch", *shape]) for name, shape in shapes.items()]
        session = SimpleNamespace(
            get_inputs=lambda: [node for node in nodes if node.name not in ("logits", "features")],
            get_outputs=lambda: [node for node in nodes if node.name in ("logits", "features")],
            get_modelmeta=lambda: SimpleNamespace(custom_metadata_map={DIGEST: network_digest(exported or network)}),
        )
        monkeypatch.setattr(engine, "open_session", lambda path, device: session)
        monkeypatch.setattr(engine, "run_session", lambda session, inputs: function(*inputs))
        (tmp_path / "model.onnx").touch()
        args = Namespace(engine=str(tmp_path / "model.onnx"), **options)
        return make_engine(args, network, (3, 32, 32), features)

    return make


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"logits": (7,)}, r"'logits': \(7,\)\}, the model's \{.*'logits': \(10,\)\}; export it again"),
        ({"images": (3, 64, 64)}, r"'images': \(3, 64, 64\)"),
        ({"metadata": (2,)}, r"'metadata': \(2,\)"),
    ],
)
def test_a_program_of_another_shape_or_number_of_classes_is_refused(program, shapes, message):
    with pytest.raises(ArgumentError, match=r"engine='.*model.onnx': is not a program of this model: .*" + message):
        program(small("gmoe_tiny_patch16"), None, shapes)


def changed(network, change):
    """The same network with one change."""
    changed_network = copy.deepcopy(network)
    change(changed_network)
    return changed_network


NEARBY = {
    "radius": lambda network: network.set_coverage_radius(500.001),
    "no radius": lambda network: network.set_coverage_radius(None),
    "mode": lambda network: network.set_expert_mode("shared"),
    "expert": lambda network: network.set_expert_mode(1),
    "top_k": lambda network: setattr(network.blocks[0].mlp.router, "top_k", 1),
    "num_heads": lambda network: setattr(network.blocks[0].attn, "num_heads", 4),
    "eps": lambda network: setattr(network.norm, "eps", 1e-2),
    "one weight": lambda network: network.head.bias.data[0].add_(1e-6),
    "coordinates": lambda network: network.metadata_encoder.coverage.points[0, 0].add_(1),
}


@pytest.mark.parametrize("change", NEARBY)
def test_a_program_of_a_network_nearby_is_refused(program, change):
    network = near_tokyo()
    with pytest.raises(ExportError, match=r"model.onnx': was exported from another network, .*; export it again: "):
        program(changed(network, NEARBY[change]), None, {"metadata": (2,)}, exported=network)
    program(copy.deepcopy(network), None, {"metadata": (2,)}, exported=WithFeatures(network))


@pytest.mark.slow
def test_an_exported_file_carries_the_digest_and_a_file_without_one_is_refused(tmp_path):
    network = small("gmoe_tiny_patch16")
    path = export_model(network, (images(),), tmp_path, "onnx").path
    make_engine(option(path), network, (3, 32, 32))
    program = onnx.load(path)
    del program.metadata_props[:]
    onnx.save(program, path)
    with pytest.raises(ExportError, match=r"carries no digest of its network; export it again: timm-moe-dg export "):
        make_engine(option(path), network, (3, 32, 32))


@torch.no_grad()
def test_a_program_of_other_weights_is_refused_and_one_near_tie_is_not(program):
    network = small("gmoe_tiny_patch16")
    size = network(images()).abs().max()

    def moved(rows):
        def function(x):
            logits = network(x)
            logits[rows] += size
            return (logits,)

        return program(network, function)

    with pytest.raises(ExportError, match=r"model.onnx': its logits differ from those of --model by up to .*; export"):
        moved([0, 2, 4])(images())
    with pytest.raises(ExportError, match="up to nan"):
        program(network, lambda x: (torch.full((len(x), 10), torch.nan),))(images())
    run = moved([3])
    run(images())
    assert ((run(images())[0] - network(images())).abs().amax(1) > 0).tolist() == [False, False, False, True, False]


def test_features_have_to_be_in_the_program_if_they_are_requested(program):
    network = small("gmoe_tiny_patch16")
    with pytest.raises(ArgumentError, match=r"does not return the features .* export it again with --features"):
        program(network, None, features=True)
    both = program(network, WithFeatures(network), {"features": (32,)}, features=True)
    assert len(both(images())) == 2


def test_metadata_are_checked_as_by_the_model_and_unknown_if_left_out(program):
    network, inputs = small("moge_tiny"), []

    def function(x, metadata):
        inputs.append(metadata)
        return (network(x, metadata),)

    run = program(network, function, {"metadata": (2,)})
    with pytest.raises(MetadataError, match="swapped"):
        run(images(), torch.tensor([[35.7, 139.7]]).repeat(5, 1))
    torch.testing.assert_close(run(images())[0], network(images()))
    assert inputs[0].isnan().all()


@pytest.mark.parametrize(("name", "value"), [("coverage_radius", 400.0), ("expert_mode", "shared")])
def test_an_option_that_a_program_cannot_follow_is_refused(program, name, value):
    network, given = near_tokyo(), {name: value}
    loaded = changed(network, lambda network: getattr(network, f"set_{name}")(value))
    program(loaded, None, {"metadata": (2,)}, **given)  # exported with the same option
    with pytest.raises(ArgumentError, match=rf"{name}=.*: cannot change a program; export it with this option"):
        program(loaded, None, {"metadata": (2,)}, exported=network, **given)


def test_an_error_of_onnxruntime_a_file_that_is_missing_or_no_program_and_a_missing_package(
    program, tmp_path, monkeypatch
):
    network, path = small("gmoe_tiny_patch16"), tmp_path / "other.onnx"
    with pytest.raises(ArgumentError, match=r"engine='auto': no such file; write it with tools/export\.py"):
        make_engine(option("auto"), network, (3, 32, 32))
    path.write_text("no program")
    with pytest.raises(ExportError, match=r"other.onnx': onnxruntime cannot read it \(.*\); give a model.onnx"):
        make_engine(option(path), network, (3, 32, 32))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if it were missing
    with pytest.raises(MissingDependencyError, match=r"needs onnxruntime, .*timm_moe_dg\[export\]"):
        make_engine(option(path), network, (3, 32, 32))
    assert torch.equal(make_engine(option(None), network, (3, 32, 32))(images())[0], network(images()))
    fails = Mock(side_effect=RuntimeError("NOT_IMPLEMENTED\nand much more"))
    with pytest.raises(ExportError, match=r"cannot run it \(RuntimeError: NOT_IMPLEMENTED\); leave --engine out$"):
        program(network, fails)(images())


def test_a_session_has_the_threads_of_torch_and_the_device_s_provider(monkeypatch, tmp_path):
    runtime, cuda = Mock(), torch.device("cuda", 1)
    runtime.get_available_providers.return_value = ["CPUExecutionProvider"]
    monkeypatch.setattr(programs, "_required", lambda feature, *packages: [runtime])
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        open_session(tmp_path)
        _, options = runtime.InferenceSession.call_args.args
        assert options.intra_op_num_threads == threads
        options.add_session_config_entry.assert_called_with("session.intra_op.allow_spinning", "0")
    assert runtime.InferenceSession.call_args.kwargs == {"providers": ["CPUExecutionProvider"]}
    with pytest.raises(ExportError, match=r"device='cuda:1': onnxruntime has CPUExecutionProvider; "):
        open_session(tmp_path, cuda)
    runtime.get_available_providers.return_value = [CUDA_PROVIDER, "CPUExecutionProvider"]
    open_session(tmp_path, cuda)
    providers = runtime.InferenceSession.call_args.kwargs["providers"]
    assert providers[0] == (CUDA_PROVIDER, {"device_id": 1, "use_tf32": 0})
    with pytest.raises(ExportError, match="device='mps'"):
        open_session(tmp_path, torch.device("mps"))
