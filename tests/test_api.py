"""Training, evaluation and prediction as functions: the commands' numbers, and a process left as it was found."""

import inspect
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import sklearn  # noqa: F401 (the first import sets environment variables)
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from PIL import Image

import timm_moe_dg
from tests.invented import invented_records, write_run
from tests.load_tool import load_tool
from tests.saved_run import outcome
from tests.tools.test_finetune_resume import during_step
from timm_moe_dg.errors import (
    ArgumentError,
    FolderInUseError,
    ImageReadError,
    MoeDgError,
    OptionError,
    RecordError,
    RouterError,
    RunInterruptedError,
)
from timm_moe_dg.protocols.options import RunOptions

SIZE = {"embed_dim": 24, "depth": 2, "num_heads": 2, "patch_size": 8, "moe_layers": (1,), "num_experts": 3}
RUN = {"model": "gmoe_tiny_patch16", "model_kwargs": SIZE, "img_size": 16, "steps": 4, "eval_freq": 2, "batch_size": 2}
RUN |= {"dataset": "rotated_digits", "workers": 0, "cpu_threads": 1, "lr": 1e-3, "save_rules": ["oracle"]}
# The same options in a shell
WORDS = [f"--{name.replace('_', '-')}={value}" for name, value in RUN.items() if not isinstance(value, dict | list)]
WORDS += ["--save-rules", "oracle"]


