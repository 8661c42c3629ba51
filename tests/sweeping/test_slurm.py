"""Jobs handed to Slurm, whose side submitit's local executor takes."""

import os
import pickle
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from tests.sweeping.waiting_jobs import begun, make_job, wait_for
from timm_moe_dg.cli.values import key_value
from timm_moe_dg.errors import ArgumentError, MissingDependencyError
from timm_moe_dg.sweeping.jobs import Job, tail
from timm_moe_dg.sweeping.slurm import Submission, submit_jobs


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
    inner = make_job(tmp_path, seconds=60)
    launcher = f"import subprocess; subprocess.run({list(inner.command)!r})"  # ends before what it has launched
    job = Job("a", (sys.executable, "-c", launcher), inner.folder, inner.log)
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
    launcher = f"import subprocess; subprocess.run({list(job.command)!r})"  # SIGTERM ends it at once
    job = replace(job, command=(sys.executable, "-c", launcher))
    submission = Submission(job)
    with once_begun(job, lambda: submission._attempt._signal_group(signal.SIGTERM)):
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


def test_a_sweep_can_wait_for_the_job_of_another(tmp_path, monkeypatch):
    for name, line in (("srun", ""), ("sbatch", f"cp $1 {tmp_path}/submitted; echo Submitted batch job 18")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    options = dict([key_value("slurm_additional_parameters={'dependency': 'afterok:17'}")])
    ((_, handle),) = submit_jobs([make_job(tmp_path)], tmp_path, options)
    assert handle.job_id == "18"
    assert "#SBATCH --dependency=afterok:17\n" in (tmp_path / "submitted").read_text()
