"""A sweep on a small Slurm cluster: preempted, queued again, cancelled, its node drained, its time over; see run.sh.

Everything is compared with a local sweep of the same runs: the tables, each record but for its times, and the weights.
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.checks import ROOT, Checks, outcome, shown_command, wait_until
from tests.slurm.cluster import Cluster

PLAN = ["--datasets", "colored_digits", "--models", "gmoe_tiny_patch16", "--trial-seeds", "0"]
SIZE = ["embed_dim=24", "depth=2", "num_heads=2", "moe_layers=(1,)", "num_experts=2"]
TRAINED = ["--model-kwargs", *SIZE, "--img-size", "16", "--batch-size", "4", "--lr", "0.001", "--save-freq", "20"]
TRAINED += ["--eval-freq", "400", "--workers", "0", "--cpu-threads", "1"]
SHORT, LONG = ["--", *TRAINED, "--steps", "1200"], ["--", *TRAINED, "--steps", "4000"]
Plan = tuple[list[str], list[str]]  # options of the sweep, and of each run
LINE = re.compile(r"^(\S+) (colored_digits\S+)$", re.MULTILINE)


class SweepRuns:
    """A sweep, local and on the cluster, into two folders."""

    def __init__(self, cluster: Cluster, folder: Path, plan: Plan) -> None:
        self._cluster = cluster
        self.local, self.slurm = folder / "local", folder / "slurm"
        self._plan, self._trained = [*PLAN, *plan[0]], plan[1]

    def run_locally(self) -> bool:
        """Runs all of it here; whether it went well."""
        words = ["tools/sweep.py", *self._plan, "--jobs", "2", "--output", str(self.local), *self._trained]
        return subprocess.run([sys.executable, *words], capture_output=True).returncode == 0

    def submit(self, **parameters: object) -> dict[str, str]:
        """Submits what is not finished; returns run -> number of its job."""
        given = [f"{name}={value}" for name, value in parameters.items()]
        words = [*self._plan, "--output", str(self.slurm), "--launcher", "slurm", "--slurm", "slurm_partition=low"]
        printed = self._cluster.ask(sys.executable, "tools/sweep.py", *words, *given, *self._trained)
        return {name: number for number, name in LINE.findall(printed)}

    def status(self) -> str:
        """The first line of what `--status` says."""
        words = [*self._plan, "--output", str(self.slurm), "--status", *self._trained]
        return next(
            line for line in self._cluster.ask(sys.executable, "tools/sweep.py", *words).splitlines() if "fini" in line
        )

    def log(self, name: str) -> str:
        """All that a run has said; nothing before it starts."""
        path = self.slurm / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def trains(self, name: str, starts: int = 1) -> bool:
        """Waits until a run was started some times and has written a checkpoint in the last of them."""
        said = "resumed " if starts > 1 else "step 0 "

        def at_it() -> bool:
            return self.log(name).count(said) >= max(1, starts - 1) and any((self.slurm / name).glob("checkpoints/*"))

        return wait_until(at_it)

    def finished(self, name: str, seconds: float = 300.0) -> bool:
        """Waits for the end of a run."""
        return wait_until((self.slurm / name / "done").exists, seconds)

    def saved(self, name: str, times: int = 1, seconds: float = 60.0) -> bool:
        """Waits until a run was asked to end and has written its checkpoint."""
        return wait_until(lambda: self.log(name).count("asked to end; checkpoint: ") >= times, seconds)

    def same(self) -> list[tuple[bool, str]]:
        """Whether records and weights of each run, and the tables, are those of the local sweep."""
        names = sorted(path.parent.name for path in self.local.glob("*/done"))
        found = [(outcome(self.local / name) == outcome(self.slurm / name), f"same bits: {name}") for name in names]
        here, there = self._table(self.local), self._table(self.slurm)
        return [*found, (bool(names) and "ERM" in here and here == there, f"same tables, {len(here)} characters")]

    def _table(self, folder: Path) -> str:
        printed = self._cluster.ask(sys.executable, "tools/collect_results.py", str(folder))
        return printed.replace(str(folder), "RUNS")


def preempted_and_drained(cluster: Cluster, runs: SweepRuns, checks: Checks) -> None:
    """Three runs on two nodes, none of which is left alone."""
    jobs = runs.submit(timeout_min=60)
    checks.say(len(jobs) == 3, f"a sweep is an array of jobs: {', '.join(jobs.values())}")
    first, second, third = jobs
    checks.say(runs.trains(first) and runs.trains(second), "two nodes train two runs")

    cluster.ask("sbatch", "-p", "high", "-n", "1", "-o", "/dev/null", "--wrap", "sleep 1")
    wait_until(lambda: any(cluster.job(jobs[name]).get("Restarts") == "1" for name in (first, second)), 90.0)
    victim = next((name for name in (first, second) if cluster.job(jobs[name]).get("Restarts") == "1"), first)
    other = second if victim == first else first
    checks.say(runs.saved(victim), "preempted: the run wrote a checkpoint and was queued again")
    cluster.ask(*shown_command("scontrol requeue", JOB=jobs[other]))
    checks.say(runs.saved(other), "requeued: the run wrote a checkpoint and was queued again")

    checks.say(runs.trains(third), "the third run trains meanwhile")
    drained = cluster.job(jobs[third])["NodeList"]
    cluster.ask(*shown_command("scontrol update nodename=NODE state=drain", NODE=drained))
    for name in (victim, other):
        cluster.start_at_once(jobs[name])
    checks.say(runs.finished(third), f"{drained} drained: its run went on to the end")
    checks.say(runs.trains(victim, starts=2), "preempted: the run goes on from its checkpoint")
    checks.say(runs.trains(other, starts=2), "requeued: the run goes on from its checkpoint")
    cluster.ask(*shown_command("scancel", JOB=jobs[other]))
    checks.say(runs.saved(other, times=2), "cancelled: the run wrote a checkpoint")
    checks.say(runs.finished(victim), "preempted: finished")
    places = {cluster.job(jobs[name])["NodeList"] for name in (victim, other)}
    state = cluster.ask("sinfo", "-h", "-n", drained, "-o", "%T")
    checks.say(drained not in places and "drained" in state, f"nothing new started on {drained}, which is drained")
    wait_until(lambda: cluster.job(jobs[other]).get("JobState") == "CANCELLED", 60.0)
    checks.say(runs.status().startswith("2 finished, 0 running, 0 failed, 1 incomplete"), f"status: {runs.status()}")
    cluster.ask(*shown_command("scontrol update nodename=NODE state=resume", NODE=drained))
    again = runs.submit(timeout_min=60)
    checks.say(list(again) == [other], "the same command submits the cancelled run alone")
    checks.say(runs.finished(other), "cancelled: finished")


def over_its_time(cluster: Cluster, runs: SweepRuns, checks: Checks) -> None:
    """One run whose limit comes while it trains; Slurm's notice comes 90 seconds before, submitit queues it again."""
    ((name, number),) = runs.submit(timeout_min=60).items()
    checks.say(runs.trains(name), "a run trains")
    minutes = 1 + int(cluster.job(number)["RunTime"].split(":")[1])
    cluster.ask("scontrol", "update", f"jobid={number}", f"timelimit={minutes}")
    checks.say(runs.saved(name, seconds=120.0), f"told before its limit of {minutes} minutes: it wrote a checkpoint")
    checks.say(cluster.start_at_once(number), "over its time: the job was queued again by itself")
    checks.say(runs.trains(name, starts=2), "over its time: the run goes on from its checkpoint")
    checks.say(runs.finished(name), "over its time: finished")