def state():
    """Everything of the process that a run changes."""
    logger = logging.getLogger("timm_moe_dg")
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "log": (logger.level, list(logger.handlers), list(logging.getLogger().handlers)),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "threads": torch.get_num_threads(),
        "hook": threading.excepthook,
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),  # noqa: NPY002
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, whose folder must not be changed."""
    before = state()
    trained = timm_moe_dg.finetune(**RUN, output=tmp_path_factory.mktemp("runs"), experiment="a")
    assert state() == before
    return trained


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 255, (5, 20, 20, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.mark.slow
def test_a_run_from_python_has_the_bits_of_the_shell_whatever_ran_before_in_the_process(run, tmp_path):
    words = ["--model-kwargs", *(f"{name}={value}" for name, value in SIZE.items())]
    words += WORDS
    load_tool("finetune").main([*words, "--output", str(tmp_path), "--experiment", "shell"])
    assert outcome(tmp_path / "shell") == outcome(run.path)
    mixed = {**RUN, "amp_dtype": "bfloat16", "cpu_threads": 2, "log_tensorboard": True}
    before = state()
    other = timm_moe_dg.finetune(**mixed, output=tmp_path, experiment="mixed")
    assert state() == before
    assert outcome(other) != outcome(run)
    assert list((other.path / "tensorboard").rglob("events*"))
    again = timm_moe_dg.finetune(**RUN, output=tmp_path, experiment="again")
    assert outcome(again) == outcome(run)
    assert not (again.path / "tensorboard").exists()


def test_an_accelerator_of_the_caller_keeps_its_precision(run, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)  # of other tests in this process
    own = Accelerator(mixed_precision="bf16", cpu=True)
    again = timm_moe_dg.finetune(**RUN, output=tmp_path, experiment="again")
    assert outcome(again) == outcome(run)
    assert own.mixed_precision == "bf16"
    own.free_memory()


def test_records_have_a_row_for_each_evaluation_and_domain(run):
    frame = run.records
    rows = [json.loads(line) for line in (run.path / "results.jsonl").read_text().splitlines()]
    assert frame.step.tolist() == [step for step in (0, 2, 3) for _ in range(6)]
    assert frame.domain[:2].tolist() == ["rot_0", "rot_15"]
    assert frame.role[:2].tolist() == ["test", "train"]
    assert frame.out_acc.tolist() == [row[f"env{domain}_out_acc"] for row in rows for domain in range(6)]
    assert frame.loss.tolist() == [row["loss"] for row in rows for _ in range(6)]


def test_a_finished_run_whose_last_line_is_damaged_is_an_error(tmp_path):
    folder = write_run(tmp_path / "run", invented_records([0]))
    results = folder / "results.jsonl"
    results.write_bytes(results.read_bytes()[:-9])
    with pytest.raises(RecordError, match=r"results.jsonl, line 3: .* is not JSON"):
        timm_moe_dg.Run(folder).records  # noqa: B018
    (folder / "done").unlink()
    assert timm_moe_dg.Run(folder).records.step.unique().tolist() == [0, 300]


def test_the_frames_are_the_files_of_the_commands(run, images, tmp_path):
    scores = timm_moe_dg.evaluate(run, workers=0, output=tmp_path / "scores")
    pd.testing.assert_frame_equal(scores, pd.read_csv(tmp_path / "scores" / "per_domain.csv"), check_exact=True)
    table = timm_moe_dg.predict(run, images, workers=0, top_k=3, output=tmp_path / "table.csv")
    written = pd.read_csv(tmp_path / "table.csv", dtype={name: str for name in table if name.startswith("class")})
    pd.testing.assert_frame_equal(table, written, check_exact=True)
    assert len(table) == 5
    assert timm_moe_dg.predict(str(run.path), [images / "3.png"], workers=0).path.tolist() == [str(images / "3.png")]
    runs = timm_moe_dg.read_runs(run.path.parent)
    assert runs.groupby("model").test_acc.max().notna().all()


def test_settings_of_the_caller_have_no_effect_on_a_run(run, images, tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            again = timm_moe_dg.finetune(**RUN, output=tmp_path, experiment="again")
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert outcome(again) == outcome(run)
    calls = (
        partial(timm_moe_dg.finetune, **RUN, output=tmp_path, experiment="autocast"),
        partial(timm_moe_dg.predict, run, images),
        partial(timm_moe_dg.predict_part, run, {"path": []}),
    )
    for call in calls:
        with torch.autocast("cpu"), pytest.raises(ArgumentError, match=r"torch\.autocast=True: leave this context"):
            call()


def test_a_network_takes_the_place_of_its_run(run, images):
    before = state()
    network = run.model()
    timm_moe_dg.predict(network, images.glob("*.png"), workers=0)
    assert state() == before
    assert not network.training
    options = {"dataset": "rotated_digits", "test_domains": [0], "workers": 0}
    scores = timm_moe_dg.evaluate(network, **options, trial_seed=0)
    of_run = timm_moe_dg.evaluate(run, workers=0)
    assert (scores.ece == scores.ece_uncalibrated).all()  # a network alone has no temperature
    differing = ["role", "ece"]
    pd.testing.assert_frame_equal(scores.drop(columns=differing), of_run.drop(columns=differing))
    pair = [timm_moe_dg.predict(model, images, workers=0, columns=["logits"]) for model in (network, run)]
    pd.testing.assert_frame_equal(*(table.drop(columns=["probability", "status"]) for table in pair))


def test_of_equal_logits_predict_takes_the_class_that_evaluate_takes(run, images):
    network = run.model()
    for parameter in network.head.parameters():
        torch.nn.init.zeros_(parameter)
    table = timm_moe_dg.predict(network, images, workers=0, top_k=3)
    assert [table[name].unique().tolist() for name in ("class", "class_2", "class_3")] == [["0"], ["1"], ["2"]]


def test_threads_that_share_a_network_get_the_experts_and_features_of_their_own_images(run, images):
    network = run.model()
    files = sorted(images.glob("*.png"))
    predict = partial(timm_moe_dg.predict, network, workers=0, columns=["experts", "features"])
    expected = [predict([file]) for file in files]
    network.register_forward_hook(lambda *_: time.sleep(0.05))  # so that forwards of the others end meanwhile
    with ThreadPoolExecutor(len(files)) as pool:
        tables = list(pool.map(lambda file: predict([file]), files))
    for table, alone in zip(tables, expected, strict=True):
        assert table.experts.tolist() == alone.experts.tolist()
        np.testing.assert_allclose(table.features.tolist(), alone.features.tolist(), atol=1e-6)


def test_help_lists_every_option_of_the_command():
    parameters = inspect.signature(timm_moe_dg.finetune).parameters
    options = {name: value for name, value in vars(RunOptions()).items() if name != "filled_in"}
    assert {name: part.default for name, part in parameters.items() if name != "imports"} == options
    assert all(f"\n    {name}: " in timm_moe_dg.finetune.__doc__ for name in options)
    assert "%" not in timm_moe_dg.finetune.__doc__
    for function, option in ((timm_moe_dg.evaluate, "trial_seed"), (timm_moe_dg.predict, "top_k")):
        assert option in inspect.signature(function).parameters
        assert f"\n    {option}: " in function.__doc__


@pytest.mark.parametrize(
    ("options", "kind", "argument"),
    [
        ({"modle": "x"}, OptionError, "modle"),
        ({"steps": "61"}, ArgumentError, "steps"),
        ({"grad_accum_steps": 3, "dry_run": True}, ArgumentError, "grad_accum_steps"),
        ({"algorithm": "Fish", "grad_accum_steps": 2, "dry_run": True}, ArgumentError, "grad_accum_steps"),
        ({"test_domains": [-1]}, ArgumentError, "test_domains"),
        ({"test_domains": "nowhere"}, ArgumentError, "test_domains"),
        ({"resume": "missing"}, ArgumentError, "resume"),
        ({"config": "missing.yaml"}, ArgumentError, "config"),
        ({"config": "bad.yaml"}, ArgumentError, "config='bad.yaml': batch_size"),
        ({"imports": ["no_such"]}, ArgumentError, "import"),
        ({"model_kwargs": {"router": "mine"}}, RouterError, "router"),
    ],
    ids=str,
)
def test_an_option_that_cannot_work_is_named_and_nothing_is_written(options, kind, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("batch_size: 1.5")
    before = state()
    with pytest.raises(kind, match=f"^{argument}"):
        timm_moe_dg.finetune(**{**RUN, **options})
    assert state() == before
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_other_values_of_python_mean_what_they_say(run, tmp_path):
    values = {"steps": np.int64(4), "test_envs": np.array([0]), "output": tmp_path, "lr": np.float64(1e-3)}
    rest = {name: value for name, value in RUN.items() if name not in values}
    again = timm_moe_dg.finetune(**rest, **values, experiment="again", freeze=None, pretrained=False)
    assert outcome(again) == outcome(run)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda run: timm_moe_dg.predict("missing", "images"), "model='missing'"),
        (lambda run: timm_moe_dg.predict("empty", "images"), "run_or_model='empty'"),
        (lambda run: timm_moe_dg.predict(3, "images"), "run_or_model=3"),
        (lambda run: timm_moe_dg.predict(torch.nn.Linear(2, 2), "images"), "run_or_model='Linear': is in training"),
        (lambda run: timm_moe_dg.predict(run.model().double(), "images"), "run_or_model='Moe.*float64"),
        (lambda run: timm_moe_dg.predict(run.model(), "images", img_size=16), "img_size=16"),
        (lambda run: timm_moe_dg.predict("unfinished", "images"), "run_or_model='unfinished'.*resume='unfinished'"),
        (lambda run: timm_moe_dg.predict(run, []), r"images=\[\]"),
        (lambda run: timm_moe_dg.predict(run, 7), "images=7"),
        (lambda run: timm_moe_dg.predict(run, "nothing"), "images='nothing'"),
        (lambda run: timm_moe_dg.predict(run, "images", model="x"), "model='x'"),
        (lambda run: timm_moe_dg.Run("empty"), "path='empty'"),
        (lambda run: timm_moe_dg.Run(None), "path=None"),
        (lambda run: timm_moe_dg.read_runs(None), "folder=None"),
    ],
)
def test_a_model_or_images_that_are_none_are_named(run, images, tmp_path, monkeypatch, call, argument):
    monkeypatch.chdir(tmp_path)
    Path("images").symlink_to(images)
    Path("empty").mkdir()
    Path("unfinished").mkdir()
    for part in ("args.yaml", "best"):
        Path("unfinished", part).symlink_to(run.path / part)
    with pytest.raises(MoeDgError, match=f"^{argument}"):
        call(run)


def test_a_network_of_which_a_part_is_in_training_mode_is_refused(run, images):
    network = run.model()
    network.blocks[1].mlp.router.train()
    with pytest.raises(ArgumentError, match="run_or_model='MoeVisionTransformer': is in training mode"):
        timm_moe_dg.predict(network, images)


def test_an_interrupted_run_goes_on_to_the_same_bits(run, tmp_path):
    before = state()
    interrupted = during_step(2, partial(os.kill, os.getpid(), signal.SIGINT))
    with interrupted, pytest.raises(RunInterruptedError, match=r"go on with: timm_moe_dg.finetune\(resume='.*/a'\)"):
        timm_moe_dg.finetune(**RUN, output=tmp_path, experiment="a")
    assert state() == before
    unfinished = timm_moe_dg.Run(tmp_path / "a")
    assert not unfinished.is_finished
    assert unfinished.records.step.max() == 0
    assert outcome(timm_moe_dg.finetune(resume=unfinished)) == outcome(run)
    assert timm_moe_dg.finetune(resume=unfinished).path == unfinished.path  # nothing to do


@pytest.mark.parametrize("kind", [RunInterruptedError, ArgumentError, ImageReadError])
def test_a_call_that_fails_ends_its_workers_although_a_notebook_keeps_the_error(kind, run, images, tmp_path):
    for label in "01":  # two of the digits
        (tmp_path / "site" / label).mkdir(parents=True)
        (tmp_path / "site" / label / "1.png").write_bytes((images / "3.png").read_bytes()[:-99])
    interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
    action = interrupt if kind is RunInterruptedError else Mock(side_effect=ArgumentError)
    train = partial(timm_moe_dg.finetune, **{**RUN, "workers": 1}, output=tmp_path, experiment="a")
    score = partial(timm_moe_dg.evaluate, run.model(), dataset="folder", data_dir=tmp_path, workers=1)
    with during_step(2, action), pytest.raises(kind) as caught:
        (score if kind is ImageReadError else train)()
    assert caught.tb
    assert not multiprocessing.active_children()


def test_training_works_outside_the_main_thread(run, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(timm_moe_dg.finetune, **RUN, output=tmp_path, experiment="thread").result()
    assert outcome(trained) == outcome(run)


def test_two_calls_at_a_time_are_refused_in_one_process(run, tmp_path):
    errors = []

    def second():
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(timm_moe_dg.finetune, **RUN, output=tmp_path, experiment="other")
            errors.append(call.exception())

    with during_step(1, second):
        first = timm_moe_dg.finetune(**RUN, output=tmp_path, experiment="first")
    (error,) = errors
    assert isinstance(error, FolderInUseError)
    assert str(error).startswith(f"output='{tmp_path}/other': ")
    assert outcome(first) == outcome(run)


def test_a_dry_run_gives_no_run(tmp_path):
    assert timm_moe_dg.finetune(**RUN, output=tmp_path, dry_run=True) is None
    assert not list(tmp_path.iterdir())


ROUTER = """
import timm_moe_dg


