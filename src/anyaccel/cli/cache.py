"""`anyaccel cache`: lists, exports, imports, prunes and clears the compile cache."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from anyaccel.cli.command import with_verbose_option
from anyaccel.errors import UsageError

__all__ = ["cache_app", "check_cache_writable"]

cache_app = typer.Typer(
    no_args_is_help=True,
    help="Manage the compile cache.\n\nThe cache folder is ~/.cache/anyaccel. Set ANYACCEL_CACHE to change it.",
)


@cache_app.command("list")
@with_verbose_option
def list_cache(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the cached graphs with their pipeline, image size, dtype and device."""
    from anyaccel.runtime.speed.compile_cache import find_entries_dir, list_entries, measure_graphs
    from anyaccel.runtime.speed.compile_cache_key import find_versions
    from anyaccel.storage.cache_dir import find_graphs_folder
    from anyaccel.units import readable

    entries, installed, compiler_bytes = list_entries(), find_versions(), measure_graphs()
    # The versions are part of the key, so an entry of other versions is never loaded.
    states = {
        entry.name: _entry_state(not entry.fault, {name: entry.key.get(name, "") for name in installed} == installed)
        for entry in entries
    }
    if as_json:
        rows = [
            {
                "name": entry.name,
                "key": entry.key,
                "bytes": entry.payload_bytes,
                "took_s": entry.took_s,
                "state": states[entry.name],
            }
            for entry in entries
        ]
        print(
            json.dumps({"folder": str(find_entries_dir()), "entries": rows, "compiler_bytes": compiler_bytes}, indent=2)
        )
        return
    for entry in entries:
        size = readable(entry.payload_bytes)
        # A damaged header: only the file name and size are known.
        if not entry.key:
            print(f"{entry.name[:12]}  unreadable entry; {size}: damaged")
            continue
        key = entry.key
        created = datetime.fromtimestamp(entry.created).strftime("%Y-%m-%d %H:%M")
        print(f"{entry.name[:12]}  {key.get('pipeline', '?')}, {key.get('shape', '?')}, {key.get('dtype', '?')}")
        compiled_on = f"on {key.get('device', '?')}, torch {key.get('torch', '?')}"
        print(f"              {compiled_on}; {size}, took {entry.took_s:.0f} s, {created}: {states[entry.name]}")
    damaged = list(states.values()).count("damaged")
    print(f"{_count_entries(len(entries))} in {find_entries_dir()}{f', {damaged} damaged' if damaged else ''}")
    if compiler_bytes:
        print(f"{readable(compiler_bytes)} of compilers' own caches in {find_graphs_folder()}")


def _entry_state(readable: bool, current: bool) -> str:
    if not readable:
        return "damaged"
    return "ready" if current else "of other versions"


@cache_app.command("export")
@with_verbose_option
def export_cache(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, for example graphs.tar.gz.")],
) -> None:
    """Export the compile cache to a file, for use on other machines with the same device."""
    from anyaccel.runtime.speed.compile_cache import export_entries, list_entries

    if file.is_dir():
        raise UsageError(
            f"cannot export to {file}: it is a folder", hint=f"pass a file name, for example {file / 'graphs.tar.gz'}"
        )
    entries = [entry for entry in list_entries() if not entry.fault]
    if not entries:
        raise UsageError(
            "nothing to export: the cache is empty", hint="fill it with `anyaccel warm MODEL --size 512x512`"
        )
    if not file.parent.is_dir():
        raise UsageError(f"the folder {file.parent} does not exist", hint=f"create it with `mkdir -p {file.parent}`")
    print(f"exported {_count_entries(export_entries(file, entries))} to {file}")


@cache_app.command("import")
@with_verbose_option
def import_cache(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File written by `anyaccel cache export`.")],
) -> None:
    """Import compiled graphs from a file that was exported on another machine.

    The file contains code that anyaccel executes later. Import only files that you trust.
    """
    from anyaccel.runtime.speed.compile_cache import find_entries_dir, import_entries

    if not file.is_file():
        raise UsageError(f"the file {file} does not exist", hint="pass a file written by `anyaccel cache export`")
    check_cache_writable(find_entries_dir())
    # A bad entry does not stop the import: the others are usable on their own.
    imported, existing, rejected = import_entries(file)
    for reason in rejected:
        print(f"skipped: {reason}")
    if not imported and not existing:
        raise UsageError(
            f"no entry in {file} could be imported", hint=f"create the file again with `anyaccel cache export {file}`"
        )
    print(f"imported {_count_entries(imported)}{f', {existing} already cached' if existing else ''}")


def _count_entries(entries: int) -> str:
    return "1 entry" if entries == 1 else f"{entries} entries"


def check_cache_writable(folder: Path) -> None:
    """Raise if the cache folder is not writable."""
    from anyaccel.storage.cache_dir import CACHE_VARIABLE, find_write_error

    fault = find_write_error(folder)
    if fault:
        raise UsageError(f"cannot write to the cache: {fault}", hint=f"set {CACHE_VARIABLE} to a writable folder")


@cache_app.command("prune")
@with_verbose_option
def prune_cache(
    older: Annotated[
        float | None,
        typer.Option("--older", metavar="DAYS", help="Also remove entries older than DAYS. Default: no age limit."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all entries and the compilers' own caches.")
    ] = False,
) -> None:
    """Remove corrupted cache entries and entries written by other package versions."""
    from anyaccel.runtime.speed.compile_cache import prune_entries
    from anyaccel.runtime.speed.compile_cache_key import find_versions
    from anyaccel.units import readable

    if older is not None and not older >= 0:  # `older < 0` would accept NaN
        raise UsageError(f"--older must be at least 0 days, not {older:g}", hint="for example --older 30")
    if everything:
        _remove_all()
        return
    removed, freed_bytes, foreign = prune_entries(older_than_days=older, versions=find_versions())
    _print_kept(foreign)
    print(f"removed {_count_entries(removed)}, {readable(freed_bytes)}")


@cache_app.command("clear")
@with_verbose_option
def clear_cache(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove everything that anyaccel stores to save time: compiled graphs, compilers' caches and measurements.

    Files of `anyaccel serve` and models that were downloaded from the Hub are kept.
    """
    from anyaccel.runtime.placement.oom_history import remove_outcomes
    from anyaccel.storage.cache_dir import find_cache_folder, remove_facts

    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("the cache is cleared only after a confirmation", hint="add --yes")
        typer.confirm(f"Clear the cache in {find_cache_folder()}?", abort=True, err=True)
    _remove_all()
    measurements = remove_outcomes() + remove_facts()
    if measurements:
        print(f"removed {measurements} file{'s' * (measurements > 1)} with measurements of this machine")


def _remove_all() -> None:
    """Remove all cache entries and the compilers' own caches, and print the freed size."""
    from anyaccel.runtime.speed.compile_cache import prune_entries, remove_graphs
    from anyaccel.units import readable

    removed, freed_bytes, foreign = prune_entries()
    compiler_bytes, foreign_graphs = remove_graphs()
    _print_kept([*foreign, *foreign_graphs])
    print(f"removed {_count_entries(removed)}, {readable(freed_bytes)}")
    if compiler_bytes:
        print(f"removed the compilers' own caches, {readable(compiler_bytes)}")


def _print_kept(paths: list[str]) -> None:
    # ANYACCEL_CACHE can point to a folder that other programs use too.
    for path in paths:
        print(f"not removed, not written by anyaccel: {path}")
