"""Write the generated blocks of `docs/internals/public-surface.md`: run `python tools/public_surface.py`.

A block is the text between `<!-- generated: NAME -->` and `<!-- end -->`. `tests/test_public_surface.py` fails if the
page and the code differ.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["BLOCKS", "PAGE", "render_page"]

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "anyaccel"
PAGE = ROOT / "docs" / "internals" / "public-surface.md"
MODULES = ("anyaccel", "anyaccel.backends", "anyaccel.recipes", "anyaccel.errors", "anyaccel.checking.pytest_plugin")

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Ways to access an environment variable. ANYACCEL_ names also match as constants.
_VARIABLE = re.compile(
    r"""["'](ANYACCEL_[A-Z_]+)["']"""
    r"""|environ(?:\.get\(|\.pop\(|\.setdefault\(|\[)\s*["'](\w+)["']"""
    r"""|envvar=["'](\w+)["']"""
    r"""|["'](\w+)["'] in os\.environ"""
)
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤"}

# Meaning of each environment variable. `list_variables` fails if the code has others.
VARIABLES = {
    "ANYACCEL_API_KEYS": "API keys of `anyaccel serve`, separated by commas; adds to `--api-key`",
    "ANYACCEL_CACHE": "The cache directory; default `$XDG_CACHE_HOME/anyaccel` or `~/.cache/anyaccel`",
    "ANYACCEL_CONFIG": "The configuration file; default `~/.config/anyaccel/config.toml`",
    "ANYACCEL_DEVICE": "The device that `auto` selects",
    "ANYACCEL_TRACEBACK": "If set, the command line shows tracebacks instead of one-line errors",
    "ANYACCEL_VIRTUAL": "A virtual device for any program that imports torch: `mps`, `hpu,count=2`",
    "ANYACCEL_VIRTUAL_LEDGER": "The file for the limits that a program hit on that virtual device",
    "ANYACCEL_WORKER_PIPES": "Internal: file descriptors that a worker process inherits",
    "DIFFUSERS_TEST_DEVICE": "Set by `pytest --accelerator` unless it is set: the device of diffusers' own tests",
    "LOCAL_RANK": "Read for `parallel=`; set by torchrun",
    "OMP_NUM_THREADS": "Set to 1 by commands that fork processes, unless it is set",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "The default of `anyaccel serve --otlp`",
    "RAY_USE_TLS": "Read to warn about an unencrypted Ray cluster",
    "TERM": "`dumb` turns the progress display off",
    "WORLD_SIZE": "Read for `parallel=`; set by torchrun",
    "XDG_CACHE_HOME": "The parent of the cache directory if `ANYACCEL_CACHE` is not set",
    "XDG_CONFIG_HOME": "The parent of the folder of the configuration file if `ANYACCEL_CONFIG` is not set",
}


