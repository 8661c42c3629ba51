"""Slurm jobs, submitted by submitit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, needs
from .jobs import Attempt, Job


class Submission:
    """A job as a function that submitit can submit and requeue."""

    # Seconds for saving a checkpoint. submitit gets a signal 90 seconds before the time limit.
    def __init__(self, job: Job, grace: float = 60.0) -> None:
        self.job, self.grace = job, grace
        self._attempt: Attempt | None = None

    def __call__(self) -> int:
        """Runs the job and returns its exit status; 0 at once if it is running or finished already."""
        if self.job.state() not in ("finished", "running"):
            self._attempt = Attempt.start(self.job)
        if not self._attempt:
            return 0
        status = self._attempt.wait()
        self._attempt.settle(self.grace)  # Slurm kills processes that outlive this one
        return status

    def checkpoint(self) -> object:
        """Called by submitit at the time limit: lets the job save a checkpoint, and returns it to be queued again."""
        from submitit.helpers import DelayedSubmission

        if self._attempt:
            self._attempt.leave(self.grace)
        return DelayedSubmission(Submission(self.job, self.grace))


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
