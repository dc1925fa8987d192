"""The command line: what it costs to ask for help, suggestions, exit codes."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pagedinfer import __version__
from pagedinfer.cli import main as cli
from pagedinfer.cli.commands import COMMANDS
from pagedinfer.cli.main import main, parser_of
from pagedinfer.errors import OutOfMemoryError


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagedinfer", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_is_quick(words: list[str]) -> None:
    seconds = []
    for _ in range(5):  # on a machine that does other things too, the best of a few
        started = time.perf_counter()
        result = run(*words)
        seconds.append(time.perf_counter() - started)
        assert result.returncode == 0
        assert result.stdout.startswith("usage: pagedinfer")
        if seconds[-1] < 0.3:
            break
    assert min(seconds) < 0.3


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from pagedinfer.cli.main import parser_of
for name in {list(COMMANDS)}:
    parser_of(name)
heavy = {{"torch", "transformers", "fastapi", "pydantic", "uvicorn", "zmq", "numpy", "yaml"}}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert command.summary in text
        assert parser_of(name).description


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: pagedinfer" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pagedinfer {__version__}\n"


def test_an_unknown_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["colect-env"]) == 2
    captured = capsys.readouterr()
    assert "unknown command colect-env; did you mean collect-env?" in captured.err
    assert captured.out == ""


def test_a_text_in_the_place_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "Once upon a time"]) == 1
    assert "no model 'Once upon a time'; a text to continue goes after -p" in capsys.readouterr().err


def test_a_flag_of_vllms_says_what_to_do_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--enable-lora"]) == 2
    assert (
        "unknown flag --enable-lora; vLLM has it, pagedinfer does not (yet): merge" in capsys.readouterr().err
    )


def test_an_unknown_flag_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--jsn"]) == 2
    assert "unknown flag --jsn; did you mean --json?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (0, 0),
        (1, 1),
        (OutOfMemoryError("the weights need 5 GiB"), 1),
        (ValueError("no folder 'x'"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    outcome: Any, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(arguments: object) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return int(outcome)

    monkeypatch.delenv("PAGEDINFER_LOGGING_LEVEL", raising=False)
    module = SimpleNamespace(__doc__="Does it.", add_arguments=lambda parser: None, run=command)
    monkeypatch.setattr(cli, "_module", lambda name: module)
    assert main(["collect-env"]) == code
    if isinstance(outcome, Exception):
        assert capsys.readouterr().err == f"pagedinfer: error: {outcome}\n"


def test_collect_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON, and without secrets."""
    import json

    monkeypatch.setenv("PAGEDINFER_API_KEY", "very-secret")
    monkeypatch.setenv("HF_TOKEN", "also-secret")
    monkeypatch.setenv("PAGEDINFER_WHATEVER_COMES", "3")
    result = run("collect-env", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["pagedinfer"]["version"] == __version__
    assert found["pagedinfer"]["kernels"] == "load"
    assert found["packages"]["torch"] != "not installed"
    assert found["environment"]["PAGEDINFER_WHATEVER_COMES"] == "3"
    assert "secret" not in result.stdout


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["--print-completion", "bash"]) == 0
    assert "collect-env" in capsys.readouterr().out
    assert main(["--print-completion", "cmd.exe"]) == 2
