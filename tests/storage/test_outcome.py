"""`done` says what a finished run vouches for, and whoever uses it finds out whether that is still there."""

import pytest

from timm_moe_dg.errors import CheckpointError
from timm_moe_dg.storage.checksums import write_checksums
from timm_moe_dg.storage.outcome import lost, verify_model, vouch, vouched


@pytest.fixture
def run(tmp_path):
    for name, text in {"results.jsonl": "1\n2\n", "best/config.json": "{}", "best/model.safetensors": "w"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    write_checksums(tmp_path / "best")
    vouch(tmp_path, ["results.jsonl"], ["best"])
    return tmp_path


def model(run):
    return f"local-dir:{run / 'best'}"


def test_all_is_vouched_for_and_there(run):
    assert sorted(vouched(run)) == ["best/config.json", "best/model.safetensors", "results.jsonl"]
    assert lost(run) is None
    verify_model(model(run))


@pytest.mark.parametrize("name", ["results.jsonl", "best/config.json", "best/model.safetensors"])
def test_what_is_changed_or_gone_is_named(run, name):
    (run / name).write_text("x")
    assert lost(run) == f"{name} is not what was written"
    (run / name).unlink()
    assert lost(run) == f"{name} cannot be read: No such file or directory"
    assert (lost(run, "best") is None) == (name == "results.jsonl")


def test_a_changed_network_is_refused_in_one_line(run):
    (run / "best" / "model.safetensors").write_text("v")
    with pytest.raises(CheckpointError, match=r"model='local-dir:.*best': is damaged \(model.safetensors is not .*"):
        verify_model(model(run))
    write_checksums(run / "best")  # of another network, which its own table vouches for, and the run does not
    with pytest.raises(CheckpointError, match=r"best/model.safetensors is not what was written.*--no-verify"):
        verify_model(model(run))


@pytest.mark.parametrize("text", ["done", "", "done\n"])
def test_earlier_releases_vouch_for_nothing_and_are_read(run, text):
    (run / "done").write_text(text)
    (run / "results.jsonl").unlink()
    assert vouched(run) == {}
    assert lost(run) is None
    verify_model(model(run))
    (run / "best" / "checksums.json").unlink()
    verify_model(model(run))


@pytest.mark.parametrize("text", ["{", "[]", '{"files": {}}', '{"files": 5}', "\xff", "[" * 100_000])
def test_a_damaged_done_is_named(run, text):
    (run / "done").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match=r"run='.*': done is not what was written \("):
        vouched(run)
    assert "done is not what was written" in lost(run)


def test_any_flipped_byte_of_done_is_noticed(run):
    whole = (run / "done").read_bytes()
    for position in range(len(whole.rstrip())):
        (run / "done").write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert lost(run) is not None or vouched(run) == {}, position


def test_other_sources_are_not_looked_at(tmp_path):
    verify_model("hf-hub:owner/name")
    verify_model("gmoe_tiny_patch16")
    verify_model(f"local-dir:{tmp_path / 'nowhere'}")
