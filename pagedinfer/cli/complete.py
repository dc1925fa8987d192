"""Continues a text: by a model in this process if MODEL is given, else by that of a server.

The text is that of --prompt, or else the whole input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pagedinfer.cli.chat import print_pieces
from pagedinfer.cli.text_sources import add_source_arguments, text_source

if TYPE_CHECKING:
    from pagedinfer.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """Adds the command's flags."""
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the text to continue (default: the input)")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints what follows the text."""
    model = arguments.model
    if arguments.prompt is None and model and " " in model and not Path(model).exists():
        raise ValueError(f"there is no model {model!r}; a text to continue goes after -p")
    source = text_source(arguments)
    try:
        prompt = sys.stdin.read() if arguments.prompt is None else arguments.prompt
        print_pieces(source.complete(prompt))
    finally:
        source.close()
    return 0