def main() -> None:
    """Write the page."""
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def render_page(text: str) -> str:
    """Return the page with new content in every generated block."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n\n{match[3]}", text)


def list_exports() -> str:
    """Return a table of the names that each public module exports."""
    rows = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__, key=str.lower):
            rows.append((f"`{module_name}`", f"`{name}`", _describe_object(getattr(module, name))))
    return _table(("Module", "Name", "Kind"), rows)


def list_members() -> str:
    """Return a table of the public attributes and methods of the classes that `anyaccel` exports."""
    import anyaccel

    rows = []
    for name in sorted(anyaccel.__all__, key=str.lower):
        value = getattr(anyaccel, name)
        if isinstance(value, type):
            rows += [(f"`{name}`", f"`{member}`") for member in _find_members(value)]
    return _table(("Class", "Member"), rows)


def list_place_options() -> str:
    """Return a table of the options of `anyaccel.place`: the fields of the one dataclass of `planning.options`."""
    module = importlib.import_module("anyaccel.planning.options")
    kinds = [
        value
        for value in vars(module).values()
        if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__module__ == module.__name__
    ]
    # Fails if the module gets a second dataclass, which this table would not show.
    (options,) = kinds
    rows = [(f"`{field.name}`", f"`{field.type}`", f"`{field.default!r}`") for field in dataclasses.fields(options)]
    return _table(("Option", "Type", "Default"), rows)


def list_commands() -> str:
    """Return a table of the commands with their arguments, flags and defaults."""
    import typer.main

    from anyaccel.cli.main import app

    return _table(("Command", "Parameter", "Default"), _walk_commands(typer.main.get_command(app), "anyaccel"))


def list_variables() -> str:
    """Return a table of the environment variables that the code reads or sets."""
    names: set[str] = set()
    # From the source text, because an import does not show which variables the code reads.
    for path in SOURCE.rglob("*.py"):
        for groups in _VARIABLE.findall(path.read_text(encoding="utf-8")):
            names.update(filter(None, groups))
    mismatched = names ^ set(VARIABLES)
    if mismatched:
        raise SystemExit(f"VARIABLES in {__file__} and the code differ: {', '.join(sorted(mismatched))}")
    return _table(("Variable", "Meaning"), [(f"`{name}`", VARIABLES[name]) for name in sorted(names)])


def list_routes() -> str:
    """Return a table of the HTTP endpoints with their parameters and statuses."""
    rows = []
    for path, methods in _read_openapi()["paths"].items():
        for method, operation in methods.items():
            parameters = [f"`{parameter['name']}` ({parameter['in']})" for parameter in operation.get("parameters", ())]
            body = operation.get("requestBody", {}).get("content", {})
            parameters += [f"{kind}: {_name_schema(content)}" for kind, content in body.items()]
            statuses = ", ".join(sorted(operation["responses"]))
            rows.append((f"`{method.upper()} {path}`", ", ".join(parameters), statuses))
    return _table(("Endpoint", "Parameters and body", "Statuses"), rows)


def list_request_fields() -> str:
    """Return a table of the fields of the request bodies."""
    document, schemas = _read_openapi(), {}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                name = _name_schema(content)
                schema = document["components"]["schemas"].get(name.strip("`"))
                # An inline schema has no name, so its endpoint identifies it.
                schemas[name if schema else f"`{path}` ({kind})"] = schema or content["schema"]
    rows = []
    for name, schema in sorted(schemas.items()):
        required = schema.get("required", ())
        for field, content in schema.get("properties", {}).items():
            default = "required" if field in required else f"`{content.get('default')!r}`"
            rows.append((name, f"`{field}`", _describe_type(content), default))
    return _table(("Body", "Field", "Type", "Default"), rows)


def list_metrics() -> str:
    """Return a table of the metrics of `GET /metrics`."""
    from prometheus_client.parser import text_string_to_metric_families

    with tempfile.TemporaryDirectory() as folder:
        service = _make_service(Path(folder))
        families = list(text_string_to_metric_families(service.metrics.text().decode()))
        service.close()
    labels = _read_metric_labels()
    rows = [
        (f"`{family.name}`", family.type, ", ".join(labels.get(family.name, ())))
        for family in sorted(families, key=lambda family: family.name)
        # prometheus_client adds the creation time of each counter and histogram as a metric.
        if not family.name.endswith("_created")
    ]
    return _table(("Metric", "Type", "Labels"), rows)


def list_entry_points() -> str:
    """Return a table of the entry points that the package declares."""
    # Parsed by hand: tomllib requires Python 3.11.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rows, group = [], ""
    for line in text.splitlines():
        if match := re.fullmatch(r"\[(.*)\]", line):
            table = re.fullmatch(r"project\.(scripts|entry-points\.(.+))", match[1])
            group = "" if table is None else "console_scripts" if table[1] == "scripts" else table[2].strip('"')
        elif group and (pair := re.fullmatch(r'(\S+) = "(.+)"', line)):
            rows.append((f"`{group}`", f"`{pair[1]}`", f"`{pair[2]}`"))
    return _table(("Group", "Name", "Target"), rows)


def list_pytest_options() -> str:
    """Return a table of the options, the marker and the fixtures of the pytest plugin."""
    plugin = importlib.import_module("anyaccel.checking.pytest_plugin")
    text = inspect.getsource(plugin)
    rows = [("option", f"`{name}`") for name in re.findall(r'addoption\("(--[\w-]+)"', text)]
    rows += [("marker", f"`{name}`") for name in sorted(set(re.findall(r"@pytest\.mark\.(\w+)", plugin.__doc__ or "")))]
    rows += [("fixture", f"`{name}`") for name in re.findall(r"@pytest\.fixture.*\ndef (\w+)\(", text)]
    return _table(("Kind", "Name"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "exports": list_exports,
    "members": list_members,
    "place_options": list_place_options,
    "commands": list_commands,
    "variables": list_variables,
    "routes": list_routes,
    "request_fields": list_request_fields,
    "metrics": list_metrics,
    "entry_points": list_entry_points,
    "pytest": list_pytest_options,
}


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _describe_object(value: Any) -> str:
    if isinstance(value, type):
        if issubclass(value, BaseException):
            bases = ", ".join(base.__name__ for base in value.__bases__)
            return f"exception ({bases}), exit status {getattr(value, 'exit_status', '')}"
        return "class"
    if callable(value):
        return f"`{_describe_signature(value)}`"
    return type(value).__name__


def _describe_signature(function: Callable[..., Any]) -> str:
    """Return the parameters with their defaults; annotations are left out."""
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    # The repr of a default such as `<function f at 0x7f…>` contains an address that changes with every run.
    return re.sub(r"<(?:function|class|enum) ?'?([\w.<>]+)'?[^>]*>", r"\1", text)


def _find_members(kind: type) -> list[str]:
    """Return the public members that classes of anyaccel define; those of diffusers are left out."""
    members = []
    for name in sorted({name for base in kind.__mro__ if _is_ours(base) for name in _list_own(base)}):
        # Static, because `getattr` unwraps classmethods and staticmethods.
        value = inspect.getattr_static(kind, name, None)
        is_call = isinstance(value, classmethod | staticmethod) or inspect.isfunction(value)
        members.append(f"{name}{_describe_signature(getattr(kind, name)) if is_call else ''}")
    return members


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "anyaccel"


def _list_own(kind: type) -> list[str]:
    return [name for name in {*vars(kind), *vars(kind).get("__annotations__", {})} if not name.startswith("_")]


def _walk_commands(command: Any, path: str) -> Iterable[tuple[str, ...]]:
    parameters = [parameter for parameter in command.params if parameter.name != "help"]
    for parameter in parameters:
        is_option = parameter.param_type_name == "option"
        flags = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
        label = flags if is_option else f"{parameter.metavar or parameter.name.upper()} (argument)"
        default = parameter.default() if callable(parameter.default) else parameter.default
        default = default.value if isinstance(default, enum.Enum) else default
        # Since Click 8.3, an option without a default has a sentinel instead of None.
        absent = default is None or type(default).__name__ in ("Sentinel", "_Unset") or default in ((), [])
        text = "required" if parameter.required else "" if absent else f"`{default!r}`"
        yield f"`{path}`", label, text
    if not parameters:
        yield f"`{path}`", "", ""
    for name, subcommand in sorted(getattr(command, "commands", {}).items()):
        yield from _walk_commands(subcommand, f"{path} {name}")


def _make_service(folder: Path) -> Any:
    from anyaccel.server.http.service import Service
    from anyaccel.server.settings import ServerSettings

    return Service(ServerSettings(models=(), data=folder))


def _read_openapi() -> dict[str, Any]:
    """Return the OpenAPI document of a service that has not been started."""
    from anyaccel.server.http.app import make_app

    with tempfile.TemporaryDirectory() as folder:
        service = _make_service(Path(folder))
        try:
            document: dict[str, Any] = make_app(service).openapi()
        finally:
            service.close()
    return document


def _name_schema(content: dict[str, Any]) -> str:
    schema = content.get("schema", {})
    return f"`{schema['$ref'].rsplit('/', 1)[-1]}`" if "$ref" in schema else f"`{schema.get('title', 'object')}`"


def _describe_type(content: dict[str, Any]) -> str:
    texts = []
    for kind in content.get("anyOf", [content]):
        allowed = [kind["const"]] if "const" in kind else kind.get("enum")
        name = " or ".join(f"`{value}`" for value in allowed) if allowed else str(kind.get("type", "object"))
        limits = [f"{sign} {kind[bound]:g}" for bound, sign in _BOUNDS.items() if bound in kind]
        if name != "null":
            texts.append(" ".join([name, *limits]))
    return ", ".join(texts)


def _read_metric_labels() -> dict[str, tuple[str, ...]]:
    """Return the labels of each metric, from the source text."""
    # A metric with labels has no samples before its first use: https://github.com/prometheus/client_python/pull/589
    text = (SOURCE / "server" / "jobs" / "metrics.py").read_text(encoding="utf-8")
    metrics = re.findall(r'\(\s*"(anyaccel_\w+)",\s*"[^"]*",\s*\[([^\]]*)\]', text)
    return {name: tuple(re.findall(r'"(\w+)"', labels)) for name, labels in metrics}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    main()
