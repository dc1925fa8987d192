"""`pagedinfer serve` with the scripted engine: takes the same flags."""

from __future__ import annotations

import functools
import sys

from pagedinfer.cli.main import main
from pagedinfer.server import run
from tests.server.conftest import SCRIPTED_ENGINE

if __name__ == "__main__":
    run.run_server = functools.partial(run.run_server, engine_command=SCRIPTED_ENGINE)
    sys.exit(main(["serve", *sys.argv[1:]]))
