"""Flags: human numbers, dashes and underscores, configuration files."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedinfer.cli.parser import Parser, human_integer, port_number


def parser() -> Parser:
    parser = Parser(prog="p")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--max-model-len", type=human_integer)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_config_argument()
    return parser


def errors_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(words)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("1k", 1000), ("1K", 1024), ("2M", 2**21), ("1.5k", 1500), ("0.5K", 512), ("-1", -1)],
)
def test_human_integers(text: str, value: int) -> None:
    assert human_integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "0.0001k", "1kk", "1e3", "٣", "one", "9" * 50])
def test_what_is_no_human_integer(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        human_integer(text)


@given(st.integers(-(10**15), 10**15))
def test_every_integer_is_one(value: int) -> None:
    assert human_integer(str(value)) == value


def test_dashes_and_underscores_are_the_same_in_names_but_not_in_values() -> None:
    arguments = parser().parse_args(["a_b", "--max_model_len=1k", "--served_model_name", "x_y"])
    assert (arguments.model, arguments.max_model_len) == ("a_b", 1000)
    assert arguments.served_model_name == ["x_y"]


def test_names_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --max-model-len?" in errors_of(["--max-model", "5"], capsys)


def test_a_configuration_file_is_below_the_command_line_and_above_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: folder\nmax_model_len: 4K\nenable-prefix-caching: false\nverbose: true\n"
        "served-model-name: [a, b]\ntensor-parallel-size: 2\n"
    )
    arguments = parser().parse_args(["--config", str(file)])
    assert vars(arguments) == {
        "model": "folder",
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "verbose": True,
        "served_model_name": ["a", "b"],
        "tensor_parallel_size": 2,
        "config": str(file),
    }
    words = ["other", "--max-model-len", "7", "--served-model-name", "c", "--enable-prefix-caching"]
    arguments = parser().parse_args([*words, f"--config={file}"])
    assert (arguments.model, arguments.max_model_len) == ("other", 7)
    assert arguments.served_model_name == ["c"]
    assert arguments.enable_prefix_caching is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-length: 5", "unknown flag --max-model-length; did you mean --max-model-len?"),
        ("- 1", "must hold flag names and their values, got a list"),
        ("verbose: 1", "verbose must be true or false, got 1"),
        ("max-model-len: many", "'many' is not an integer"),
        ("a: [", "while parsing"),
    ],
)
def test_a_wrong_configuration_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert message in errors_of(["--config", str(file)], capsys)


def test_a_configuration_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in errors_of(["--config", "nowhere.yaml"], capsys)


@pytest.mark.parametrize("text", ["0", "8000", "65535"])
def test_ports(text: str) -> None:
    assert port_number(text) == int(text)


@pytest.mark.parametrize("text", ["99999", "65536", "-1", "8k", "http", "", "٣"])
def test_what_is_no_port(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="0 to 65535"):
        port_number(text)
