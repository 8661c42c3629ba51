"""Jobs: their states, several at a time, stopped and gone on with, and handed to Slurm, whose side submitit takes."""

import json
import os
import pickle
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

import pytest

from timm_moe_dg.comparisons.jobs import Attempt, Job, Submission, run_jobs, submit_jobs, tail
from timm_moe_dg.errors import ArgumentError, MissingDependencyError
from timm_moe_dg.storage.files import owned

# Owns its folder, as a run does. On SIGTERM it saves and exits.
SCRIPT = """
import filelock, pathlib, signal, sys, time
folder, seconds, status = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
lock.acquire()
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(143)))
folder.mkdir(parents=True, exist_ok=True)
print("begun", flush=True)
time.sleep(seconds)
if status:
    sys.exit(f"broken" if status == 1 else status)
(folder / "done").write_text("done")
"""


def make_job(tmp_path, name="a", seconds=0.0, status=0):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = (sys.executable, str(script), str(tmp_path / name), str(seconds), str(status))
    return Job(name, command, tmp_path / name, tmp_path / "logs" / f"{name}.log")


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begun(job):
    return job.log.exists() and "\nbegun\n" in job.log.read_text()


def test_a_failed_job_says_so_and_can_be_run_again_until_it_is_finished(tmp_path):
    job = make_job(tmp_path, status=1)
    assert Submission(job)() == 1
    assert job.state() == "failed"
    assert tail(job.log) == "begun\nbroken"
    for _ in range(2):
        assert Submission(make_job(tmp_path))() == 0
        assert job.state() == "finished"
    assert job.log.read_text().count("begun") == 2


def test_a_folder_without_a_log_is_incomplete_and_what_another_has_finished_is_not_started_again(tmp_path):
    job = make_job(tmp_path)
    job.folder.mkdir()
    assert job.state() == "incomplete"
    (job.folder / "done").write_text("done")
    assert list(run_jobs([job], [{}])) == [(job, None, 0.0)]
    assert not job.log.exists()


@pytest.mark.parametrize("locked", ["log", "folder"])
def test_a_job_that_another_sweep_or_a_user_starts_is_left_alone(tmp_path, locked):
    job = make_job(tmp_path)
    with owned(getattr(job, locked)):
        assert job.state() == "running"
        assert Attempt.start(job) is None
    assert job.state() == "missing"
    assert Submission(job)() == 0
    assert [path.name for path in job.log.parent.iterdir()] == ["a.log"]


def test_a_running_job_is_not_started_twice_even_if_its_parent_was_killed(tmp_path):
    job = make_job(tmp_path, seconds=60)
    number = tmp_path / "number"

    def sweep():
        attempt = Attempt.start(job)
        number.write_text(str(attempt.process.pid))
        attempt.wait()

    parent = get_context("fork").Process(target=sweep)
    parent.start()
    wait_for(lambda: begun(job) and number.exists() and number.read_text())
    parent.kill()
    parent.join()
    assert job.state() == "running"
    assert Attempt.start(job) is None
    assert list(run_jobs([job], [{}])) == [(job, None, 0.0)]
    os.kill(int(number.read_text()), signal.SIGTERM)
    wait_for(lambda: job.state() == "incomplete")


def script_job(tmp_path, script, *words, name="a"):
    return Job(name, (sys.executable, "-c", script, *map(str, words)), tmp_path / name, tmp_path / f"{name}.log")


def test_one_failure_does_not_stop_the_rest_and_each_slot_has_its_environment(tmp_path):
    jobs = [make_job(tmp_path, "a"), make_job(tmp_path, "b", status=3), make_job(tmp_path, "c")]
    assert [(job.name, status) for job, status, _ in run_jobs(jobs, [{}])] == [("a", 0), ("b", 3), ("c", 0)]
    script = "import os; print('device', os.environ['CUDA_VISIBLE_DEVICES'])"
    jobs = [script_job(tmp_path, script, name=name) for name in "de"]
    list(run_jobs(jobs, [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]))
    assert [tail(job.log) for job in jobs] == ["device 3", "device 5"]


def test_stopping_asks_jobs_to_save_and_leaves_them_incomplete(tmp_path):
    jobs = [make_job(tmp_path, "quick"), *(make_job(tmp_path, name, seconds=60) for name in "abc")]
    running = run_jobs(jobs, [{}, {}, {}])
    next(running)
    for job in jobs[1:3]:
        wait_for(lambda job=job: begun(job))
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt)
    assert [job.state() for job in jobs] == ["finished", "incomplete", "incomplete", jobs[3].state()]
    assert tail(jobs[1].log) == "begun\nsaved"
    assert jobs[3].state() in ("missing", "incomplete")


