"""The compile cache: keys, damaged entries, export and import, pruning."""

import io
import os
import re
import shutil
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

import anyaccel
from anyaccel.backends.registry import load_registry
from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.recipes import recipes
from anyaccel.runtime.placement_state import Placement, find_placement
from anyaccel.runtime.speed import compile_cache, compile_cache_key
from anyaccel.runtime.speed.apply_speedups import SpeedState, load_compiled, save_compiled
from anyaccel.runtime.speed.compile import compile_cache_env
from anyaccel.runtime.speed.compile_cache_key import make_cache_key
from tests.conftest import NEEDS_RECIPES

KEY = {"model": "M", "shape": "512 x 512", "torch": "2.13"}
NAME = "a" * 32 + ".compiled"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_entries_are_found_only_by_their_key() -> None:
    assert compile_cache.load_payload(KEY) is None
    assert compile_cache.save_payload(KEY, b"graph", 12.0)
    assert compile_cache.load_payload(KEY) == b"graph"
    assert compile_cache.load_payload({**KEY, "torch": "2.14"}) is None
    [entry] = compile_cache.list_entries()
    assert (entry.key, entry.payload_bytes, entry.took_s) == (KEY, 5, 12.0)


def damage(path: Path, kind: str) -> None:
    """Damage the file of an entry."""
    content = path.read_bytes()
    magic, _, payload = content.split(b"\n", 2)
    path.write_bytes(
        {
            "payload": content.replace(b"graph", b"grapf"),
            "header": b"\n".join([magic, b"{", payload]),
            "other key": content.replace(b'"model": "M"', b'"model": "N"'),
            "cut off": content[:-1],
            "empty": b"",
        }[kind]
    )
    assert path.read_bytes() != content


