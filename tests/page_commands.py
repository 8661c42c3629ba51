"""Runs `timm-moe-dg` of pages in copies of one process that has imported the package, which saves seconds a command.

`python -m tests.page_commands SOCKET` serves; `python -S tests/page_commands.py SOCKET ARGUMENT...` asks for a command.
"""

import json
import os
import runpy
import socket
import sys


def ask(path: str, arguments: list[str]) -> int:
    """Has the server run a command with this process's folder, environment and streams; returns its exit status."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(client, [request], [0, 1, 2])
        return int(client.recv(8) or 1)


def serve(path: str) -> None:
    """Answers requests one after the other, each in a forked child, which returns from here to run its command."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            connection, _ = server.accept()
            request, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
            child = os.fork()
            if child == 0:
                arguments, folder, environment = json.loads(request)
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                # Those of the server may be files, where a pipe is needed
                sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(environment)
                sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(":"))
                sys.argv = ["timm-moe-dg", *arguments]
                return
            for stream in streams:
                os.close(stream)
            connection.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
            connection.close()


if __name__ == "__main__":
    if __spec__ is None:  # started by its path
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    import accelerate  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import scipy.stats  # noqa: F401
    import sklearn.manifold  # noqa: F401
    import timm  # noqa: F401

    import timm_moe_dg  # noqa: F401

    serve(sys.argv[1])
    runpy.run_module("timm_moe_dg", run_name="__main__", alter_sys=True)