def test_a_job_that_does_not_end_is_killed(tmp_path):
    script = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); print('begun', flush=True)\n"
    script += "while True: time.sleep(1)"
    job = script_job(tmp_path, script)
    running = run_jobs([job, make_job(tmp_path, "quick")], [{}, {}], grace=0.2)
    next(running)
    wait_for(lambda: begun(job))
    running.close()
    assert f"exit status {-signal.SIGKILL}" in job.log.read_text()


def launched(job):
    """The job by a launcher, which SIGTERM ends before the process that it has started."""
    launcher = f"import subprocess; subprocess.run({list(job.command)!r})"
    return replace(job, command=(sys.executable, "-c", launcher))


@pytest.mark.slow
def test_what_a_launcher_leaves_behind_is_asked_to_save_too(tmp_path):
    job = launched(make_job(tmp_path, seconds=60))
    running = run_jobs([job, make_job(tmp_path, "quick")], [{}, {}], grace=20.0)
    next(running)
    wait_for(lambda: begun(job))
    running.close()
    assert job.state() == "incomplete"
    assert "saved" in job.log.read_text()


def test_how_far_a_job_is_follows_from_its_last_evaluation(tmp_path):
    job = make_job(tmp_path)
    assert job.progress() == "no evaluation yet"
    job.folder.mkdir()
    lines = [json.dumps({"step": step, "step_time": 2.0, "args": {"steps": 301}}) for step in (0, 100)]
    (job.folder / "results.jsonl").write_text("\n".join(lines))
    assert job.progress() == "101 of 301 steps"
    (job.folder / "results.jsonl").write_text("\n".join(lines) + '\n{"st')
    assert job.progress() == "no evaluation yet"


def test_a_notice_to_every_process_of_a_job_ends_none(tmp_path):
    notices = "import os, signal; [os.kill(os.getpid(), number) for number in (signal.SIGUSR1, signal.SIGUSR2)]"
    inner = f"{notices}; print('still there')"
    call = f"subprocess.run([sys.executable, '-c', {inner!r}])"
    job = script_job(tmp_path, f"{notices}; import subprocess, sys; sys.exit({call}.returncode)")
    assert [status for _, status, _ in run_jobs([job], [{}])] == [0]
    assert tail(job.log) == "still there"
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


@contextmanager
def once_begun(job, action):
    """Calls a function from another thread when the job has begun."""
    thread = Thread(target=lambda: (wait_for(lambda: begun(job)), action()))
    thread.start()
    yield
    thread.join()


@pytest.mark.slow
def test_submitit_runs_a_job_with_its_log(tmp_path):
    jobs = [make_job(tmp_path, status=1)]
    ((job, handle),) = submit_jobs(jobs, tmp_path / "slurm", {"timeout_min": 5}, cluster="local")
    assert handle.result() == 1
    assert job.state() == "failed"
    assert tail(job.log) == "begun\nbroken"


@pytest.mark.slow
def test_when_time_is_up_a_job_saves_and_is_queued_again(tmp_path):
    job = launched(make_job(tmp_path, seconds=60))
    submission, queued = Submission(job), []

    def time_is_up(*_):  # as submitit's handler, in the middle of the wait
        queued.append(submission.checkpoint().function)
        sys.exit(-1)

    before = signal.signal(signal.SIGUSR2, time_is_up)
    with once_begun(job, lambda: os.kill(os.getpid(), signal.SIGUSR2)), pytest.raises(SystemExit):
        submission()
    signal.signal(signal.SIGUSR2, before)
    assert job.state() == "incomplete"
    assert "saved" in job.log.read_text()
    assert pickle.loads(pickle.dumps(queued[0])).job == job


@pytest.mark.slow
def test_what_a_launcher_leaves_behind_may_save_before_the_job_ends(tmp_path):
    job = make_job(tmp_path, seconds=60)
    script = Path(job.command[1])
    script.write_text(script.read_text().replace('(print("saved")', '(time.sleep(1), print("saved", flush=True)'))
    job = launched(job)
    submission = Submission(job)
    with once_begun(job, lambda: submission._attempt.signal_group(signal.SIGTERM)):
        assert submission() == -signal.SIGTERM
    assert "\nsaved\n" in job.log.read_text()
    assert job.state() == "incomplete"


def test_slurm_or_submitit_that_is_not_there_and_parameters_that_are_none_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArgumentError, match=r"launcher='slurm': cannot be used here"):
        submit_jobs([make_job(tmp_path)], tmp_path, {})
    with pytest.raises(ArgumentError, match=r"slurm=\{'tiemout_min': 5\}: submitit does not take them"):
        submit_jobs([make_job(tmp_path)], tmp_path, {"tiemout_min": 5}, cluster="local")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingDependencyError, match=r"--launcher slurm needs submitit.*\[slurm\]"):
        submit_jobs([make_job(tmp_path)], tmp_path, {})
