"""A Hub that does not answer is told at once, and what is in the cache is enough."""

import logging
import socket
import time

import pytest
from huggingface_hub import constants

from timm_moe_dg.errors import CheckpointError
from timm_moe_dg.networks.build import build_network
from timm_moe_dg.networks.reach import hub_or_cache


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """An address at which nobody listens, as the Hub's, and an empty cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return endpoint


def test_an_unreachable_hub_is_one_line_and_one_error_within_seconds(nobody, caplog):
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="cannot be had"):
        build_network("gmoe_tiny_patch16", 3, pretrained=True)
    assert time.monotonic() - begun < 8  # the client's own retries take 23 seconds
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"the Hub ({nobody}) cannot be reached; looking for its files in the cache"]
    assert constants.HF_HUB_OFFLINE is False


def test_offline_is_lifted_afterwards(nobody):
    with hub_or_cache():
        assert constants.HF_HUB_OFFLINE is True
    assert constants.HF_HUB_OFFLINE is False
