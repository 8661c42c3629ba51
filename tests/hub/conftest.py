"""A Hub on this machine, and the real client turned toward it."""

import pytest
from huggingface_hub import constants

from tests.hub_server import TOKEN, serve
from tests.load_tool import load_tool


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty hub; this process's client talks to it, with a cache of its own and the token that may write."""
    with serve() as local:
        monkeypatch.setattr(constants, "ENDPOINT", local.endpoint)
        template = local.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # retries at once
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield local


@pytest.fixture(scope="session")
def tool():
    """tools/push_to_hub.py as a module."""
    return load_tool("push_to_hub")
