"""A tool: its name as users type it, its parser, the modules that it imports for users, and how it ends."""

import argparse
import io
import multiprocessing
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ArgumentError, MissingDependencyError, MoeDgError, RunInterruptedError, did_you_mean
from .text import one_line

_PACKAGE = Path(__file__).parent.parent
_IN_CLONE = not (_PACKAGE / "tools").is_dir()
TOOLS = (_PACKAGE.parent if _IN_CLONE else _PACKAGE) / "tools"
RECIPES = TOOLS / "recipes"
# Modules that tools import at their start, and that come with the extra train
TRAIN = ("accelerate", "sklearn", "scipy", "pandas", "tabulate", "tqdm", "matplotlib")
started_as = ""  # such as "timm-moe-dg finetune", if the tool was started so
OPTION = "--import"
BROKEN_PIPE, CTRL_C, TERMINATED = 128 + 13, 128 + 2, 128 + 15  # what shells report for SIGPIPE, SIGINT and SIGTERM
LONGEST = 4000  # characters of a message
_FORMATTER = partial(argparse.RawDescriptionHelpFormatter, max_help_position=26)


def program(file: str) -> str:
    """Returns the name of the running tool for messages, such as timm-moe-dg finetune, or its file finetune.py."""
    return started_as or file


def command(name: str, launcher: str = "python") -> str:
    """Returns a tool's command line as users type it here, such as `python tools/report.py` or `timm-moe-dg report`."""
    if _IN_CLONE and not started_as:
        return f"{launcher} tools/{name}.py"
    return f"timm-moe-dg {name}" if launcher == "python" else f"{launcher} -m timm_moe_dg {name}"


def recipe_file(text: str) -> str:
    """Returns the path of a YAML file, or of the recipe of that name, such as gmoe_small."""
    recipe = RECIPES / f"{text}.yaml"
    return str(recipe) if recipe.is_file() and not Path(text).is_file() else text


def import_modules(names: Iterable[str]) -> None:
    """Imports modules from the working directory or from where Python finds them.

    Raises:
        ArgumentError: There is no module of this name.
    """
    for name in names:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last, so that no file there hides an installed module
        try:
            if not name or name.startswith("."):  # import_module would raise errors that a module may also raise itself
                raise ModuleNotFoundError(name=name)
            import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, and an import inside it fails
            remedy = f"no such module in {os.getcwd()!r} or on PYTHONPATH; give its name without .py, such as my_router"
            raise ArgumentError.of("import", name, remedy) from None


def named_imports(words: Sequence[str]) -> list[str]:
    """Returns the modules that a command line names, before a word `--`."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(OPTION, action="append", dest="imports", default=[])
    return list(finder.parse_known_args(words)[0].imports)


@contextmanager
def needs_train(feature: str) -> Iterator[None]:
    """Names the extra if a module of the extra `train` is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in TRAIN:
            raise
        raise MissingDependencyError.of(feature, module, "train") from error


class ToolParser(argparse.ArgumentParser):
    """A parser whose `--help` shows the main options, and whose `--help-all` shows every option.

    Attributes:
        main: Names of the main options, such as batch_size. If there are none, `--help` shows every option.
        options: Fields of dataclasses whose options `arguments.add_options` added, by name.
    """

    main: Collection[str] = ()

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"formatter_class": _FORMATTER, "usage": "%(prog)s [options]", **keywords})
        self.options: dict[str, Field[Any]] = {}
        hidden: Any = argparse.SUPPRESS
        self.add_argument("--help-all", action=_HelpAll, nargs=0, default=hidden, help=hidden)
        words = "module with routers, methods, data sets or losses of your own, to import first; may be repeated"
        self.add_argument(OPTION, action=_Import, dest="imports", default=hidden, metavar="MODULE", help=words)

    def format_help(self) -> str:
        """Returns the text of `--help`."""
        hidden = [action for action in self._actions if action.option_strings and action.dest not in self.main]
        texts = [(action, action.help) for action in hidden if self.main and action.dest != "help"]
        for action, _ in texts:
            action.help = argparse.SUPPRESS
        self.epilog = f"{len(texts) - 1} further options: {self.prog} --help-all" if texts else None
        try:
            return super().format_help()
        finally:
            for action, text in texts:
                action.help = text

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses a command line; the first unknown option ends the process, with the nearest option.

        Option names may have hyphens or underscores.
        """
        words = [_hyphenated(word) for word in (sys.argv[1:] if args is None else args)]
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            word = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
            if word is None:
                self.error(f"unexpected argument {unknown[0]!r}")
            question = did_you_mean(word, self._option_string_actions)
            self.error(f"no option {word}" + (f"; {question}" if question else ""))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2 and one line."""
        self.exit(2, f"{one_line(f'{self.prog}: error: {message}')} (see {self.prog} --help)\n")


