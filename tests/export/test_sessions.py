"""onnxruntime computes with torch's number of threads, on a device that it has."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from timm_moe_dg.errors import ExportError
from timm_moe_dg.export import sessions
from timm_moe_dg.export.sessions import CUDA_PROVIDER, open_session


@pytest.fixture
def opened(monkeypatch):
    """What a session was opened with; it doubles images and adds metadata."""
    found = {}

    class Session:
        def __init__(self, path, options, providers):
            found.update(options.entries, threads=options.intra_op_num_threads, providers=providers)

        def get_inputs(self):
            return [SimpleNamespace(name="images"), SimpleNamespace(name="metadata")]

        def run(self, names, fed):
            assert all(isinstance(one, np.ndarray) for one in fed.values())
            return [fed["images"] * 2, fed["images"] + fed["metadata"]]

    class Options:
        def __init__(self):
            self.entries = {}

        def add_session_config_entry(self, name, value):
            self.entries[name] = value

    found["offered"] = ["CPUExecutionProvider"]
    runtime = SimpleNamespace(
        InferenceSession=Session, SessionOptions=Options, get_available_providers=lambda: found["offered"]
    )
    monkeypatch.setattr(sessions, "required", lambda feature, *packages: [runtime])
    return found


def test_threads_are_those_of_torch_and_inputs_go_by_their_order(opened, tmp_path):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            run = open_session(tmp_path / "model.onnx")
            assert opened["threads"] == threads
            assert opened["session.intra_op.allow_spinning"] == "0"
    finally:
        torch.set_num_threads(before)
    doubled, added = run(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
    assert (doubled.tolist(), added.tolist()) == ([2.0, 4.0], [11.0, 22.0])
    assert opened["providers"] == ["CPUExecutionProvider"]
    with pytest.raises(ValueError, match="zip"):
        run(torch.zeros(1))


def test_cuda_is_used_if_it_is_asked_for_and_there(opened, tmp_path):
    cuda = torch.device("cuda", 1)
    with pytest.raises(ExportError, match=r"device='cuda:1': onnxruntime has CPUExecutionProvider; "):
        open_session(tmp_path, cuda)
    opened["offered"] = [CUDA_PROVIDER, "CPUExecutionProvider"]
    open_session(tmp_path, cuda)
    assert opened["providers"][0] == (CUDA_PROVIDER, {"device_id": 1, "use_tf32": 0})
    open_session(tmp_path)
    assert opened["providers"] == ["CPUExecutionProvider"]
    with pytest.raises(ExportError, match="device='mps'"):
        open_session(tmp_path, torch.device("mps"))