@timm_moe_dg.layers.register_router("toy_of_a_file")
class Toy(timm_moe_dg.layers.LinearRouter):
    pass
"""


@pytest.mark.slow
def test_modules_of_ones_own_are_imported_by_every_command(images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("toy_router.py").write_text(ROUTER)
    words = ["--import", "toy_router", "--output", "out", "--experiment", "a"]
    words += ["--model-kwargs", *(f"{name}={value}" for name, value in {**SIZE, "router": "toy_of_a_file"}.items())]
    words += WORDS
    routers, path = timm_moe_dg.layers.routers.ROUTERS, list(sys.path)
    try:
        load_tool("finetune").main(words)
        assert "toy_router" not in Path("out/a/args.yaml").read_text()  # a run folder names no code
        commands = {
            "predict": ["--model", "out/a", "-j", "0", str(images)],
            "push_to_hub": ["out/a", "--repo-id", "someone/toy", "--dry-run"],
            "finetune": ["--resume", "out/a", "--steps", "5"],
        }
        for name, further in commands.items():
            routers.pop("toy_of_a_file", None)
            sys.modules.pop("toy_router", None)
            if name != "push_to_hub":
                with pytest.raises(SystemExit, match=r"RouterError: router='toy_of_a_file': .*--import MODULE"):
                    load_tool(name).main(further)
            load_tool(name).main(["--import=toy_router", *further])
        sys.modules.pop("toy_router")
        assert len(timm_moe_dg.predict("out/a", images, workers=0, imports=["toy_router"])) == 5
        assert "toy_router" in sys.modules
        sweep = ["--datasets", "rotated_digits", "--trial-seeds", "0", "--dry-run", "--output", "sweep"]
        capsys.readouterr()
        load_tool("sweep").main(["--import", "toy_router", *sweep])
        commands = [line for line in capsys.readouterr().out.splitlines() if "finetune.py" in line]
        assert len(commands) == 6
        assert all("--import toy_router" in line for line in commands)
    finally:
        routers.pop("toy_of_a_file", None)
        sys.modules.pop("toy_router", None)
        sys.path[:] = path


# Code of a user -> whether a type checker accepts it
USER = {
    "timm_moe_dg.auxiliary_loss": True,
    "timm_moe_dg.auxilary_loss": False,
    "timm_moe_dg.data.BENCHMARKS": True,
    "timm_moe_dg.finetune(dataset='a', test_domains=['b', 3], model_kwargs={'depth': 2}, imports=['c'])": True,
    "timm_moe_dg.finetune(datset='a')": False,
    "timm_moe_dg.finetune(steps='3')": False,
    "timm_moe_dg.finetune(output=pathlib.Path('a'), resume=pathlib.Path('a', 'b'))": True,
    "timm_moe_dg.evaluate(timm_moe_dg.Run('a'), calibrate=True, batch_size=3).columns": True,
    "timm_moe_dg.evaluate(run_or_model='a', img_size=None)": True,
    "timm_moe_dg.evaluate('a', bach_size=3)": False,
    "timm_moe_dg.evaluate()": False,
    "timm_moe_dg.predict('a', ['b.png'], top_k=3, metadata='c.csv', output='d.csv', imports=['e'])": True,
    "timm_moe_dg.predict('a')": False,
    "timm_moe_dg.predict('a', 'b.png', calibrate=True)": False,
    "timm_moe_dg.predict_part('a', {'path': ['b.png']}, columns=['experts'])": True,
    "timm_moe_dg.predict_part('a', {'path': ['b.png']}, output='c.csv')": False,
}


@pytest.mark.slow  # a type checker reads torch first
def test_a_type_checker_knows_names_and_options(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("\n".join(["import pathlib, timm_moe_dg", *USER]))
    root = Path(timm_moe_dg.__file__).parent.parent
    words = [sys.executable, "-m", "mypy", "--no-error-summary", "--config-file", root / "pyproject.toml", program]
    answer = subprocess.run(words, capture_output=True, text=True, cwd=root, timeout=300)
    refused = {int(line) for line in re.findall(r"program\.py:(\d+): error", answer.stdout)}
    lines = enumerate(USER, start=2)
    assert {code: line not in refused for line, code in lines} == USER, answer.stdout + answer.stderr
