"""Runs as processes: several at a time on this machine, each with a log, one failure apart.

A run is finished when its folder has the file `done`. While one is going its log is locked, also against a sweep that
was started a second time, and also when the sweep that started it has been killed: all processes of the job hold that
lock. A run that was started by hand is known by the lock of its folder.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..cli.ending import duration
from ..storage.outcome import DONE
from ..storage.ownership import is_locked, is_owned, try_lock

STATES = ("finished", "running", "failed", "incomplete", "missing")
INTERRUPTED = (0, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT)
_ENDED = "sweep: exit status "
_STATUS = re.compile(rf"{_ENDED}(-?\d+)")
_POLL = 0.2  # seconds
# Slurm's notice before a time limit goes to every process of a job, and ends those that do not expect it
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        name: What it is called.
        command: Program and arguments; must go on with what an interrupted run has left.
        folder: Where the run puts `done` when it is finished.
        log: File for everything that it prints, over all attempts.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    log: Path

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to do."""
        return (self.folder / DONE).exists()

    def state(self) -> str:
        """Returns the state, one of `STATES`; incomplete runs were interrupted and can go on, failed ones as well.

        Asking takes no lock that starting needs.
        """
        if self.is_finished:
            return "finished"
        if is_locked(self.log) or is_owned(self.folder):
            return "running"
        try:
            last = self.log.read_text(errors="replace").rstrip().rpartition("\n")[2]
        except FileNotFoundError:
            return "incomplete" if self.folder.exists() else "missing"
        if self.is_finished:  # meanwhile
            return "finished"
        status = _STATUS.fullmatch(last)
        return "failed" if status and int(status[1]) not in INTERRUPTED else "incomplete"

    def progress(self) -> str:
        """Says how many steps were evaluated of how many, and about how long the others take, as far as is known."""
        try:
            record = json.loads((self.folder / "results.jsonl").read_text().splitlines()[-1])
            done, steps, seconds = record["step"] + 1, record["args"]["steps"], record["step_time"]
        except (OSError, ValueError, LookupError):  # nothing is evaluated yet, or a line is being written
            return "no evaluation yet"
        return f"{done} of {steps} steps, {duration((steps - done) * seconds)} left"


class Attempt:
    """A job's process; use `Attempt.start`."""

    def __init__(self, job: Job, log: IO[str], process: subprocess.Popen[bytes]) -> None:
        self.job, self.log, self.process = job, log, process
        self.started = time.monotonic()

    @classmethod
    def start(cls, job: Job, environment: Mapping[str, str] | None = None) -> "Attempt | None":
        """Starts a job in a process group of its own; None if another process runs it, or has finished it meanwhile."""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        log = job.log.open("a")
        if not try_lock(log.fileno()) or is_owned(job.folder) or job.is_finished:
            log.close()
            return None
        log.write(f"sweep: {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(job.command)}\n")
        log.flush()
        variables = {**os.environ, **(environment or {})}
        process = subprocess.Popen(
            job.command,
            env=variables,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_ignore_notices,
        )
        return cls(job, log, process)

    def poll(self) -> int | None:
        """Returns the exit status, or None while the process goes on."""
        status = self.process.poll()
        if status is not None and not self.log.closed:
            self.log.write(f"\n{_ENDED}{status}\n")
            self.log.close()
        return status

    def wait(self) -> int:
        """Waits for the exit status."""
        self.process.wait()
        return self.poll() or 0

    def stop(self, seconds: float) -> None:
        """Waits for a process that was asked to end, and kills what is left of it after some seconds.

        A launcher may end before the processes that it started; those hold the log's lock, and are asked as well.
        """
        deadline = time.monotonic() + seconds
        try:
            self.process.wait(seconds)
            self.poll()
            self._signal_group(signal.SIGTERM)
            self.settle(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            pass
        self._signal_group(signal.SIGKILL)
        self.wait()

    def leave(self, seconds: float) -> None:
        """Asks all processes to end, and waits some seconds for it; for signal handlers, which may interrupt `wait`."""
        self._signal_group(signal.SIGTERM)
        self.log.close()  # the processes keep its lock
        self.settle(seconds)

    def settle(self, seconds: float) -> None:
        """Waits some seconds for what a launcher that has ended left behind; it may be saving."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.job.state() == "running":
            time.sleep(_POLL)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(self.process.pid, number)


def _ignore_notices() -> None:
    """Makes a new process, and all that it starts, deaf to what only its parent is to act on."""
    for number in _NOTICES:
        signal.signal(number, signal.SIG_IGN)


def run_jobs(
    jobs: Sequence[Job],
    slots: Sequence[Mapping[str, str]],
    grace: float = 60.0,
    watch: Callable[[Sequence[Job]], object] | None = None,
    watch_every: float = 60.0,
) -> Iterator[tuple[Job, int | None, float]]:
    """Runs jobs, one in each slot at a time, and yields each as it ends.

    When the caller stops early, by an exception or by closing the iterator, processes that are going get SIGTERM, and
    some seconds to save what they have.

    Args:
        jobs: In the order in which they are started.
        slots: Environment variables of each slot; their number is the number of jobs at a time.
        grace: Seconds between SIGTERM and SIGKILL.
        watch: Called now and then with the jobs that are going.
        watch_every: Seconds between its calls.

    Yields:
        The job, its exit status (None: another process runs or has finished it) and the seconds that it took.
    """
    waiting, going = list(reversed(jobs)), dict[int, Attempt]()
    watched = time.monotonic()
    try:
        while waiting or going:
            for slot in [number for number in range(len(slots)) if number not in going and waiting]:
                if waiting:
                    job = waiting.pop()
                    attempt = Attempt.start(job, slots[slot])
                    if attempt is None:
                        yield job, None, 0.0
                    else:
                        going[slot] = attempt
            for slot, attempt in list(going.items()):
                status = attempt.poll()
                if status is not None:
                    del going[slot]
                    yield attempt.job, status, time.monotonic() - attempt.started
            if watch and going and time.monotonic() - watched >= watch_every:
                watched = time.monotonic()
                watch([attempt.job for attempt in going.values()])
            time.sleep(_POLL)
    finally:
        for attempt in going.values():
            attempt.process.terminate()
        deadline = time.monotonic() + grace
        for attempt in going.values():
            attempt.stop(max(0.0, deadline - time.monotonic()))


def tail(log: Path, lines: int = 5) -> str:
    """Returns the last lines of a log that are not the sweep's own."""
    text = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return "\n".join([line for line in text if line.strip() and not line.startswith("sweep: ")][-lines:])
