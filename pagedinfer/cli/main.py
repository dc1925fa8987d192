"""The entry point: finds the command, imports its module, and turns what happens into an exit code.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from pagedinfer import __version__
from pagedinfer.cli.commands import COMMANDS
from pagedinfer.cli.parser import Parser

_EXIT_FAILURE, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, without the program's name, and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser_of(name: str) -> Parser:
    """The parser of a command."""
    module = _module(name)
    parser = Parser(prog=f"pagedinfer {name}", description=module.__doc__)
    module.add_arguments(parser)
    return parser


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else _EXIT_USAGE
    name, *rest = words
    if name in ("-V", "--version"):
        print(f"pagedinfer {__version__}")
        return 0
    if name == "--print-completion":
        return _print_completion(rest)
    name = name.replace("_", "-")
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        kind = "flag" if name.startswith("-") else "command"
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        print(f"pagedinfer: error: unknown {kind} {words[0]}{hint}\n{_usage()}", file=sys.stderr)
        return _EXIT_USAGE
    try:
        arguments = parser_of(name).parse_args(rest)
    except SystemExit as stop:  # after --help, or an error that has been printed
        return int(stop.code or 0)
    return _call(_module(name), arguments)


def _call(module: ModuleType, arguments: object) -> int:
    from pagedinfer.errors import PagedinferError

    try:
        code: int = module.run(arguments)
        return code
    except (PagedinferError, ValueError) as error:
        if os.environ.get("PAGEDINFER_LOGGING_LEVEL", "").upper() == "DEBUG":
            raise
        print(f"pagedinfer: error: {error}", file=sys.stderr)
        return _EXIT_FAILURE


def _module(name: str) -> ModuleType:
    return import_module(f"pagedinfer.cli.{COMMANDS[name].module}")


def _usage() -> str:
    return f"usage: pagedinfer {{{','.join(COMMANDS)}}} ..."


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            _usage(),
            "",
            "An LLM inference engine. `pagedinfer COMMAND --help` explains a command.",
            "",
            *lines,
            "",
            f"  {'--version':<{width}}print the version",
            f"  {'--print-completion SHELL':<{width}} print the completion script of bash, zsh or tcsh",
        ]
    )


def _print_completion(words: list[str]) -> int:
    """Prints a completion script; the shells' forms are shtab's."""
    import argparse

    try:
        import shtab
    except ImportError:
        print("pagedinfer: error: completion needs shtab: pip install shtab", file=sys.stderr)
        return _EXIT_FAILURE
    if len(words) != 1 or words[0] not in shtab.SUPPORTED_SHELLS:
        shells = ", ".join(shtab.SUPPORTED_SHELLS)
        print(f"pagedinfer: error: --print-completion takes one of {shells}", file=sys.stderr)
        return _EXIT_USAGE
    whole = argparse.ArgumentParser(prog="pagedinfer")
    commands = whole.add_subparsers(dest="command", parser_class=Parser)
    for name, command in COMMANDS.items():
        _module(name).add_arguments(commands.add_parser(name, help=command.summary))
    print(shtab.complete(whole, shell=words[0]))
    return 0