@pytest.mark.parametrize("kind", ["payload", "header", "other key", "cut off", "empty"])
def test_damaged_entries_are_logged_and_replaced(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    compile_cache.save_payload(KEY, b"graph", 1.0)
    damage(compile_cache.find_path(KEY), kind)
    assert compile_cache.load_payload(KEY) is None
    assert "corrupted" in caplog.text
    assert not compile_cache.find_path(KEY).exists()
    assert compile_cache.save_payload(KEY, b"graph", 1.0)
    assert compile_cache.load_payload(KEY) == b"graph"


def test_a_payload_may_be_empty_or_look_like_an_entry() -> None:
    for payload in (b"", b"\n", b"\n\n{}"):
        compile_cache.save_payload(KEY, payload, 1.0)
        assert compile_cache.load_payload(KEY) == payload
    whole = compile_cache.find_path(KEY).read_bytes()
    compile_cache.save_payload(KEY, whole, 1.0)
    assert compile_cache.load_payload(KEY) == whole


def test_concurrent_writes_leave_one_valid_entry() -> None:
    threads = [threading.Thread(target=compile_cache.save_payload, args=(KEY, b"x" * 10**6, 1.0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compile_cache.load_payload(KEY) == b"x" * 10**6
    assert [path.name for path in compile_cache.find_entries_dir().iterdir()] == [compile_cache.find_path(KEY).name]


def test_unwritable_directory_disables_the_cache(own_cache: Path) -> None:
    (own_cache / "cache").write_text("a file instead of a directory")
    assert not compile_cache.save_payload(KEY, b"graph", 1.0)
    assert compile_cache.load_payload(KEY) is None
    assert compile_cache.list_entries() == []


def test_exported_entries_can_be_imported(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_cache.save_payload(KEY, b"graph", 3.0)
    compile_cache.save_payload({**KEY, "shape": "768 x 768"}, b"other", 4.0)
    file = own_cache / "export.tar.gz"
    assert compile_cache.export_entries(file, compile_cache.list_entries()) == 2
    monkeypatch.setenv("ANYACCEL_CACHE", str(own_cache / "elsewhere"))
    assert compile_cache.import_entries(file) == (2, 0, [])
    assert compile_cache.load_payload(KEY) == b"graph"
    assert compile_cache.import_entries(file) == (0, 2, [])


def test_import_replaces_damaged_entries(own_cache: Path) -> None:
    compile_cache.save_payload(KEY, b"graph", 3.0)
    file = own_cache / "export.tar.gz"
    compile_cache.export_entries(file, compile_cache.list_entries())
    for kind in ("payload", "header", "empty"):
        damage(compile_cache.find_path(KEY), kind)
        assert compile_cache.import_entries(file) == (1, 0, [])
        assert compile_cache.load_payload(KEY) == b"graph"


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", [f"../{NAME}", f"/etc/{NAME}", f"a/{NAME}", "evil.sh", f"{NAME}.sh", f"{NAME}\n"])
def test_archives_with_unsafe_paths_are_rejected(own_cache: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid cache archive"):
        compile_cache.import_entries(write_archive(own_cache / "evil.tar.gz", {name: b"x"}))
    (own_cache / "text").write_text("not an archive")
    with pytest.raises(UsageError, match="is not a valid cache archive"):
        compile_cache.import_entries(own_cache / "text")


def test_imported_entries_are_verified(own_cache: Path) -> None:
    path = compile_cache.find_path(KEY)
    compile_cache.save_payload(KEY, b"graph", 1.0)
    content = path.read_bytes()
    path.unlink()
    wrong = write_archive(own_cache / "a.tar.gz", {path.name: content.replace(b"graph", b"grapf")})
    assert compile_cache.import_entries(wrong) == (0, 0, [f"{path.stem}: wrong checksum"])
    renamed = write_archive(own_cache / "b.tar.gz", {NAME: content})
    assert compile_cache.import_entries(renamed) == (0, 0, ["a" * 32 + ": the file name does not match the key"])
    half = write_archive(own_cache / "c.tar.gz", {path.name: content[:40]})
    assert compile_cache.import_entries(half) == (0, 0, [f"{path.stem}: invalid header"])
    other = write_archive(own_cache / "d.tar.gz", {path.name: content[1:]})
    assert compile_cache.import_entries(other) == (0, 0, [f"{path.stem}: invalid header"])
    whole = write_archive(own_cache / "e.tar.gz", {path.name: content})
    assert compile_cache.import_entries(whole) == (1, 0, [])
    assert compile_cache.load_payload(KEY) == b"graph"


WRONG_NUMBERS = ["1" + "0" * 400, "NaN", "Infinity", "1e300", "-1e18", '"12"', "true", "null", "[1]"]


@pytest.mark.parametrize("field", ["created", "took_s"])
@pytest.mark.parametrize("number", WRONG_NUMBERS, ids=[number[:9] for number in WRONG_NUMBERS])
def test_entries_with_invalid_numbers_are_damaged(own_cache: Path, field: str, number: str) -> None:
    path, other = compile_cache.find_path(KEY), {**KEY, "shape": "other"}
    compile_cache.save_payload(KEY, b"graph", 1.0)
    compile_cache.save_payload(other, b"other", 1.0)
    content = re.sub(rf'("{field}": )[0-9.]+'.encode(), lambda match: match[1] + number.encode(), path.read_bytes())
    path.unlink()
    file = write_archive(own_cache / "a.tar.gz", {path.name: content})
    assert compile_cache.import_entries(file) == (0, 0, [f"{path.stem}: invalid header"])
    path.write_bytes(content)
    states = {entry.name: (bool(entry.key), bool(entry.fault)) for entry in compile_cache.list_entries()}
    assert states == {path.stem: (False, True), compile_cache.find_path(other).stem: (True, False)}
    assert compile_cache.prune_entries(versions={})[0] == 1
    assert [entry.key["shape"] for entry in compile_cache.list_entries()] == ["other"]


def test_damaged_entries_are_listed_with_their_size() -> None:
    compile_cache.save_payload(KEY, b"graph", 1.0)
    path = compile_cache.find_path(KEY)
    damage(path, "header")
    [entry] = compile_cache.list_entries()
    assert (entry.name, entry.key, entry.payload_bytes) == (path.stem, {}, path.stat().st_size)
    assert entry.fault


@pytest.mark.parametrize("remove_all", [True, False])
def test_prune_keeps_foreign_files(own_cache: Path, remove_all: bool) -> None:
    compile_cache.save_payload({**KEY, "torch": "2.0"}, b"graph", 1.0)
    root = compile_cache.find_entries_dir()
    (root / "README.txt").write_text("mine")
    (root / NAME).write_text("mine")
    foreign = [root / "myfolder" / "x", root / ("a" * 32) / "x", own_cache / "target"]
    for folder in foreign:
        folder.mkdir(parents=True)
        (folder / "precious").write_text("mine")
    link = root / ("b" * 32)
    link.symlink_to(own_cache / "target")
    for removed in (1, 0):
        count, _, left = compile_cache.prune_entries(versions=None if remove_all else {"torch": "2.13"})
        assert count == removed
        assert set(left) == {str(root / name) for name in ("README.txt", NAME, "myfolder", "a" * 32, link.name)}
    assert all((folder / "precious").read_text() == "mine" for folder in foreign)
    assert (root / "README.txt").read_text() == (root / NAME).read_text() == "mine"
    assert link.is_symlink()


@pytest.mark.parametrize("remove_all", [True, False])
def test_entries_of_version_0_1_are_not_loaded_and_are_pruned(remove_all: bool) -> None:
    root = compile_cache.find_entries_dir()
    folders = [root / ("c" * 32), root / ".making-x"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "entry.json").write_text('{"key": {}}')
        (folder / "payload.bin").write_text("graph")
    mixed = root / ("d" * 32)
    mixed.mkdir()
    (mixed / "payload.bin").mkdir()
    (mixed / "payload.bin" / "precious").write_text("mine")
    assert compile_cache.list_entries() == []
    assert compile_cache.prune_entries(versions=None if remove_all else {}) == (2, 32, [])
    assert [path.name for path in root.iterdir()] == [mixed.name]
    assert (mixed / "payload.bin" / "precious").read_text() == "mine"


def test_directory_named_like_an_entry_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    folder = compile_cache.find_path(KEY)
    folder.mkdir(parents=True)
    (folder / "precious").write_text("mine")
    assert compile_cache.load_payload(KEY) is None
    assert not compile_cache.save_payload(KEY, b"graph", 1.0)
    assert "cannot write" in caplog.text
    assert (folder / "precious").read_text() == "mine"


def test_temporary_files_are_pruned_after_a_day() -> None:
    compile_cache.save_payload(KEY, b"graph", 1.0)
    new, old = (compile_cache.find_entries_dir() / f".anyaccel-{letter * 16}.tmp" for letter in "ab")
    for path in (new, old):
        path.write_bytes(b"half")
    os.utime(old, (1e9, 1e9))
    assert compile_cache.prune_entries(versions={}) == (1, 4, [])
    assert new.is_file()
    assert compile_cache.prune_entries()[0] == 2


def test_compiler_caches_are_measured_and_removed(own_cache: Path) -> None:
    name = load_registry().names()[0]
    for folder in (own_cache / "cache" / "graphs" / name / "deep", own_cache / "cache" / "graphs" / "of the user"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"12345")
    assert compile_cache.measure_graphs() == 5
    foreign = str(own_cache / "cache" / "graphs" / "of the user")
    assert compile_cache.remove_graphs() == (5, [foreign])
    assert (Path(foreign) / "file").is_file()
    assert compile_cache.remove_graphs() == (0, [foreign])
    shutil.rmtree(foreign)
    assert compile_cache.remove_graphs() == (0, [])
    assert not (own_cache / "cache" / "graphs").exists()


def test_prune_removes_stale_damaged_and_old_entries() -> None:
    compile_cache.save_payload(KEY, b"graph", 1.0)
    compile_cache.save_payload({**KEY, "torch": "2.0"}, b"old torch", 1.0)
    compile_cache.save_payload({**KEY, "shape": "damaged"}, b"damaged", 1.0)
    damage(compile_cache.find_path({**KEY, "shape": "damaged"}), "cut off")
    count, _, _ = compile_cache.prune_entries(versions={"torch": "2.13"})
    assert count == 2
    assert [entry.key for entry in compile_cache.list_entries()] == [KEY]
    assert compile_cache.prune_entries(older_than_days=1, versions={})[0] == 0
    count, freed, _ = compile_cache.prune_entries()
    assert count == 1
    assert 5 + 55 <= freed <= 5 + 350, "the payload and the header"
    assert compile_cache.list_entries() == []


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Placement]:
    """A pipeline marked as compiled; nothing is compiled before its first call."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as Inductor sets it
    pipe: Any = anyaccel.place(recipes()["flux"].make(), "cpu", compile=True)
    placement = find_placement(pipe)
    assert placement is not None
    placement.speed = SpeedState(compiled=True)
    placement.report.compiled_models = Decision(("transformer",), "for this test")
    return pipe, placement


@NEEDS_RECIPES
@pytest.mark.parametrize("payload", [b"", b"garbage" * 9])
def test_unloadable_payloads_are_logged_and_replaced(
    placed: tuple[Any, Placement], payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, placement = placed
    key = make_cache_key(pipe, placement, "16 × 16")
    compile_cache.save_payload(key, payload, 1.0)
    speed = SpeedState(compiled=True)
    assert load_compiled(pipe, placement, speed, "16 × 16") == key
    assert not speed.cache_outcomes.total()
    assert compile_cache.list_entries() == []
    assert [record.name for record in caplog.records] == ["anyaccel"], (
        "only anyaccel may log, without a traceback from torch"
    )
    assert "cannot load" in caplog.text


@NEEDS_RECIPES
def test_the_key_covers_code_options_and_versions(
    placed: tuple[Any, Placement], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe, placement = placed
    before = make_cache_key(pipe, placement, "16 × 16")
    assert make_cache_key(pipe, placement, "16 × 16") == before
    assert {"python", "torch", "triton", "diffusers", "anyaccel", "device", "code"} <= set(before)
    for folder in ("runtime/speed", "runtime/workarounds"):
        shutil.copytree(Path(anyaccel.__file__).parent / folder, tmp_path / folder)
    monkeypatch.setattr(compile_cache_key, "__file__", str(tmp_path / "runtime/speed/compile_cache_key.py"))
    copied = make_cache_key(pipe, placement, "16 × 16")["code"]
    fusions = tmp_path / "runtime/speed/graph_fusions.py"
    fusions.write_text(fusions.read_text().replace("1e-5", "1e-6"))
    assert make_cache_key(pipe, placement, "16 × 16")["code"] != copied
    monkeypatch.undo()
    source = tmp_path / "layers.py"
    for content in ("eps = 1", "eps = 2"):
        source.write_text(content)
        monkeypatch.setattr("diffusers.models.transformers.transformer_flux.__file__", str(source))
        key = make_cache_key(pipe, placement, "16 × 16")
        assert key["code"] != before["code"]
        before = key


@NEEDS_RECIPES
def test_cache_outcomes_are_counted(placed: tuple[Any, Placement]) -> None:
    from torch._inductor.runtime import autotune_cache  # noqa: F401 - registers the type of artifact
    from torch.compiler._cache import CacheArtifactManager

    pipe, placement = placed
    speed = SpeedState(compiled=True)
    with CacheArtifactManager.with_fresh_cache():
        key = load_compiled(pipe, placement, speed, "16 × 16")
        assert key is not None
        save_compiled(speed, key, 1.0)
        assert (dict(speed.cache_outcomes), compile_cache.list_entries()) == ({"not handed out": 1}, [])
        CacheArtifactManager.record_artifact("autotune", "fabc.best_config", {"block": 8})
        save_compiled(speed, key, 1.0)
        assert load_compiled(pipe, placement, speed, "16 × 16") is None
    assert speed.cache_outcomes == {"not handed out": 1, "written": 1, "loaded": 1}


@NEEDS_RECIPES
def test_unwritable_directory_falls_back_to_the_compilers_default(
    placed: tuple[Any, Placement], own_cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, placement = placed
    variable = placement.plan.compiler.value.cache_variable
    before = os.environ[variable]
    with compile_cache_env(placement):
        assert os.environ[variable].startswith(str(own_cache / "cache" / "graphs"))
    (own_cache / "file").write_text("a file instead of a directory")
    monkeypatch.setenv("ANYACCEL_CACHE", str(own_cache / "file"))
    key = load_compiled(pipe, placement, SpeedState(compiled=True), "16 × 16")
    assert key is not None
    for _ in range(2):
        with compile_cache_env(placement):
            assert os.environ[variable] == before
        assert not compile_cache.save_payload(key, b"graph", 1.0)
    [record] = caplog.records
    assert f"{own_cache / 'file'} is not a folder" in record.message
    assert "ANYACCEL_CACHE" in record.message
