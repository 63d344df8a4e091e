"""Tests for the rows and the output folder of a batch."""

import hashlib
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from anyaccel.cluster.batch.manifest import OutputFolder
from anyaccel.cluster.batch.rows import BatchRow, check_parameters, read_rows
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.generation.image_format import encode_image
from anyaccel.generation.metadata import MediaMetadata
from anyaccel.processes.forked_call import call_in_fork

RUN = {"input": "abc", "model": "embedded"}


def row(number: int = 1, **call: Any) -> BatchRow:
    return BatchRow(number=number, prompt="a red apple", seed=7, call=call)


def image_content(**changes: Any) -> bytes:
    facts: dict[str, Any] = {
        "model": "embedded", "revision": None, "pipeline": "StableDiffusionPipeline", "prompt": "a red apple",
        "seed": 7, "width": 8, "height": 8, "dtype": "float32", "device": "cpu:0", "virtual": False, "steps": 2,
    }  # fmt: skip
    return encode_image(Image.new("RGB", (8, 8)), ".png", [MediaMetadata(**{**facts, **changes})])


def test_a_row_has_a_prompt_a_seed_and_arguments_of_the_call(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"prompt": "a cat", "seed": 3, "width": 64}\n\n{"prompt": "a dog"}\r\n', encoding="utf-8")
    first, second = read_rows(str(path))[0]
    assert (first.number, first.prompt, first.seed, first.call) == (1, "a cat", 3, {"width": 64})
    assert (second.number, second.prompt) == (3, "a dog")
    assert read_rows(str(path))[0][1].seed == second.seed, "a derived seed is the same when the file is read again"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "prompt is missing"),
        (b'{"prompt": 3}', "prompt must be a string, not 3"),
        (b'{"prompt": "x", "seed": -1}', "an integer from 0 to"),
        (b'{"prompt": "x", "seed": true}', "an integer from 0 to"),
        (b'{"prompt": "x", "seed": 1.5}', "an integer from 0 to"),
        (b'{"prompt": "x", "guidance_scale": NaN}', "NaN is not a valid JSON number"),
        (b'{"prompt": "x", "guidance_scale": 1e999}', "guidance_scale is too large for a float"),
        (b'{"prompt": "x", "width": 0}', "an integer from 1 to 16384"),
        (b'{"prompt": "x", "width": "64"}', "an integer from 1 to 16384"),
        (b'{"prompt": "x", "generator": 1}', "set seed instead"),
        (b'{"prompt": "x", "num_images_per_prompt": 4}', "write one row per image"),
        (b'{"prompt": "\\ud800"}', "contains an unpaired surrogate"),
        (b'{"prompt": "x", "negative_prompt": ["\\ud800"]}', "contains an unpaired surrogate"),
        (b'{"prompt": "x", "\\ud800": 1}', "contains an unpaired surrogate"),
        (b'{"prompt": "x", "sigmas": [1e999]}', "sigmas is too large for a float"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_the_error_for_an_invalid_row_has_its_line_number(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a cat"}\n' + line + b"\n")
    with pytest.raises(UsageError, match=f"(?s)line 2: .*{message}"):
        read_rows(str(path))


def test_paths_are_relative_to_the_input_file(tmp_path: Path) -> None:
    for name in ("in.png", "mask.png", "style.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    lines = [
        {
            "prompt": "a cat",
            "image": ["in.png", "in.png"],
            "mask": "mask.png",
            "lora": ["style.safetensors:0.5", "a/b:1"],
        },
        {"image": str(tmp_path / "in.png"), "frames": 5, "scheduler": "euler"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_rows(str(path))[0]
    image = str(tmp_path / "in.png")
    assert first.call == {"image": [image, image], "mask_image": str(tmp_path / "mask.png")}
    assert first.additions == {"lora": [f"{tmp_path / 'style.safetensors'}:0.5", "a/b:1"]}
    assert (second.prompt, second.call, second.additions) == ("", {"image": image, "frames": 5}, {"scheduler": "euler"})
    assert first.shape != second.shape
    for line, message in (
        ({"prompt": "x", "image": "none.png"}, r"line 1: the file none\.png of image does not exist"),
        ({"prompt": "x", "frames": 0}, "number of frames must be an integer from 1"),
        ({"prompt": "x", "num_videos_per_prompt": 2}, "one row per video"),
    ):
        path.write_text(json.dumps(line))
        with pytest.raises(UsageError, match=message):
            read_rows(str(path))


def test_a_missing_or_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_rows(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UsageError, match="contains no rows"):
        read_rows(str(tmp_path / "empty.jsonl"))


def test_an_unknown_argument_is_reported_with_the_nearest_name() -> None:
    check_parameters([row(width=8)], ["prompt", "width"], "SomePipeline")
    with pytest.raises(UsageError, match=r"(?s)line 4: unknown argument 'widht' for SomePipeline.*line 5") as raised:
        check_parameters([row(), row(4, widht=8), row(5, foo=1)], ["prompt", "width"], "SomePipeline")
    assert "did you mean width?" in raised.value.hint


def test_finished_rows_are_not_generated_again(tmp_path: Path) -> None:
    rows = [row(1), row(2), row(3)]
    with OutputFolder(tmp_path / "out", RUN) as folder:
        assert folder.find_unfinished(rows) == rows
        folder.add_image(rows[0], image_content(), {"seconds": 1.0})
        folder.add_failure(rows[1], "it broke", {})
    with OutputFolder(tmp_path / "out", RUN) as folder:
        assert folder.find_unfinished(rows) == rows[1:], "failed rows are retried"
        line = folder.entries[1]
        assert (line["seed"], line["path"]) == (7, "images/000001-a-red-apple-7.png")
    (tmp_path / "out" / line["path"]).write_bytes(b"other")
    with OutputFolder(tmp_path / "out", RUN) as folder:
        assert folder.find_unfinished(rows) == rows, "a modified image is generated again"


def test_a_folder_of_version_0_1_continues_with_its_folder_of_pictures(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, **RUN}))
    first, second = row(1), row(2)
    content = image_content()
    (tmp_path / "pictures" / "000001-a-red-apple-7.png").write_bytes(content)
    line = {"row": 1, "prompt": first.prompt, "seed": first.seed, "path": "pictures/000001-a-red-apple-7.png"}
    line["sha256"] = hashlib.sha256(content).hexdigest()
    (tmp_path / "manifest.jsonl").write_text(json.dumps(line) + "\n")
    with OutputFolder(tmp_path, RUN) as folder:
        assert folder.find_unfinished([first, second]) == [second]
        folder.add_image(second, content, {})
        assert folder.entries[2]["path"] == "pictures/000002-a-red-apple-7.png"
    assert not (tmp_path / "images").exists()


def test_an_empty_folder_of_pictures_without_a_run_can_be_used(tmp_path: Path) -> None:
    """Version 0.1 left such a folder when the disk was full."""
    (tmp_path / "pictures").mkdir()
    with OutputFolder(tmp_path, RUN) as folder:
        folder.add_image(row(1), image_content(), {})
        assert folder.entries[1]["path"] == "pictures/000001-a-red-apple-7.png"


def test_an_image_without_a_manifest_line_is_recognized_by_its_metadata(tmp_path: Path) -> None:
    first = row(1, num_inference_steps=2)
    with OutputFolder(tmp_path, RUN) as folder:
        folder.image_path(first).write_bytes(image_content())
        assert folder.find_unfinished([first]) == []
        assert folder.entries[1]["device"] == "cpu:0"
        other = row(2, num_inference_steps=2)
        folder.image_path(other).write_bytes(image_content(seed=8))
        assert folder.find_unfinished([other]) == [other], "the metadata has another seed"
        folder.image_path(other).write_bytes(image_content()[:200])
        assert folder.find_unfinished([other]) == [other], "the file is truncated"
        folder.image_path(other).write_bytes(image_content(weights="int8"))
        assert folder.find_unfinished([other]) == [other], "the weights were quantized"
        folder.record_once("revision", "another")
        third = row(3, num_inference_steps=2)
        folder.image_path(third).write_bytes(image_content())
        assert folder.find_unfinished([third]) == [third], "the metadata has another revision of the model"


def test_an_incomplete_last_line_of_the_manifest_is_truncated(tmp_path: Path) -> None:
    with OutputFolder(tmp_path, RUN) as folder:
        folder.add_image(row(1), image_content(), {})
    manifest = tmp_path / "manifest.jsonl"
    complete = manifest.read_bytes()
    manifest.write_bytes(complete + complete[:20])
    with OutputFolder(tmp_path, RUN) as folder:
        assert list(folder.entries) == [1]
        folder.add_failure(row(2), "it broke", {})
    assert [json.loads(line)["row"] for line in manifest.read_text().splitlines()] == [1, 2]


def test_a_folder_with_other_content_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(UsageError, match=r"has no run\.json from an earlier batch: it contains thesis\.txt"):
        OutputFolder(tmp_path, RUN)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(UsageError, match="is a file"):
        OutputFolder(tmp_path / "thesis.txt", RUN)


def test_an_unused_folder_can_be_used_by_another_run(tmp_path: Path) -> None:
    with OutputFolder(tmp_path, RUN) as folder:
        assert folder.entries == {}
    with OutputFolder(tmp_path, {**RUN, "input": "xyz"}) as folder:
        folder.image_path(row(1)).write_bytes(image_content())
    with pytest.raises(UsageError, match="belongs to a different run"):
        OutputFolder(tmp_path, RUN)


def test_a_folder_of_another_run_is_rejected(tmp_path: Path) -> None:
    with OutputFolder(tmp_path, RUN) as folder:
        folder.record_once("dtype", "float32")
        with pytest.raises(UsageError, match="another process is writing to"):
            OutputFolder(tmp_path, RUN)
        folder.add_failure(row(1), "it broke", {})
    with pytest.raises(UsageError, match="belongs to a different run: the input is different"):
        OutputFolder(tmp_path, {**RUN, "input": "xyz"})
    with OutputFolder(tmp_path, RUN) as folder:
        assert folder.record_once("dtype", "bfloat16") == "float32", "the first value is kept"
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match="is not a JSON object"):
        OutputFolder(tmp_path, RUN)
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, **RUN}))
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes() + b"nonsense\n")
    with pytest.raises(UsageError, match=r"line 2 of .* is not a manifest entry"):
        OutputFolder(tmp_path, RUN)


