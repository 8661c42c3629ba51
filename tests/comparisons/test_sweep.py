"""tools/sweep.py with a stand-in for finetune.py that takes its options and ends at once, and one real run."""

import re
import shlex
import sys

import pytest
import yaml
from PIL import Image

from tests.load_tool import run_tool
from timm_moe_dg.comparisons import sweep as sweeps
from timm_moe_dg.comparisons.sweep import duration
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.inspection import fingerprint

STAND_IN = """
import sys, yaml
from pathlib import Path

words = {}
for word in sys.argv[1:]:
    if word.startswith("--"):
        values = words.setdefault(word[2:].replace("-", "_"), [])
    else:
        values.append(yaml.safe_load(word.removeprefix("@")))
args = {name: values[0] for name, values in words.items()}
args["test_domains"] = words["test_domains"]
pairs = [word.partition("=") for word in words.get("model_kwargs", ())]
args["model_kwargs"] = {name: yaml.safe_load(value) for name, _, value in pairs}
folder = Path(args["output"], args["experiment"])
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts").open("a") as file:
    file.write(args["resume"] + "\\n")
filled = {"steps": 501, "eval_freq": 100, "lr": 3e-4, "weight_decay": 0, "batch_size": 16, "img_size": 32}
filled |= {"aux_coef": 0.01, "cka_coef": 0.01, "supcon_coef": 0.1, "supcon_temperature": 0.1}
(folder / "args.yaml").write_text(yaml.safe_dump({**filled, "split_by_photograph": False, **args}))
print("threads", args.get("cpu_threads"))
if Path(args["output"], "broken").exists() and args["test_domains"] == [1]:
    sys.exit("finetune.py: NonFiniteLossError: step 7")
(folder / "done").write_text("done")
"""
RUNS = [f"colored_digits-gmoe_small_patch16-ERM-test{domain}-trial0-hparams0" for domain in range(3)]


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """Runs the tool on the stand-in and returns (exit message, standard output)."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(sweeps, "FINETUNE", script)
    monkeypatch.setattr(sweeps.signal, "signal", lambda *_: None)

    def run(*words, passed=()):
        base = ["--datasets", "colored_digits", "--trial-seeds", 0, "--output", tmp_path / "runs"]
        try:
            run_tool("sweep", *base, *words, *(["--", *passed] if passed else []))
            status = 0
        except SystemExit as error:
            status = error.code
        return status, capsys.readouterr().out

    run.folder = tmp_path / "runs"
    return run


def starts(folder):
    return {name: (folder / name / "starts").read_text().split() for name in RUNS if (folder / name).exists()}


def test_all_runs_are_run_once(sweep):
    status, out = sweep("--jobs", "2")
    assert status == 0
    assert out.startswith("colored_digits: leave_one_domain_out 3; 3 sets of test domains x 1 trial seed")
    assert [line for line in out.splitlines() if line.startswith("[3/3] finished ")]
    assert starts(sweep.folder) == {name: ["auto"] for name in RUNS}
    assert "threads None" not in (sweep.folder / "logs" / f"{RUNS[0]}.log").read_text()
    status, out = sweep()
    assert (status, "3 are finished or running, 0 to do" in out) == (0, True)
    assert starts(sweep.folder) == {name: ["auto"] for name in RUNS}
    of_gpus = sweeps.slots(sweeps.LaunchOptions(gpus=["0", "2"]))
    assert of_gpus == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "2"}]


@pytest.mark.slow
def test_a_failed_run_does_not_stop_the_rest_and_is_gone_on_with(sweep):
    sweep.folder.mkdir()
    (sweep.folder / "broken").touch()
    status, out = sweep()
    assert status == f"sweep.py: 1 of 3 runs failed: {RUNS[1]}"
    assert "finetune.py: NonFiniteLossError: step 7" in out
    (sweep.folder / RUNS[2] / "done").unlink()
    status, out = sweep("--status")
    assert status == 0
    assert "1 finished, 0 running, 1 failed, 1 incomplete, 0 missing" in out
    assert [line.split()[:2] for line in out.splitlines()[-2:]] == [["failed", RUNS[1]], ["incomplete", RUNS[2]]]
    (sweep.folder / "broken").unlink()
    assert sweep()[0] == 0
    assert [len(times) for times in starts(sweep.folder).values()] == [1, 2, 2]


def test_dry_run_is_a_script_of_what_is_left(sweep):
    sweep("--domains", "1")
    status, out = sweep("--dry-run", passed=["--lr", "0.0003"])
    assert status == 0
    commands = [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]
    assert [words[words.index("--experiment") + 1] for words in commands] == [RUNS[0], RUNS[2]]
    assert all(words[0] == sys.executable and words[-2:] == ["--resume", "auto"] for words in commands)
    assert "--test-domains @0 --trial-seed 0" in out
    assert not (sweep.folder / RUNS[0]).exists()
    _, named = sweep("--dry-run", "--domains", "+90%")
    assert named == sweep("--dry-run", "--domains", "0")[1].replace("domains ['0']", "domains ['+90%']")
    assert RUNS[0] in named


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ([], ["--steps", "3"], "steps: 501 there, 3 planned"),
        (["--steps", "3"], [], "steps: 3 there, 501 planned"),
        (["--lr", "0.1"], [], "lr: 0.1 there, 0.0003 planned"),
        (["--aux-coef", "0"], [], "aux_coef: 0.0 there, 0.01 planned"),
        (["--model-kwargs", "depth=3"], ["--model-kwargs", "depth=4"], "model_kwargs: .*3.* there, .*4.* planned"),
        (["--averaging", "ema"], [], "averaging: 'ema' there, None planned"),
        (["--cpu-threads", "1"], ["--cpu-threads", "2"], None),
    ],
)
def test_a_run_with_other_options_does_not_count_as_this_one(sweep, first, second, difference):
    sweep(passed=first)
    status, _ = sweep("--status", passed=second)
    if difference:
        assert re.search(f"holds a run with other options .*{difference}", status)
    else:
        assert status == 0


def test_a_run_on_other_data_or_from_other_weights_does_not_count_as_this_one(sweep, monkeypatch):
    sweep()
    recorded = fingerprint(get_benchmark("colored_digits").read(None))
    path = sweep.folder / RUNS[1] / "args.yaml"
    args = yaml.safe_load(path.read_text())

    def record(**changes):
        path.write_text(yaml.safe_dump({**args, **changes}))

    record(domain_digests=recorded)
    assert sweep("--status")[0] == 0
    record(domain_digests=[*recorded[:2], {**recorded[2], "contents": "0"}])
    status = sweep("--status")[0]
    assert status.startswith(f"sweep.py: ArgumentError: output='{path.parent}': holds a run on other data: ")
    record(weights_sha256="0")  # a file that is not there, and other content
    assert sweep("--status")[0].startswith("sweep.py: ArgumentError: model='gmoe_small_patch16': ")
    monkeypatch.setattr(sweeps, "weights_files", lambda args: [path])
    assert sweep("--status")[0].startswith("sweep.py: ArgumentError: model='gmoe_small_patch16': ")


@pytest.mark.parametrize(
    ("words", "passed", "complaint"),
    [
        ([], ["--model", "other"], "sweep.py: ArgumentError: model='other': row 'gmoe_small_patch16' has "),
        ([], ["--modle", "other"], "2"),
        (["--options", "modle=1"], [], "sweep.py: OptionError: modle=1: "),
        (["--protocol", "single_source", "--domains", "3"], [], r"sweep.py: ProtocolError: domains=\['3'\]"),
        (["--datasets", "PASC"], [], "sweep.py: ArgumentError: dataset='PASC'"),
        (["--domains", "art"], [], r"sweep.py: ProtocolError: domains=\['art'\]: no domain is called art"),
        (["-c", "missing.yaml"], [], "sweep.py: ArgumentError: config='missing.yaml': cannot be read"),
    ],
)
def test_a_mistake_ends_the_sweep_before_it_starts(sweep, words, passed, complaint):
    status, _ = sweep(*words, passed=passed)
    assert re.match(complaint, str(status))
    assert not sweep.folder.exists()


def test_a_sweep_asks_for_its_data_set(sweep):
    with pytest.raises(SystemExit, match=r"^sweep.py: ArgumentError: datasets=None: give --datasets NAME, such as"):
        run_tool("sweep", "--output", sweep.folder, "--dry-run")
    assert not sweep.folder.exists()


def test_a_file_gives_rows_their_own_options_and_names(sweep, tmp_path):
    rows = {"first": {"model": "a", "model_kwargs": {"layers": [2, 3]}}, "second": {"model": "b", "lr": 0.1}}
    plan = {"rows": rows, "options": {"model_kwargs": {"depth": 4}, "steps": 7}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump(rows))
    plain = ["-c", tmp_path / "plan.yaml", "--domains", 0]
    for words in (plain, [*plain, "--rows", tmp_path / "rows.yaml"]):
        assert sweep(*words, passed=["--model-kwargs", "width=8"])[0] == 0
    assert len(list(sweep.folder.glob("*/args.yaml"))) == 2
    a, b = (yaml.safe_load(path.read_text()) for path in sorted(sweep.folder.glob("*/args.yaml")))
    assert (a["row"], a["model"], a["model_kwargs"]) == ("first", "a", {"depth": 4, "layers": [2, 3], "width": 8})
    assert (b["row"], b["model_kwargs"], b["steps"], b["lr"]) == ("second", {"depth": 4, "width": 8}, 7, 0.1)
    complaint = "sweep.py: ArgumentError: lr=0.2: row 'second' has lr=0.1; leave it out of one of them"
    assert sweep(*words, passed=["--lr", "0.2"])[0] == complaint
    assert sweep(*words, "--models", "a")[0].startswith("sweep.py: ArgumentError: models=")


def test_words_for_all_runs_describe_the_data_too(sweep, tmp_path):
    (tmp_path / "data").mkdir()
    for name in "ab":
        Image.new("RGB", (4, 4)).save(tmp_path / "data" / f"{name}.png")
    table = "file,kind,where\na.png,cat,x\nb.png,cat,y\n"
    (tmp_path / "data" / "metadata.csv").write_text(table)
    words = ["--datasets", "place_folder", "--data-dir", str(tmp_path / "data"), "--dry-run"]
    columns = ["--columns", "path=file", "label=kind", "group=where"]
    status, out = sweep(*words, passed=columns)
    commands = [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]
    assert (status, [words[words.index("--columns") + 1] for words in commands]) == (0, ["path='file'"] * 2)


@pytest.mark.slow
def test_a_real_run_is_run_and_recognized(tmp_path, capsys, monkeypatch, fresh_python):
    monkeypatch.setattr(sys, "executable", fresh_python)
    size = ["--model-kwargs", "embed_dim=48", "depth=2", "num_heads=3", "moe_layers=(1,)", "patch_size=8"]
    words = ["--datasets", "colored_digits", "--models", "gmoe_tiny_patch16", "--domains", "0", "--trial-seeds", "0"]
    words += ["--output", tmp_path, "--", "--steps", "2", "--batch-size", "4", "--workers", "0", *size]
    run_tool("sweep", *words)
    assert "[1/1] finished" in capsys.readouterr().out
    run_tool("sweep", *words)
    assert "1 are finished or running, 0 to do" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="batch_size: 4 there, 16 planned"):
        run_tool("sweep", *(word for word in words if word not in ("--batch-size", "4")))


@pytest.mark.parametrize(("seconds", "words"), [(89.4, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")])
def test_times_are_in_words(seconds, words):
    assert duration(seconds) == words
