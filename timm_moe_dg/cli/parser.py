"""The tools' command-line parser: help that fits a screen, and mistakes answered in one line."""

import argparse
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from ..errors import ArgumentError, did_you_mean
from .escape import one_line
from .imports import OPTION, ImportAction
from .program import program

Actions = argparse._SubParsersAction  # argparse has no public name for it


class ToolParser(argparse.ArgumentParser):
    """A parser whose `--help` shows the main options, and whose `--help-all` shows every option.

    Attributes:
        main: Names of the main options, such as batch_size. If there are none, `--help` shows every option.
        raises: Whether mistakes raise an `ArgumentError` instead of ending the process.
    """

    main: Collection[str] = ()
    raises = False

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Formatter, "usage": "%(prog)s [options]", **keywords})
        hidden: Any = argparse.SUPPRESS
        self.add_argument("--help-all", action=_HelpAll, nargs=0, default=hidden, help=hidden)
        words = "module with routers, methods, data sets or losses of your own, to import first; may be repeated"
        self.add_argument(OPTION, action=ImportAction, dest="imports", default=hidden, metavar="MODULE", help=words)

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
        """Parses a command line; the first unknown option ends the process, with the nearest option."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return parsed

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends the process because of words that the parser does not know."""
        word = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        if word is None:
            self.error(f"unexpected argument {unknown[0]!r}")
        self.error(f"no option {word}{self.suggestion(word)}")

    def suggestion(self, option: str) -> str:
        """Returns a hint at the option, of this parser or one of its commands, that looks most like `option`."""
        commands = [action.choices.values() for action in self._actions if isinstance(action, Actions)]
        parsers = [self, *(parser for choices in commands for parser in choices)]
        if owners := [parser.prog for parser in parsers if option in parser._option_string_actions]:
            return f"; it is an option of {', '.join(owners)}"
        spellings = [spelling for parser in parsers for spelling in parser._option_string_actions]
        question = did_you_mean(option, spellings)
        return question and f"; {question}"

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2 and one line, or raises; see `raises`."""
        if self.raises:
            raise ArgumentError(message)
        self.exit(2, f"{one_line(f'{self.prog}: error: {message}')} (see {self.prog} --help)\n")


class _HelpAll(argparse.Action):
    """Prints every option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        vars(parser)["main"] = ()
        parser.print_help()
        parser.exit()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions, and writes an option as `-b, --batch-size N` or `--[no-]pretrained`."""

    def __init__(self, prog: str, *args: Any, **keywords: Any) -> None:
        super().__init__(prog, *args, **{**keywords, "max_help_position": 26})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [word.replace("--", "--[no-]", 1) for word in action.option_strings if not word.startswith("--no-")]
        if not isinstance(action, argparse.BooleanOptionalAction):
            names = list(action.option_strings)
        values = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join(names) + values

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs not in ("+", "*"):
            return super()._format_args(action, default_metavar)
        return f"{self._metavar_formatter(action, default_metavar)(1)[0]} ..."


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
