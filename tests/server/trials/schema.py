"""schemathesis against a running server: requests made from its own schema, right ones and wrong ones.

No answer may be a 5xx, nothing may hang, and the engine answers afterwards as before.

    python -m tests.server.trials.schema [--examples 2000]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.server.conftest import CHAT_TEMPLATE
from tests.server.rig import ServerThread
from tests.tiny_models import make_llama

_NUM_OPERATIONS = 5  # that take something; of the others there is one request each


def run(model: str, examples: int, *, seed: int = 0, scripted: bool = False) -> str:
    """About so many requests; what schemathesis says in the end. Raises AssertionError on a failure."""
    with ServerThread(model, scripted=scripted, chat_template=CHAT_TEMPLATE, max_model_len=64) as server:
        before = server.text("Hello", temperature=0, max_tokens=8)
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run"),
            f"http://127.0.0.1:{server.port}/openapi.json",
            *("--checks", "not_a_server_error", "--phases", "fuzzing", "--seed", str(seed)),
            *("--max-examples", str(max(1, examples // _NUM_OPERATIONS)), "--no-color"),
            *("--request-timeout", "20", "--continue-on-failure", "--suppress-health-check", "all"),
        ]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=1200,
            cwd=tempfile.gettempdir(),
            check=False,
        )
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
        assert server.text("Hello", temperature=0, max_tokens=8) == before
        assert server.server.service.engine.num_unfinished_requests == 0
    return result.stdout


def num_cases(output: str) -> int:
    """How many requests were made, by what schemathesis says."""
    [number] = re.findall(r"([\d,]+) generated", output)
    return int(number.replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_llama(Path(folder))
        print(run(folder, arguments.examples)[-1500:])


if __name__ == "__main__":
    main()
