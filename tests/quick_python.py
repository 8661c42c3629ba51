"""A Python that starts at once: each program runs in a copy of one process that has imported what takes seconds."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
SERVER = Path(__file__).parent / "quick_python_server.py"


@contextmanager
def quick_python(*modules: str, **environment: str) -> Iterator[str]:
    """Yields the path of an executable that takes `-c PROGRAM`, `-m MODULE` or a script, with arguments.

    Its programs cannot be sent signals, because they are no children of the process that starts them.

    Args:
        modules: What is imported before; "PACKAGE.*" with all that is inside.
        environment: Variables of the server, which modules may read when they are imported.
    """
    with TemporaryDirectory() as folder:
        path, executable = Path(folder, "socket"), Path(folder, "python")
        command = [sys.executable, str(SERVER), str(path)]
        executable.write_text(f'#!/bin/sh\nQUICK_PYTHON=$0 exec {sys.executable} -S {SERVER} {path} "$@"\n')
        executable.chmod(0o755)
        variables = {**os.environ, "PYTHONPATH": "", **environment}
        with subprocess.Popen([*command, "--serve", *modules], env=variables) as server:
            try:
                while not path.exists() and server.poll() is None:
                    time.sleep(0.05)
                yield str(executable)
            finally:
                server.terminate()


def run_ranks(python: str, function: Callable[..., None], *args: object) -> None:
    """Calls `function(rank, *args)` of a module in two processes that a quick Python starts, and waits for both."""
    name = f"{function.__module__} import {function.__name__}"
    processes = [
        subprocess.Popen(
            [python, "-c", f"from {name}; {function.__name__}({rank}, *{args!r})"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
