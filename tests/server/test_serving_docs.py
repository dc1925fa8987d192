"""docs/serving.md: its examples work as they are, and it names every route and flag."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pagedinfer.cli.main import main, parser_of
from tests.server.rig import Client

TEXT = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    command
    for kind, block in BLOCKS
    if kind == "sh"
    for command in re.split(r"\n(?=curl |pagedinfer )", block.strip())
]
SCRIPTS = [block for kind, block in BLOCKS if kind == "python"]


def test_all_blocks_are_tried() -> None:
    assert {kind for kind, _ in BLOCKS} == {"sh", "python"}
    assert len(COMMANDS) >= 12
    assert len(SCRIPTS) >= 3


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split())[:60])
def test_commands(command: str, server: Client, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.port}"
    words = shlex.split(command)
    if words[:2] == ["pagedinfer", "serve"]:
        assert parser_of("serve").parse_args(words[2:]).model
    elif words[0] == "pagedinfer":
        flag = "--base-url" if words[1] == "bench" else "--url"
        assert main([*words[1:], flag, url]) == 0
        assert capsys.readouterr().out
    else:
        assert words[0] == "curl"
        path = words[1].removeprefix("http://127.0.0.1:8000")
        headers: dict[str, str] = {}
        body = None
        for name, value in zip(words[2::2], words[3::2], strict=True):
            if name == "-H":
                key, _, content = value.partition(": ")
                headers[key] = content
            else:
                assert name == "-d"
                body = value
        answer = server.request("GET" if body is None else "POST", path, body, headers)
        assert answer.status == 200, answer.body


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.split("\n")[-2][:40])
def test_scripts(script: str, server: Client, model: str) -> None:
    pytest.importorskip("openai")
    script = script.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}")
    script = script.replace('"path/to/a/model"', f"{model!r}, num_gpu_blocks_override=64")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "serving.md", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip()


def test_every_flag_and_route_is_named(server: Client) -> None:
    own: list[Any] = [
        action
        for group in parser_of("serve")._action_groups
        if group.title == "server"
        for action in group._group_actions
    ]
    for action in own:
        assert f"`{action.option_strings[0]}" in TEXT, action.option_strings
    for path in server.get("/openapi.json").json["paths"]:
        assert f" {path}`" in TEXT, path