def test_a_manifest_line_with_an_invalid_path_has_no_image(tmp_path: Path) -> None:
    with OutputFolder(tmp_path, RUN) as folder:
        for path in (5, "a\0b", "missing.png"):
            folder.entries[1] = {"row": 1, "path": path}
            assert folder.find_unfinished([row(1)]) == [row(1)]


def test_a_retried_row_has_one_line_after_compaction(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.jsonl"
    with OutputFolder(tmp_path, RUN) as folder:
        folder.add_failure(row(1), "it broke", {})
        folder.add_image(row(2), image_content(), {})
        before = manifest.read_bytes()
        folder.compact()
        assert manifest.read_bytes() == before, "there was nothing to compact"
        folder.add_image(row(1), image_content(), {})
        folder.compact()
        folder.add_failure(row(3), "it broke", {})
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    assert [(line["row"], "error" in line) for line in lines] == [(1, False), (2, False), (3, True)]


def test_a_full_disk_is_reported_and_the_folder_can_be_used_again(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fill() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(AnyaccelError, match=r"cannot write .*run\.json") as raised:
            OutputFolder(out, RUN)
        return raised.value.hint

    assert "free disk space, then run the same command again" in call_in_fork(fill)
    assert sorted(path.name for path in out.iterdir()) == [".lock", "images"]

    def fill_later() -> str:
        try:
            with OutputFolder(out, RUN) as folder:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
                folder.add_failure(row(1), "it broke", {})
        except AnyaccelError as error:
            return error.message
        return ""

    assert f"cannot write {out / 'manifest.jsonl'}" in call_in_fork(fill_later), "not the error from closing the file"
    with OutputFolder(out, RUN) as folder:
        assert folder.find_unfinished([row(1)]) == [row(1)]
