"""Runs as processes: several at a time on this machine, or as Slurm jobs submitted by submitit.

Each run has a log and is unaffected by failures of others. It is finished when its folder has the file `done`. A sweep
holds the lock of the log of each run that it starts, so that a second sweep leaves the run alone. The run itself holds
the lock of its folder, also when its sweep was killed or it was started by hand.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..cli.text import one_line
from ..errors import ArgumentError, FolderInUseError, needs
from ..storage.files import is_owned, owned
from ..storage.run_folder import DONE

STATES = ("finished", "running", "failed", "incomplete", "missing")
INTERRUPTED = (0, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT)
GRACE = 60.0  # seconds for saving a checkpoint. submitit gets a signal 90 seconds before the time limit.
_EXIT_STATUS = "sweep: exit status "
_POLL = 0.2  # seconds
# Slurm's notice before a time limit goes to every process of a job, and ends those that do not expect it.
# Windows has no such signals.
NOTICES = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


@dataclass(frozen=True)
class Job:
    """One run."""

    name: str
    command: tuple[str, ...]  # repeated, it has to continue an interrupted run
    folder: Path  # gets the file `done` when the run is finished
    log: Path  # everything that the run prints, over all attempts

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to do."""
        return (self.folder / DONE).exists()

    def state(self) -> str:
        """Returns the state, one of `STATES`. Incomplete runs were interrupted; they and failed ones can go on."""
        locked = [is_owned(self.log), is_owned(self.folder)]  # both, which removes the locks of killed processes
        if self.is_finished:
            return "finished"
        if any(locked):
            return "running"
        if not self.log.is_file():
            return "incomplete" if self.folder.exists() else "missing"
        last_line = self.log.read_text(errors="replace").rstrip().rpartition("\n")[2]
        if self.is_finished:  # since the first look
            return "finished"
        status = re.fullmatch(rf"{_EXIT_STATUS}(-?\d+)", last_line)
        return "failed" if status and int(status[1]) not in INTERRUPTED else "incomplete"

    def progress(self) -> str:
        """Describes how many steps were evaluated, as far as is known."""
        try:
            record = json.loads((self.folder / "results.jsonl").read_text().splitlines()[-1])
            return f"{record['step'] + 1} of {record['args']['steps']} steps"
        # Nothing is evaluated yet, or a line is being written, or the file is damaged
        except (OSError, ValueError, LookupError, TypeError):
            return "no evaluation yet"


class Attempt:
    """The process of a job, in a process group of its own. Use `Attempt.start`."""

    def __init__(self, job: Job, log: IO[str], lock: ExitStack, process: subprocess.Popen[bytes]) -> None:
        self.job, self.process = job, process
        self.started = time.monotonic()
        self._log, self._lock = log, lock

    @classmethod
    def start(cls, job: Job, environment: Mapping[str, str] | None = None) -> "Attempt | None":
        """Starts a job; None if another process runs it, or has finished it."""
        with ExitStack() as lock:
            try:
                lock.enter_context(owned(job.log))
            except FolderInUseError:
                return None
            if is_owned(job.folder) or job.is_finished:
                return None
            log = lock.enter_context(job.log.open("a"))
            log.write(f"sweep: {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(job.command)}\n")
            log.flush()
            process = subprocess.Popen(
                job.command,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in NOTICES],
            )
            return cls(job, log, lock.pop_all(), process)

    def poll(self) -> int | None:
        """Returns the exit status, or None while the process runs."""
        status = self.process.poll()
        if status is not None and not self._log.closed:
            self._log.write(f"\n{_EXIT_STATUS}{status}\n")
            self._lock.close()
        return status

    def wait(self) -> int:
        """Waits for the exit status."""
        self.process.wait()
        return self.poll() or 0

    def signal_group(self, number: int) -> None:
        """Sends a signal to the process and its children. With SIGTERM a run saves a checkpoint and ends."""
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self.process.pid, number)

    def stop(self, seconds: float) -> None:
        """Waits some seconds for a process group that was asked to end, then kills it."""
        deadline = time.monotonic() + seconds
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            self.poll()
            self.settle(deadline - time.monotonic())
        self.signal_group(signal.SIGKILL)
        self.wait()

    def leave(self, seconds: float) -> None:
        """Asks the process group to end and waits some seconds. Signal handlers that interrupt `wait` may call it."""
        self.signal_group(signal.SIGTERM)
        self._lock.close()
        self.settle(seconds)

    def settle(self, seconds: float) -> None:
        """Waits some seconds for processes of a launcher that has ended, which may be saving a checkpoint."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.job.state() == "running":
            time.sleep(_POLL)


def run_jobs(
    jobs: Sequence[Job],
    slots: Sequence[Mapping[str, str]],
    grace: float = GRACE,
) -> Iterator[tuple[Job, int | None, float]]:
    """Runs jobs in their order, one at a time in each slot, and yields each as it ends.

    A slot is a table of environment variables. When the caller stops early, running processes get SIGTERM, and SIGKILL
    after `grace` seconds, in which they save a checkpoint. A job is yielded with its exit status (None: another process
    runs it or has finished it) and seconds.
    """
    waiting, running = list(reversed(jobs)), dict[int, Attempt]()
    try:
        while waiting or running:
            for slot, environment in enumerate(slots):
                if slot not in running and waiting:
                    job = waiting.pop()
                    if attempt := Attempt.start(job, environment):
                        running[slot] = attempt
                    else:
                        yield job, None, 0.0
            for slot, attempt in list(running.items()):
                if (status := attempt.poll()) is not None:
                    del running[slot]
                    yield attempt.job, status, time.monotonic() - attempt.started
            time.sleep(_POLL)
    finally:
        for attempt in running.values():
            attempt.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + grace
        for attempt in running.values():
            attempt.stop(max(0.0, deadline - time.monotonic()))


class Submission:
    """A job as a function that submitit can submit and requeue."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._attempt: Attempt | None = None

    def __call__(self) -> int:
        """Runs the job and returns its exit status; 0 at once if it is running or finished already."""
        self._attempt = Attempt.start(self.job)
        if not self._attempt:
            return 0
        status = self._attempt.wait()
        self._attempt.settle(GRACE)  # Slurm kills processes that outlive this one
        return status

    def checkpoint(self) -> object:
        """Called by submitit at the time limit: lets the job save a checkpoint, and returns it to be queued again."""
        from submitit.helpers import DelayedSubmission

        if self._attempt:
            self._attempt.leave(GRACE)
        return DelayedSubmission(Submission(self.job))


def submit_jobs(
    jobs: Sequence[Job], folder: Path, options: Mapping[str, object], cluster: str = "slurm"
) -> list[tuple[Job, Any]]:
    """Submits jobs to Slurm as one array, and returns each with submitit's handle.

    Every machine needs the same folders and this package. `cluster="local"` means processes on this machine.
    """
    with needs("--launcher slurm", "submitit", "slurm"):
        import submitit
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**options)
    except RuntimeError as error:
        raise ArgumentError.of("launcher", cluster, f"cannot be used here ({error})") from error
    except (NameError, TypeError, AssertionError) as error:
        raise ArgumentError.of("slurm", dict(options), f"submitit does not take them ({error})") from error
    with executor.batch():
        handles = [executor.submit(Submission(job)) for job in jobs]
    return list(zip(jobs, handles, strict=True))


def tail(log: Path, lines: int = 5) -> str:
    """Returns the last lines of a log, without the sweep's own."""
    text = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return "\n".join([one_line(line) for line in text if line.strip() and not line.startswith("sweep: ")][-lines:])
