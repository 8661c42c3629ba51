"""Slurm's daemons on 127.0.0.1, with a configuration, a key and spool folders of their own, while a context is entered.

Two nodes are two slurmd on two ports, each with one core; a partition "high" preempts jobs of "low", which are queued
again. No control groups: processes are tracked by their parents.
"""

import os
import secrets
import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.checks import wait_until

NODES = ("node1", "node2")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=1 RealMemory=2000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 MaxTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=60 State=UP
"""


class Cluster:
    """The daemons, and what they are asked.

    Args:
        folder: An empty one, on a path that everybody may walk.
        port: The first of three that are free.
    """

    def __init__(self, folder: Path, port: int = 17001) -> None:
        self.folder, self._port = folder, port
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        folder = self.folder
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        places = {"host": socket.gethostname(), "folder": folder, "port": self._port}
        ports = {"first": self._port + 1, "last": self._port + len(NODES)}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**places, **ports))
        files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
        files |= {"log-file": folder / "munged.log", "seed-file": folder / "munge.seed"}
        self._start("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        wait_until((folder / "munge.socket").exists, 10.0)
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        if not wait_until(lambda: self.ask("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") == "2", 60.0):
            logs = "\n".join(path.read_text()[-1000:] for path in sorted(folder.glob("*.log")))
            self.__exit__(None, None, None)
            raise SystemExit(f"slurm: the daemons do not come up; their logs:\n{logs}")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.ask("scancel", "-u", "root")
        wait_until(lambda: not self.ask("squeue", "-h"), 60.0)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(30)

    def ask(self, *command: str) -> str:
        """Runs a program of Slurm's, or one that uses them, and returns what it prints."""
        return subprocess.run(command, env=self._environment, capture_output=True, text=True).stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job, such as JobState, NodeList, Restarts."""
        shown = self.ask("scontrol", "show", "job", "-o", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def start_at_once(self, number: str) -> bool:
        """Starts a job that was queued again without the two minutes that Slurm lets it wait, and gives it an hour."""
        pending = wait_until(lambda: self.job(number).get("JobState") == "PENDING", 60.0)
        self.ask("scontrol", "update", f"jobid={number}", "starttime=now", "timelimit=60")
        return pending

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}{len(self._daemons)}.log").open("w") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": self._environment}
            self._daemons.append(subprocess.Popen(command, **options))  # type: ignore[call-overload]