STORIES: dict[str, tuple[Callable[[Cluster, SweepRuns, Checks], None], Plan]] = {
    "interrupted": (preempted_and_drained, ([], SHORT)),
    "limit": (over_its_time, (["--domains", "0"], LONG)),  # half a minute of steps, for so long Slurm may not look
}


def main() -> None:
    """Runs all of it; the status is the number of lines that say "not ok"."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=STORIES, nargs="+", default=list(STORIES), help="(default: all)")
    chosen = parser.parse_args().only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the daemons are stopped then as well
    checks = Checks()
    with tempfile.TemporaryDirectory() as work, Cluster(Path(work, "cluster")) as cluster:
        checks.say(True, f"{cluster.ask('sinfo', '-V')}: munged, slurmctld and two slurmd on 127.0.0.1")
        for name in chosen:
            story, plan = STORIES[name]
            runs = SweepRuns(cluster, Path(work, name), plan)
            story(cluster, runs, checks)
            checks.say(runs.run_locally(), "the same sweep, locally")
            for holds, what in runs.same():
                checks.say(holds, what)
    checks.say(True, "the daemons are stopped")
    raise SystemExit(checks.failed)


if __name__ == "__main__":
    if not ROOT.samefile(Path.cwd()):
        raise SystemExit(f"scenarios: run tests/slurm/run.sh, or start in {ROOT}")
    main()
