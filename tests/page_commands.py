"""Runs `timm-moe-dg` of pages in copies of one process that has imported the package, which saves seconds a command.

`python -m tests.page_commands SOCKET` serves; `python -S tests/page_commands.py SOCKET ARGUMENT...` asks for a command.
"""

import json
import os
import socket
import sys


def ask(path: str, arguments: list[str]) -> int:
    """Has the server run a command with this process's folder, environment and streams; returns its exit status."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(client, [request], [0, 1, 2])
        return int(client.recv(8) or 1)


def become(request: bytes, streams: list[int]) -> None:
    """Gives this process the arguments, folder, environment and streams of a request."""
    arguments, folder, environment = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    # Those of the server may be files, where a pipe is needed
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(":"))
    sys.executable = environment["PAGE_PYTHON"]  # so that a sweep's runs are copies of the server too
    sys.argv = arguments if arguments[0].endswith(".py") else ["timm-moe-dg", *arguments]


def run_command() -> int:
    """Runs the command of sys.argv and what it leaves for the exit; returns the status that Python would exit with."""
    try:
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module("timm_moe_dg", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return status


def serve(path: str) -> None:
    """Answers each request in a forked child."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            connection, _ = server.accept()
            request, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
            if os.fork() == 0:
                become(request, streams)
                connection.send(str(run_command()).encode())
                os._exit(0)  # freeing a copy of torch, object by object, takes two seconds
            for stream in streams:
                os.close(stream)
            connection.close()


if __name__ == "__main__":
    if __spec__ is None:  # started by its path
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    import atexit
    import runpy
    from importlib import import_module
    from pkgutil import walk_packages

    import timm_moe_dg

    optional = ("accelerate", "matplotlib.pyplot", "pandas", "scipy.stats", "sklearn.manifold")
    package = (module.name for module in walk_packages(timm_moe_dg.__path__, "timm_moe_dg."))
    for name in (*optional, *package):
        if not name.endswith("__main__") and ".tools" not in name:
            import_module(name)
    serve(sys.argv[1])