def _hyphenated(word: str) -> str:
    name, separator, value = word.partition("=")  # underscores in the value stay
    return name.replace("_", "-") + separator + value if name.startswith("--") else word


class _Import(argparse.Action):
    """Imports a module and keeps its name."""

    def __call__(self, _: object, namespace: argparse.Namespace, value: object, __: object = None) -> None:
        import_modules([str(value)])
        namespace.imports = [*getattr(namespace, "imports", ()), str(value)]


class _HelpAll(argparse.Action):
    """Prints every option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        vars(parser)["main"] = ()
        parser.print_help()
        parser.exit()


def tool_parser(
    file: str, description: str | None, usage: str = "[options]", *, main: Collection[str] = (), config: bool = False
) -> ToolParser:
    """Makes a tool's parser, with `--config` for a tool that has this option.

    Args:
        file: Name of the tool's file, such as sweep.py.
        description: Text above the options. Its lines are kept.
        usage: Arguments in the first line of the help.
        main: See `ToolParser`.
        config: Whether there is a file of option values.
    """
    parser = ToolParser(prog=program(file), description=description, usage=f"%(prog)s {usage}")
    parser.main = main
    if config:
        words = "file of option values, which the command line overrides"
        parser.add_argument("-c", "--config", metavar="YAML", help=words)
    return parser


def tool(main: Callable[[Sequence[str]], object]) -> Callable[..., None]:
    """Decorates the `main` function of a tool, which takes the command line without the program's name.

    A `MoeDgError` ends the process with status 1 and one line that starts with the tool's name. A closed pipe
    (`| head`) and Ctrl-C end it without a traceback, with the usual statuses.
    """

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> None:
        name = program(Path(main.__code__.co_filename).name)
        # File names may hold bytes that are not UTF-8, and printing them would raise an error
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            main(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes stdout at exit, which would fail a second time
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(BROKEN_PIPE) from None
        except KeyboardInterrupt as interrupt:
            if not isinstance(interrupt, RunInterruptedError):  # whose message was shown by the run
                sys.stderr.write(f"{name}: {str(interrupt) or 'interrupted'}\n")
            status = getattr(interrupt, "exit_code", CTRL_C)
            if argv is None:
                end_at_once(status)
            raise SystemExit(status) from None
        except (MoeDgError, OSError, RuntimeError) as error:
            if (message := explain(error)) is None:
                raise
            # Messages of libraries have several lines, and quote whole files
            text = one_line(" ".join(f"{name}: {message}".split()) if "\n" in message else f"{name}: {message}")
            raise SystemExit(text if len(text) <= LONGEST else f"{text[:LONGEST]} ...") from error
        except SystemExit as end:
            if argv is None and end.code in (CTRL_C, TERMINATED):
                end_at_once(end.code)
            raise

    return run


def end_at_once(status: int) -> None:
    """Ends the process and its loaders' workers without Python's cleanup, which takes seconds after importing torch."""
    for worker in multiprocessing.active_children():
        worker.terminate()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a closed pipe
            stream.flush()
    os._exit(status)


def explain(error: Exception) -> str | None:
    """Describes an error that the user can mend, or returns None for a bug, which needs its traceback."""
    text = str(error)
    if "Too many open files" in text or "ancdata" in text:  # as torch says if it cannot receive a worker's batch
        limit = f"of {os.sysconf('SC_OPEN_MAX')} " if hasattr(os, "sysconf") else ""
        return f"workers: the limit {limit}on open files is reached; raise it with ulimit -n 4096, or give --workers 0"
    if isinstance(error, MoeDgError):
        if "Original Traceback" in text:  # which a loader's worker adds
            text = text.rstrip().splitlines()[-1].partition(f"{type(error).__name__}: ")[2]
        return f"{type(error).__name__}: {text}"
    if isinstance(error, OSError):  # of a path that no check has seen, such as one that is too long
        is_of_a_path = error.filename is not None and error.errno is not None  # a network error may name a URL
        return f"{text}; check the path, its permissions and the disk" if is_of_a_path else None
    # The error for a CPU has no class of its own
    is_memory = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text
    return f"memory is full; give a smaller --batch-size ({text})" if is_memory else None
