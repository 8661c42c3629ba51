"""Jobs handed to Slurm, through submitit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..errors import ArgumentError, MissingDependencyError
from .jobs import Attempt, Job


class Handle(Protocol):
    """What submitit returns for a job, as far as it is used."""

    @property
    def job_id(self) -> str:
        """Its number with Slurm."""


class Submission:
    """A job as submitit takes it.

    Args:
        job: The job.
        grace: Seconds that it has to save when time is up; submitit is told 90 seconds before Slurm ends everything.
    """

    def __init__(self, job: Job, grace: float = 60.0) -> None:
        self.job, self.grace = job, grace
        self._attempt: Attempt | None = None

    def __call__(self) -> int:
        """Runs to the end and returns the exit status; 0 at once if the job is running or finished already."""
        if self.job.state() not in ("finished", "running"):
            self._attempt = Attempt.start(self.job)
        if not self._attempt:
            return 0
        status = self._attempt.wait()
        self._attempt.settle(self.grace)  # Slurm ends what outlives this process
        return status

    def checkpoint(self) -> object:
        """What submitit calls when Slurm's time is up: lets the job save, and returns it again, to go on from there."""
        from submitit.helpers import DelayedSubmission

        if self._attempt:
            self._attempt.leave(self.grace)
        return DelayedSubmission(Submission(self.job, self.grace))


def submit_jobs(
    jobs: Sequence[Job], folder: Path, options: Mapping[str, object], cluster: str = "slurm"
) -> list[tuple[Job, Handle]]:
    """Hands jobs to Slurm as one array; they are queued, run and requeued at their time limit by it.

    Args:
        jobs: What to submit; every machine must see the same folders and have this package.
        folder: For submitit's files.
        options: Parameters of submitit's AutoExecutor, such as slurm_partition, timeout_min, gpus_per_node.
        cluster: "slurm", or "local" for processes on this machine.

    Returns:
        Each job with submitit's handle of it.

    Raises:
        MissingDependencyError: submitit is not installed.
        ArgumentError: There is no Slurm here, or submitit does not know a parameter.
    """
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("--launcher slurm", "submitit", "slurm") from error
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
