"""Configuration file with default values for the options of commands.

    [generate]
    model = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    steps = 20

An option on the command line overrides an environment variable, which overrides the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from anyaccel.errors import UsageError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["CONFIG_VARIABLE", "find_config_file", "read_option_defaults"]

CONFIG_VARIABLE = "ANYACCEL_CONFIG"
# Options whose environment variable is not declared with the option, because Python functions read it too.
_VARIABLES = {"device": "ANYACCEL_DEVICE"}
_NOT_CONFIGURABLE = {"help", "version", "install-completion", "show-completion"}


def find_config_file() -> Path:
    """Return the path of the configuration file: `$ANYACCEL_CONFIG`, or else `anyaccel/config.toml` in `~/.config`."""
    path = os.environ.get(CONFIG_VARIABLE)
    if path:
        return Path(path).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "anyaccel" / "config.toml"


def read_option_defaults(context: typer.Context) -> dict[str, Any]:
    """Return the default values for all commands of a group, as click's `default_map`; raise if the file is invalid."""
    path = find_config_file()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if os.environ.get(CONFIG_VARIABLE):
            raise UsageError(
                f"the file {path} in {CONFIG_VARIABLE} does not exist", hint=f"create it, or unset {CONFIG_VARIABLE}"
            ) from None
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=f"set {CONFIG_VARIABLE} to a file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a valid TOML file: {error}", hint="for example steps = 20") from error
    return _read_group(context.command, context, document, path, ())


def _read_group(
    group: Any, context: typer.Context, tables: Mapping[str, Any], path: Path, parents: tuple[str, ...]
) -> dict[str, Any]:
    """Return the defaults in the tables of a group's commands."""
    known = group.list_commands(context)
    defaults: dict[str, Any] = {}
    for name, table in tables.items():
        section = ".".join((*parents, name))
        if name not in known:
            what = "command" if isinstance(table, dict) else "key outside of a command's table"
            raise UsageError(f"{path}: unknown {what} {section!r}", hint=nearest(name, known))
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {section} must be a table", hint=f"write [{section}] on a line of its own")
        command = group.get_command(context, name)
        read = _read_group if hasattr(command, "list_commands") else _read_options
        defaults[name] = read(command, context, table, path, (*parents, name))
    return defaults


def _read_options(
    command: Any, context: typer.Context, table: Mapping[str, Any], path: Path, parents: tuple[str, ...]
) -> dict[str, Any]:
    """Return the defaults in the table of one command, by parameter name."""
    options = {
        name: parameter
        for parameter in command.get_params(context)
        if parameter.param_type_name == "option"
        for name in _list_names(parameter)
        if name not in _NOT_CONFIGURABLE
    }
    defaults = {}
    for key, value in table.items():
        section = f"[{'.'.join(parents)}]"
        if key.replace("_", "-") not in options:
            raise UsageError(f"{path}: unknown option {key!r} in {section}", hint=nearest(key, options))
        option = options[key.replace("_", "-")]
        if os.environ.get(_VARIABLES.get(key, "")):
            continue
        try:
            defaults[option.name] = _convert(option, context, value)
        except (typer.BadParameter, TypeError) as error:
            raise UsageError(
                f"{path}: {value!r} is not a valid value of {key} in {section}: {error}",
                hint=f"see `anyaccel {' '.join(parents)} --help`",
            ) from None
    return defaults


def _list_names(parameter: Any) -> list[str]:
    """Return the long names of an option without dashes, or its short name if it has no other."""
    long = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
    return long or [name.removeprefix("-") for name in parameter.opts]


def _convert(option: Any, context: typer.Context, value: Any) -> Any:
    """Convert a value of the file like an argument on the command line."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise TypeError("use true or false")
        return value
    values = value if option.multiple and isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in values):
        raise TypeError("use a string or a number")
    texts = [str(item) for item in values]
    converted = option.process_value(context, texts if option.multiple else texts[0])
    return list(converted) if option.multiple else converted
