"""Both ends of the quick Python, see quick_python.py: a client without imports that take time, and the server.

python -S tests/quick_python_server.py SOCKET ARGUMENT...    # has the server run a program
python tests/quick_python_server.py SOCKET --serve MODULE... # serves with these modules imported
"""

import atexit
import json
import os
import runpy
import socket
import sys
from importlib import import_module
from pkgutil import walk_packages

SERVE = "--serve"


def ask(path: str, arguments: list[str]) -> int:
    """Has the server run a program with this process's folder, environment and streams; returns its exit status."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(client, [request], [0, 1, 2])
        return int(client.recv(8) or 1)


def become(request: bytes, streams: list[int]) -> list[str]:
    """Gives this process the folder, environment and streams of a request; returns its arguments."""
    arguments, folder, environment = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    # Those of the server may be files, where a pipe is needed
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(":"))]
    sys.executable = environment["QUICK_PYTHON"]  # so that what a program starts is quick too
    return arguments


def run_program(first: str, *others: str) -> int:
    """Runs a program and what it leaves for the exit; returns the status that Python would exit with."""
    if first == "-u":  # streams write line by line as it is
        return run_program(*others)
    try:
        sys.argv = [first, *others[1:]] if first in ("-c", "-m") else [first, *others]
        if first == "-c":
            exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(first, run_name="__main__")
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
                status = run_program(*become(request, streams))
                connection.send(str(status).encode())
                os._exit(0)  # freeing a copy of torch, object by object, takes two seconds
            for stream in streams:
                os.close(stream)
            connection.close()


if __name__ == "__main__":
    if sys.argv[2:3] != [SERVE]:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    sys.path.pop(0)  # the folder of this file
    for name in sys.argv[3:]:
        package = import_module(name.removesuffix(".*"))
        inside = walk_packages(package.__path__, f"{package.__name__}.") if name.endswith(".*") else ()
        for module in inside:
            if not module.name.endswith("__main__"):
                import_module(module.name)
    serve(sys.argv[1])
