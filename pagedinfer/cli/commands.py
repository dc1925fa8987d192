"""The commands of the command line. A command's module is imported when it is called, and not before.

Each module has two functions:

    def add_arguments(parser: Parser) -> None    # its flags; imports nothing heavy
    def run(arguments: argparse.Namespace) -> int    # does it, and returns the exit code

What a user reads as help is the module's docstring.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """Where a command is, and what it does in one line."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("serve", "serve a model over HTTP, with OpenAI's interface"),
    "chat": Command("chat", "talk with a model: a server's, or one in this process"),
    "complete": Command("complete", "continue a text, likewise"),
    "bench": Command("bench", "measure a server under load"),
    "plan": Command("plan", "what a model needs of a GPU, what fits, and how fast it can be"),
    "doctor": Command("doctor", "which parameters to change, from what a server or a probe measures"),
    "explain": Command("explain", "say why a request of a trace waited, was preempted, slow or refused"),
    "replay": Command("replay", "run a trace's requests again with other parameters, and compare"),
    "collect-env": Command("collect_env", "print what a bug report needs: versions, devices, build"),
}
"""By name, in the order in which the help lists them; modules are of `pagedinfer.cli`."""
