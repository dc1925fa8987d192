"""Talks with a model: one in this process if MODEL is given, else that of a server.

Each line is a message; the conversation goes on until the end of the input. Ctrl-C stops an answer, and
ends the program between answers. /new begins a new conversation, /quit ends the program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pagedinfer.cli.text_sources import Message, add_source_arguments, text_source

if TYPE_CHECKING:
    from pagedinfer.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("-m", "--message", metavar="TEXT", help="answer this one message, and end")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers messages until they end."""
    source = text_source(arguments)
    beginning: list[Message] = []
    if arguments.system:
        beginning.append({"role": "system", "content": arguments.system})
    messages = list(beginning)
    try:
        for text in [arguments.message] if arguments.message else _lines():
            if text == "/quit":
                break
            if text == "/new":
                messages = list(beginning)
                continue
            messages.append({"role": "user", "content": text})
            answer = print_pieces(source.chat(messages))
            messages.append({"role": "assistant", "content": answer})
    finally:
        source.close()
    return 0


def print_pieces(pieces: Iterator[str]) -> str:
    """Prints a text as it comes, and returns it; Ctrl-C stops it."""
    printed = ""
    try:
        for piece in pieces:
            printed += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    finally:
        if hasattr(pieces, "close"):
            pieces.close()
    print(flush=True)
    return printed


def _lines() -> Iterator[str]:
    """What is typed, or what the input has, line by line."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
