"""What a run that goes on has lost is said, and made again where there is something to make it from."""

import json
import shutil

import pytest

from tests.storage.toy_runs import ARGS, STEPS, content, run
from timm_moe_dg.errors import RecordError
from timm_moe_dg.storage import RunFolder
from timm_moe_dg.storage.checksums import write_checksums

RESULTS = "results.jsonl"


@pytest.fixture
def expected(tmp_path):
    run(tmp_path / "whole")
    return content(tmp_path / "whole")


@pytest.fixture
def stopped(tmp_path):
    """After step 5: evaluated after steps 0, 2 and 4, which is the best."""
    run(tmp_path / "a", upto=6)
    return tmp_path / "a"


def cut_first(lines):
    return [lines[0][20:], *lines[1:]]


def changed(lines):
    return [lines[0].replace('"epoch": 1.5', '"epoch": 1.25'), *lines[1:]]


DAMAGES = {
    "first line cut": (cut_first, "0"),
    "a line dropped": (lambda lines: [lines[0], lines[2]], "2"),
    "a digit changed": (changed, "0"),
    "empty": (lambda lines: [], "0, 2, 4"),
    "not UTF-8": (lambda lines: ["\xff\xfe", *lines[1:]], "0, 2"),
    "lines in another order": (lambda lines: lines[::-1], None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_evaluations_come_back_from_the_copy_of_the_checkpoint(stopped, expected, caplog, damage):
    change, lost = DAMAGES[damage]
    lines = (stopped / RESULTS).read_text().splitlines(keepends=True)
    (stopped / RESULTS).write_bytes("".join(change(lines)).encode("latin1"))
    run(stopped, resume=True)
    assert content(stopped) == expected
    said = f"{RESULTS}: the evaluations of steps {lost} were lost or changed; taken from the checkpoint's copy"
    assert (said in caplog.text) == (lost is not None)


def test_so_do_they_when_the_file_is_missing(stopped, expected, caplog):
    (stopped / RESULTS).unlink()
    run(stopped, resume=True)
    assert content(stopped) == expected
    assert "evaluations of steps 0, 2, 4 were lost" in caplog.text


@pytest.mark.parametrize("change", [lambda line: line[:-9], lambda line: line.replace("0.9", "0.8"), lambda line: ""])
def test_that_of_the_checkpoint_s_own_step_is_evaluated_again(tmp_path, expected, change):
    run(tmp_path / "a", upto=5)
    lines = (tmp_path / "a" / RESULTS).read_text().splitlines(keepends=True)
    (tmp_path / "a" / RESULTS).write_text("".join([*lines[:-1], change(lines[-1])]))
    run(tmp_path / "a", resume=True)
    assert content(tmp_path / "a") == expected


@pytest.mark.parametrize("damage", ["removed", "bytes", "no table"])
def test_a_network_is_made_again_from_the_checkpoint_of_its_step(stopped, expected, damage):
    best = stopped / "best"
    if damage == "removed":
        shutil.rmtree(best)
    elif damage == "bytes":
        (best / "model.safetensors").write_bytes(b"0" + (best / "model.safetensors").read_bytes()[1:])
    else:
        (best / "checksums.json").write_text("[]")
    folder = run(stopped, resume=True)
    assert folder.missing == set()
    assert content(stopped) == expected


def test_a_network_of_which_there_is_no_checkpoint_is_missing_and_not_vouched_for(stopped):
    shutil.rmtree(stopped / "best_ood_worst_group")  # of step 0; the last two checkpoints are of steps 4 and 5
    folder = run(stopped, resume=True)
    assert folder.missing == {"best_ood_worst_group"}
    vouched = json.loads((stopped / "done").read_text())["files"]
    assert {name.partition("/")[0] for name in vouched} == {
        *("args.yaml", "best", "best_oracle", "best_ood_f1_macro", "results.jsonl", "summary.csv")
    }


def test_unverified_networks_are_taken_as_they_are(stopped):
    (stopped / "best" / "config.json").write_text("{ }")
    for verify in (True, False):
        folder = RunFolder(stopped, {**ARGS, "steps": STEPS}, resume=True, verify=verify)
        folder.read_back(folder.newest_checkpoint())
        assert folder.lost_networks() == ({"best": 4} if verify else {})


def older(path):
    """Makes of a run what releases without checksums have left."""
    for file in path.glob("best*/checksums.json"):
        file.unlink()
    for checkpoint in (path / "checkpoints").iterdir():
        table = json.loads((checkpoint / "state.json").read_text())
        table["state"]["dict"] = [entry for entry in table["state"]["dict"] if entry[0] != "records"]
        (checkpoint / "state.json").write_text(json.dumps(table))
        write_checksums(checkpoint)


def test_a_run_of_an_earlier_release_goes_on_as_before(stopped, expected):
    older(stopped)
    run(stopped, resume=True)
    found = content(stopped)
    assert found.keys() == expected.keys() - {
        f"{name}/checksums.json" for name in ("best", "best_ood_worst_group", "best_ood_f1_macro")
    }
    assert {name: text for name, text in found.items() if name != "done"}.items() <= expected.items()
    assert json.loads(found["done"]) == json.loads(expected["done"])


@pytest.mark.parametrize("text", [None, b"", b"\xff", b'{"step": 0'])
def test_without_a_copy_and_without_evaluations_it_is_refused_in_one_line(stopped, text):
    older(stopped)
    (stopped / RESULTS).unlink() if text is None else (stopped / RESULTS).write_bytes(text)
    before = content(stopped)
    with pytest.raises(RecordError, match=r"results.jsonl: holds no evaluation up to step 5, .*--experiment"):
        run(stopped, resume=True)
    assert content(stopped) == before
