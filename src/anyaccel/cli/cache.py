"""`anyaccel cache`: what was compiled on this machine, passed on to others of its kind, and thrown away."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from anyaccel.errors import UsageError

__all__ = ["cache_app", "refuse_unwritable"]

cache_app = typer.Typer(no_args_is_help=True, help="What was compiled, and is kept under ANYACCEL_CACHE.")


@cache_app.command("list")
def list_cache(as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False) -> None:
    """List what is kept: for which pipeline, size, type, device and versions."""
    from anyaccel.runtime.speed.compile_cache import find_folder, list_entries, measure_graphs
    from anyaccel.runtime.speed.compile_cache_key import find_versions
    from anyaccel.storage.cache_dir import find_graphs_folder
    from anyaccel.units import readable

    entries, here, graphs = list_entries(), find_versions(), measure_graphs()
    states = {one.name: _state(not one.fault, {n: one.key.get(n, "") for n in here} == here) for one in entries}
    if as_json:
        rows = [
            {
                "name": one.name,
                "key": one.key,
                "bytes": one.payload_bytes,
                "took_s": one.took_s,
                "state": states[one.name],
            }
            for one in entries
        ]
        print(json.dumps({"folder": str(find_folder()), "entries": rows, "compiler_bytes": graphs}, indent=2))
        return
    for one in entries:
        size = readable(one.payload_bytes)
        if not one.key:
            print(f"{one.name[:12]}  what it is for cannot be read; {size}: damaged")
            continue
        made = datetime.fromtimestamp(one.created).strftime("%Y-%m-%d %H:%M")
        print(
            f"{one.name[:12]}  {one.key.get('pipeline', '?')}, {one.key.get('shape', '?')}, {one.key.get('dtype', '?')}"
        )
        where = f"on {one.key.get('device', '?')}, torch {one.key.get('torch', '?')}"
        print(f"              {where}; {size}, took {one.took_s:.0f} s, {made}: {states[one.name]}")
    damaged = list(states.values()).count("damaged")
    print(f"{len(entries)} kept in {find_folder()}{f', {damaged} of them damaged' if damaged else ''}")
    if graphs:
        print(f"{readable(graphs)} that compilers keep themselves in {find_graphs_folder()}")


def _state(sound: bool, current: bool) -> str:
    if not sound:
        return "damaged"
    return "ready" if current else "of other versions"


@cache_app.command("export")
def export_cache(file: Annotated[Path, typer.Argument(help="The file to write: graphs.tar.gz.")]) -> None:
    """Write all that is kept into one file, for another machine of the same kind."""
    from anyaccel.runtime.speed.compile_cache import export_entries, list_entries

    if file.is_dir():
        raise UsageError(f"{file} is a folder", hint=f"name the file to write: {file / 'graphs.tar.gz'}")
    entries = [entry for entry in list_entries() if not entry.fault]
    if not entries:
        raise UsageError("nothing is kept that could be exported", hint="anyaccel warm MODEL --size 512x512 fills it")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", hint="make it first")
    print(f"{_count(export_entries(file, entries))} in {file}")


@cache_app.command("import")
def import_cache(file: Annotated[Path, typer.Argument(help="A file that `anyaccel cache export` wrote.")]) -> None:
    """Take in what another machine compiled. It is code that will run: take it from machines that you trust alone."""
    from anyaccel.runtime.speed.compile_cache import find_folder, import_entries

    if not file.is_file():
        raise UsageError(f"there is no file {file}", hint="give a file that `anyaccel cache export` wrote")
    refuse_unwritable(find_folder())
    taken, here, refused = import_entries(file)
    for words in refused:
        print(f"left out: {words}")
    if not taken and not here:
        raise UsageError(f"nothing of {file} was taken in", hint="export it again with `anyaccel cache export`")
    print(f"{_count(taken)} taken in{f', {here} here already' if here else ''}")


def _count(entries: int) -> str:
    return "1 entry" if entries == 1 else f"{entries} entries"


def refuse_unwritable(folder: Path) -> None:
    """Raise if nothing can be kept."""
    from anyaccel.storage.cache_dir import CACHE_VARIABLE, find_write_fault

    fault = find_write_fault(folder)
    if fault:
        raise UsageError(f"nothing can be kept: {fault}", hint=f"set {CACHE_VARIABLE} to a folder that can be written")


@cache_app.command("prune")
def prune_cache(
    older: Annotated[
        float | None, typer.Option("--older", metavar="DAYS", help="Also what is older than that.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all, and what compilers keep themselves.")] = False,
) -> None:
    """Remove what is damaged or of other versions than are installed."""
    from anyaccel.runtime.speed.compile_cache import prune_entries, remove_graphs
    from anyaccel.runtime.speed.compile_cache_key import find_versions
    from anyaccel.units import readable

    if older is not None and not older >= 0:  # nan is none either
        raise UsageError(f"an age is a number of days from 0 up, not {older:g}", hint="--older 30")
    removed, freed_bytes, foreign = (
        prune_entries() if everything else prune_entries(older_than_days=older, versions=find_versions())
    )
    graphs, others = remove_graphs() if everything else (0, [])
    for path in (*foreign, *others):
        print(f"left alone, since anyaccel did not write it: {path}")
    print(f"{removed} removed, {readable(freed_bytes)}")
    if graphs:
        print(f"what compilers kept themselves removed, {readable(graphs)}")
