"""A program is made once, again where it is damaged or another network's, and apart for all that decides it."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.models.cases import BY_NAME, randomize
from timm_moe_dg.errors import StorageError
from timm_moe_dg.export import program_cache
from timm_moe_dg.export.program_cache import ENVIRONMENT, cache_folder, cached_program, describe

CASE, MOGE = BY_NAME["gmoe_tiny_patch16"], BY_NAME["moge_tiny"]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The programs that are made; they are texts, and no compiler runs."""
    found = []

    def save(program, path):
        found.append(path)
        path.write_text(f"program {len(found)}")

    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "cache"))
    monkeypatch.setattr(program_cache, "record_program", lambda network, inputs: inputs)
    monkeypatch.setattr(program_cache, "save_onnx", save)
    return found


def small(case=CASE, **options):
    torch.manual_seed(0)
    return randomize(case.small(depth=1, moe_layers=[0], **options)).eval()


def test_the_second_time_nothing_is_made(made):
    first = cached_program(small(), (CASE.images(3),))
    network = small()
    network(CASE.images())  # which leaves its traces in the layers
    assert cached_program(network, (CASE.images(1),)) == first
    assert (first.read_text(), len(made)) == ("program 1", 1)
    assert sorted(path.name for path in first.parent.iterdir()) == ["checksums.json", "made_of.json", "model.onnx"]
    assert first.is_relative_to(cache_folder())


@pytest.mark.parametrize("name", ["model.onnx", "made_of.json", "checksums.json"])
@pytest.mark.parametrize("content", ["{}", None])
def test_a_damaged_entry_is_made_again(made, caplog, name, content):
    path = cached_program(small(), (CASE.images(),))
    (path.parent / name).unlink() if content is None else (path.parent / name).write_text(content)
    assert cached_program(small(), (CASE.images(),)) == path
    assert path.read_text() == "program 2"
    assert "making it again" in caplog.text
    assert cached_program(small(), (CASE.images(),)).read_text() == "program 2"


def test_the_entry_of_another_network_is_not_taken_for_ones_own(made, caplog):
    path, other = (cached_program(small(top_k=top_k), (CASE.images(),)) for top_k in (1, 2))
    shutil.rmtree(path.parent)
    shutil.copytree(other.parent, path.parent)
    assert cached_program(small(top_k=1), (CASE.images(),)).read_text() == "program 3"
    assert "that of another network" in caplog.text


def change_weight(network):
    network.blocks[0].mlp.experts.fc2.bias.data[1, 2] += 1e-6


def cover(network):
    network.set_coverage(torch.tensor([[139.7, 35.7]]))


def cover_and_bound(network):
    cover(network)
    network.set_coverage_radius(500.0)


@pytest.mark.parametrize(
    "change",
    [
        change_weight,
        cover,
        cover_and_bound,
        lambda network: network.set_expert_mode("shared"),
        lambda network: network.set_expert_mode(1),
        lambda network: setattr(network.blocks[0].mlp.router, "top_k", 1),
        lambda network: setattr(network.norm, "eps", 1e-3),
        lambda network: setattr(network.blocks[0].attn, "scale", 2.0),
        lambda network: setattr(network, "norm_pre", torch.nn.ReLU()),
    ],
)
def test_everything_that_decides_a_program_tells_entries_apart(change):
    inputs = MOGE.inputs()
    network = small(MOGE)
    assert describe(network, inputs) == describe(small(MOGE), inputs)
    before = describe(network, inputs)
    change(network)
    assert describe(network, inputs) != before


def test_inputs_and_versions_tell_entries_apart(monkeypatch):
    network, (images, places) = small(MOGE), MOGE.inputs()
    described = {describe(network, inputs) for inputs in ((images,), (images, places), (images, places.double()))}
    described |= {describe(network, (MOGE.images(size=64),))}
    monkeypatch.setattr(torch, "__version__", "0.0")
    described |= {describe(network, (images,))}
    assert len(described) == 5
    for text in described:
        assert json.loads(text)["versions"]["opset"] == program_cache.OPSET


def test_where_programs_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "timm_moe_dg" / "programs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches" / "timm_moe_dg" / "programs"
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine" / "programs"


def test_a_folder_that_cannot_be_written_is_named(made, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "file"))
    with pytest.raises(StorageError, match=rf"cache='.*file/programs': cannot be written .*set {ENVIRONMENT}"):
        cached_program(small(), (CASE.images(),))


def test_an_export_that_fails_leaves_nothing(made, monkeypatch):
    def fail(program, path):
        path.write_text("half")
        raise RuntimeError("no such operator")

    monkeypatch.setattr(program_cache, "save_onnx", fail)
    with pytest.raises(RuntimeError, match="no such operator"):
        cached_program(small(), (CASE.images(),))
    assert [path.name for path in cache_folder().iterdir()] == [".lock"]


def test_of_those_that_begin_together_one_makes_it(made):
    together = threading.Barrier(3)  # a lock of a file holds between threads as between processes
    network, images = small(), CASE.images()

    def work(number):
        together.wait()
        return cached_program(network, (images,))

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(work, range(3)))) == len(made) == 1
