"""argparse with the habits of this command line. Nothing here is slow to import.

`-` and `_` mean the same in a flag's name, names are never abbreviated, an unknown flag gets a suggestion,
and `--config FILE.yaml` gives flags that those of the command line override.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pagedinfer.vllm_names import hint

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def human_integer(text: str) -> int:
    """An integer, perhaps with a unit: 1k is 1000, 1K is 1024, 1.5g is 1,500,000,000.

    Raises:
        argparse.ArgumentTypeError: the text is nothing of the kind, or no whole number.
    """
    plain = text.strip().replace(",", "").replace("_", "")
    match = re.fullmatch(r"([+-]?[0-9]+(?:\.[0-9]+)?)([kmgtKMGT]?)", plain)
    if match is None or len(match[1]) > 40:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer such as 512, 4k (4000) or 4K (4096)")
    whole, _, fraction = match[1].partition(".")
    value, rest = divmod(int(whole + fraction) * _UNITS[match[2]], int("1" + "0" * len(fraction)))
    if rest:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return value


def port_number(text: str) -> int:
    """The number of a TCP port; 0 for any free one.

    Raises:
        argparse.ArgumentTypeError: there is no such port.
    """
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: they go from 0 to 65535")
    return int(text)


class Parser(argparse.ArgumentParser):
    """A parser with the habits above; `--config` is read where the parser has that flag."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def add_config_argument(self) -> None:
        """Adds `--config`."""
        self.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file with long flag names as keys; flags on the command line win",
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = [_with_dashes(word) for word in args or ()]
        if "--config" in self._option_string_actions:
            finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            finder.add_argument("--config")
            path = finder.parse_known_args(words)[0].config
            if path is not None:
                self._read_config(path)
        return super().parse_known_args(words, namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [word for word in unknown if word.startswith("-")]
            self.error(self._unknown(flags[0] if flags else unknown[0]))
        return arguments

    def error(self, message: str) -> NoReturn:
        """Prints the message, and where to read more, and exits with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists what there is\n")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        name = word.partition("=")[0]
        absent = hint(name.lstrip("-").replace("-", "_"), ())
        nearest = difflib.get_close_matches(name, [s for s in self._option_string_actions if len(s) > 2], n=1)
        return f"unknown flag {name}" + (absent or (f"; did you mean {nearest[0]}?" if nearest else ""))

    def _read_config(self, path: str) -> None:
        """Makes the values in a file the defaults of their flags."""
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            self.error(f"--config {path}: {error}")
        if values is None:
            return
        if not isinstance(values, Mapping):
            self.error(
                f"--config {path} must hold flag names and their values, got a {type(values).__name__}"
            )
        positionals = {action.dest: action for action in self._get_positional_actions()}
        for key, value in values.items():
            name = str(key).replace("_", "-")
            if name in positionals and isinstance(value, str):
                positionals[name].default = value
            elif value is not None:
                self._set_default(path, name, value)

    def _set_default(self, path: str, name: str, value: Any) -> None:
        flag = f"--{name}"
        action = self._option_string_actions.get(flag)
        if action is None or name in ("config", "help"):
            self.error(f"--config {path}: {self._unknown(flag)}")
        if isinstance(action, argparse.BooleanOptionalAction | argparse._StoreTrueAction):
            if not isinstance(value, bool):
                self.error(f"--config {path}: {name} must be true or false, got {value!r}")
            action.default = value
            return
        words = [str(each) for each in (value if isinstance(value, list) else [value])]
        joined = [flag, *words] if action.nargs in ("*", "+") else [f"{flag}={word}" for word in words]
        action.default = getattr(super().parse_known_args(joined)[0], action.dest)


def _with_dashes(word: str) -> str:
    """A long flag with `-` for `_` in its name; anything else as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
