"""What was compiled is kept: found by its key, refused if damaged, passed on to other machines, and pruned."""

import io
import json
import tarfile
import threading
from pathlib import Path

import pytest

from anyaccel.errors import UsageError
from anyaccel.runtime import artefacts

KEY = {"model": "M", "shape": "512 x 512", "torch": "2.13"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_what_is_kept_is_found_by_its_key_alone() -> None:
    assert artefacts.load_payload(KEY) is None
    assert artefacts.save_payload(KEY, b"graph", 12.0)
    assert artefacts.load_payload(KEY) == b"graph"
    assert artefacts.load_payload({**KEY, "torch": "2.14"}) is None
    [entry] = artefacts.list_entries()
    assert (entry.key, entry.payload_bytes, entry.took_s) == (KEY, 5, 12.0)


@pytest.mark.parametrize("damage", ["payload", "about", "other key", "empty"])
def test_a_damaged_entry_is_said_so_and_made_anew(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    artefacts.save_payload(KEY, b"graph", 1.0)
    folder = artefacts.list_entries()[0].folder
    if damage == "payload":
        (folder / "payload.bin").write_bytes(b"grapf")
    elif damage == "about":
        (folder / "entry.json").write_text("{")
    elif damage == "other key":
        about = json.loads((folder / "entry.json").read_text())
        (folder / "entry.json").write_text(json.dumps({**about, "key": {"model": "another"}}))
    else:
        (folder / "payload.bin").unlink()
    assert artefacts.load_payload(KEY) is None
    assert "damaged" in caplog.text
    assert artefacts.save_payload(KEY, b"graph", 1.0)
    assert artefacts.load_payload(KEY) == b"graph"


def test_two_at_once_leave_one_whole_entry() -> None:
    threads = [threading.Thread(target=artefacts.save_payload, args=(KEY, b"x" * 10**6, 1.0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert artefacts.load_payload(KEY) == b"x" * 10**6
    assert [path.name for path in artefacts.find_folder().iterdir()] == [artefacts.name_key(KEY)]


def test_a_folder_that_cannot_be_written_costs_the_cache_alone(own_cache: Path) -> None:
    (own_cache / "cache").write_text("a file where the folder would be")
    assert not artefacts.save_payload(KEY, b"graph", 1.0)
    assert artefacts.load_payload(KEY) is None
    assert artefacts.list_entries() == []


def test_one_machine_makes_it_and_another_starts_with_it(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artefacts.save_payload(KEY, b"graph", 3.0)
    artefacts.save_payload({**KEY, "shape": "768 x 768"}, b"other", 4.0)
    file = own_cache / "export.tar.gz"
    assert artefacts.export_entries(file, artefacts.list_entries()) == 2
    monkeypatch.setenv("ANYACCEL_CACHE", str(own_cache / "elsewhere"))
    assert artefacts.import_entries(file) == (2, [])
    assert artefacts.load_payload(KEY) == b"graph"
    taken, refused = artefacts.import_entries(file)
    assert taken == 0
    assert all("here already" in words for words in refused)


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["../entry.json", "/etc/passwd", "a/b/entry.json", "a/evil.sh"])
def test_paths_that_lead_elsewhere_are_refused(own_cache: Path, name: str) -> None:
    with pytest.raises(UsageError, match="holds no entries"):
        artefacts.import_entries(write_archive(own_cache / "evil.tar.gz", {name: b"x"}))
    (own_cache / "text").write_text("no archive")
    with pytest.raises(UsageError, match="holds no entries"):
        artefacts.import_entries(own_cache / "text")


def test_imported_entries_are_held_against_their_key_and_checksum(own_cache: Path) -> None:
    name = artefacts.name_key(KEY)
    about = json.dumps({"key": KEY, "sha256": "0" * 64, "made": 0, "took_s": 1}).encode()
    wrong = write_archive(own_cache / "a.tar.gz", {f"{name}/entry.json": about, f"{name}/payload.bin": b"graph"})
    assert artefacts.import_entries(wrong) == (0, [f"{name}: its checksum is wrong"])
    other = "a" * 32
    renamed = write_archive(own_cache / "b.tar.gz", {f"{other}/entry.json": about, f"{other}/payload.bin": b"graph"})
    assert artefacts.import_entries(renamed) == (0, [f"{other}: its name is not that of its key"])
    half = write_archive(own_cache / "c.tar.gz", {f"{name}/entry.json": about})
    assert artefacts.import_entries(half) == (0, [f"{name}: a part is missing"])


def test_pruning_takes_what_is_stale_damaged_or_old() -> None:
    artefacts.save_payload(KEY, b"graph", 1.0)
    artefacts.save_payload({**KEY, "torch": "2.0"}, b"old torch", 1.0)
    artefacts.save_payload({**KEY, "shape": "damaged"}, b"damaged", 1.0)
    damaged = next(entry for entry in artefacts.list_entries() if entry.key["shape"] == "damaged")
    (damaged.folder / "payload.bin").write_bytes(b"")
    count, _ = artefacts.prune_entries(versions={"torch": "2.13"})
    assert count == 2
    assert [entry.key for entry in artefacts.list_entries()] == [KEY]
    assert artefacts.prune_entries(older_than_days=1, versions={})[0] == 0
    count, freed = artefacts.prune_entries()
    assert count == 1
    assert 5 + 55 <= freed <= 5 + 350, "the payload, and the small file beside it"
    assert artefacts.list_entries() == []
