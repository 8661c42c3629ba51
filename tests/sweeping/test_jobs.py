"""Jobs: their states, several at a time, stopped and gone on with."""

import json
import os
import signal
import sys
from itertools import accumulate
from multiprocessing import get_context

import pytest

from tests.sweeping.waiting_jobs import begun, make_job, wait_for
from timm_moe_dg.storage.ownership import owned
from timm_moe_dg.sweeping.jobs import Attempt, Job, run_jobs, tail
from timm_moe_dg.sweeping.slurm import Submission


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


# Ends when two jobs have begun, and writes the seconds at which it began and ended
COMPANION = """
import pathlib, sys, time
times = pathlib.Path(sys.argv[1])
begun = time.time()
times.touch()
while len(list(times.parent.glob("*.times"))) < 2:
    time.sleep(0.02)
times.write_text(f"{begun} {time.time()}")
"""


def script_job(tmp_path, script, *words, name="a"):
    return Job(name, (sys.executable, "-c", script, *map(str, words)), tmp_path / name, tmp_path / f"{name}.log")


@pytest.mark.slow
def test_as_many_at_a_time_as_there_are_slots(tmp_path):
    files = {name: tmp_path / f"{name}.times" for name in "abcde"}
    jobs = [script_job(tmp_path, COMPANION, file, name=name) for name, file in files.items()]
    ended = [(job.name, status) for job, status, _ in run_jobs(jobs, [{}, {}])]
    assert sorted(ended) == [(name, 0) for name in "abcde"]
    events = []
    for file in files.values():
        start, end = map(float, file.read_text().split())
        events += [(start, 1), (end, -1)]
    at_once = list(accumulate(change for _, change in sorted(events)))
    assert max(at_once) == 2


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


@pytest.mark.slow
def test_what_a_launcher_leaves_behind_is_asked_to_save_too(tmp_path):
    inner = make_job(tmp_path, seconds=60)
    launcher = f"import subprocess; subprocess.run({list(inner.command)!r})"
    job = Job("a", (sys.executable, "-c", launcher), inner.folder, inner.log)
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
    assert job.progress() == "101 of 301 steps, about 7 min left"
    (job.folder / "results.jsonl").write_text("\n".join(lines) + '\n{"st')
    assert job.progress() == "no evaluation yet"


def test_running_jobs_are_shown_now_and_then(tmp_path):
    jobs, seen = [make_job(tmp_path, name, seconds=1.0) for name in "ab"], []
    list(run_jobs(jobs, [{}, {}], watch=lambda going: seen.append({job.name for job in going}), watch_every=0.0))
    assert {"a", "b"} in seen


def test_a_log_that_is_no_text_is_no_trouble(tmp_path):
    job = make_job(tmp_path)
    job.log.parent.mkdir()
    for text in (b"\xff\xfe", b"sweep: exit status ?", b""):
        job.log.write_bytes(text)
        assert job.state() == "incomplete"


def test_a_notice_to_every_process_of_a_job_ends_none(tmp_path):
    notices = "import os, signal; [os.kill(os.getpid(), number) for number in (signal.SIGUSR1, signal.SIGUSR2)]"
    inner = f"{notices}; print('still there')"
    call = f"subprocess.run([sys.executable, '-c', {inner!r}])"
    job = script_job(tmp_path, f"{notices}; import subprocess, sys; sys.exit({call}.returncode)")
    assert [status for _, status, _ in run_jobs([job], [{}])] == [0]
    assert tail(job.log) == "still there"
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
