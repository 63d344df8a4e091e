"""The rows of a batch, and the folder that it writes."""

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
from anyaccel.generation.metadata import ImageMetadata
from anyaccel.processes.forked_call import call_in_fork

RUN = {"input": "abc", "model": "embedded"}


def row(number: int = 1, **call: Any) -> BatchRow:
    return BatchRow(number=number, prompt="a red apple", seed=7, call=call)


def picture(**changes: Any) -> bytes:
    facts: dict[str, Any] = {
        "model": "embedded", "revision": None, "pipeline": "StableDiffusionPipeline", "prompt": "a red apple",
        "seed": 7, "width": 8, "height": 8, "dtype": "float32", "device": "cpu:0", "virtual": False, "steps": 2,
    }  # fmt: skip
    return encode_image(Image.new("RGB", (8, 8)), ".png", [ImageMetadata(**{**facts, **changes})])


def test_rows_have_a_prompt_a_seed_and_whatever_the_call_takes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"prompt": "a cat", "seed": 3, "width": 64}\n\n{"prompt": "a dog"}\r\n', encoding="utf-8")
    first, second = read_rows(str(path))[0]
    assert (first.number, first.prompt, first.seed, first.call) == (1, "a cat", 3, {"width": 64})
    assert (second.number, second.prompt) == (3, "a dog")
    assert read_rows(str(path))[0][1].seed == second.seed, "a seed that nobody chose is the same at the next start"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "no JSON"),
        (b"[1]", "no object"),
        (b"{}", "no prompt"),
        (b'{"prompt": 3}', "a text, not 3"),
        (b'{"prompt": "x", "seed": -1}', "an integer from 0 to"),
        (b'{"prompt": "x", "seed": true}', "an integer from 0 to"),
        (b'{"prompt": "x", "seed": 1.5}', "an integer from 0 to"),
        (b'{"prompt": "x", "guidance_scale": NaN}', "NaN is no number"),
        (b'{"prompt": "x", "guidance_scale": 1e999}', "larger than any number"),
        (b'{"prompt": "x", "width": 0}', "an integer from 1 to 16384"),
        (b'{"prompt": "x", "width": "64"}', "an integer from 1 to 16384"),
        (b'{"prompt": "x", "generator": 1}', "give the row a seed"),
        (b'{"prompt": "x", "num_images_per_prompt": 4}', "write the row as often"),
        (b'{"prompt": "\\ud800"}', "half characters"),
        (b'{"prompt": "x", "negative_prompt": ["\\ud800"]}', "half characters"),
        (b'{"prompt": "x", "\\ud800": 1}', "half characters"),
        (b'{"prompt": "x", "sigmas": [1e999]}', "sigmas is larger than any number"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_by_its_line(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a cat"}\n' + line + b"\n")
    with pytest.raises(UsageError, match=f"(?s)line 2: .*{words}"):
        read_rows(str(path))


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_rows(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UsageError, match="has no row"):
        read_rows(str(tmp_path / "empty.jsonl"))


def test_an_unknown_parameter_is_named_with_the_nearest_one() -> None:
    check_parameters([row(width=8)], ["prompt", "width"], "SomePipeline")
    with pytest.raises(UsageError, match=r"(?s)line 4: SomePipeline takes no widht.*line 5") as raised:
        check_parameters([row(), row(4, widht=8), row(5, foo=1)], ["prompt", "width"], "SomePipeline")
    assert "did you mean width?" in raised.value.hint


def test_what_is_made_is_not_made_again(tmp_path: Path) -> None:
    rows = [row(1), row(2), row(3)]
    with OutputFolder(tmp_path / "out", RUN) as folder:
        assert folder.find_open(rows) == rows
        folder.add_picture(rows[0], picture(), {"seconds": 1.0})
        folder.add_failure(rows[1], "it broke", {})
    with OutputFolder(tmp_path / "out", RUN) as folder:
        assert folder.find_open(rows) == rows[1:], "what failed is tried again"
        line = folder.entries[1]
        assert (line["seed"], line["path"]) == (7, "pictures/000001-a-red-apple-7.png")
    (tmp_path / "out" / line["path"]).write_bytes(b"other")
    with OutputFolder(tmp_path / "out", RUN) as folder:
        assert folder.find_open(rows) == rows, "a picture that was changed is made again"


def test_a_picture_without_a_line_is_found_by_its_own_record(tmp_path: Path) -> None:
    asked = row(1, num_inference_steps=2)
    with OutputFolder(tmp_path, RUN) as folder:
        folder.picture_path(asked).write_bytes(picture())
        assert folder.find_open([asked]) == []
        assert folder.entries[1]["device"] == "cpu:0"
        other = row(2, num_inference_steps=2)
        folder.picture_path(other).write_bytes(picture(seed=8))
        assert folder.find_open([other]) == [other], "it is of another seed"
        folder.picture_path(other).write_bytes(picture()[:200])
        assert folder.find_open([other]) == [other], "it is half a picture"
        folder.settle("revision", "another")
        third = row(3, num_inference_steps=2)
        folder.picture_path(third).write_bytes(picture())
        assert folder.find_open([third]) == [third], "it is of another model"


def test_half_a_line_is_cut_off(tmp_path: Path) -> None:
    with OutputFolder(tmp_path, RUN) as folder:
        folder.add_picture(row(1), picture(), {})
    manifest = tmp_path / "manifest.jsonl"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole + whole[:20])
    with OutputFolder(tmp_path, RUN) as folder:
        assert list(folder.entries) == [1]
        folder.add_failure(row(2), "it broke", {})
    assert [json.loads(line)["row"] for line in manifest.read_text().splitlines()] == [1, 2]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(UsageError, match="holds other things"):
        OutputFolder(tmp_path, RUN)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(UsageError, match="is a file"):
        OutputFolder(tmp_path / "thesis.txt", RUN)


def test_a_folder_in_which_nothing_was_made_is_anybodys(tmp_path: Path) -> None:
    with OutputFolder(tmp_path, RUN) as folder:
        assert folder.entries == {}
    with OutputFolder(tmp_path, {**RUN, "input": "xyz"}) as folder:
        folder.picture_path(row(1)).write_bytes(picture())
    with pytest.raises(UsageError, match="of another run"):
        OutputFolder(tmp_path, RUN)


def test_a_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    with OutputFolder(tmp_path, RUN) as folder:
        folder.settle("dtype", "float32")
        with pytest.raises(UsageError, match="another process writes to"):
            OutputFolder(tmp_path, RUN)
        folder.add_failure(row(1), "it broke", {})
    with pytest.raises(UsageError, match="of another run: the rows are others"):
        OutputFolder(tmp_path, {**RUN, "input": "xyz"})
    with OutputFolder(tmp_path, RUN) as folder:
        assert folder.settle("dtype", "bfloat16") == "float32", "what was decided first holds"
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match="is damaged"):
        OutputFolder(tmp_path, RUN)
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, **RUN}))
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes() + b"nonsense\n")
    with pytest.raises(UsageError, match=r"line 2 of .* is damaged"):
        OutputFolder(tmp_path, RUN)


def test_a_line_whose_path_is_none_has_no_picture(tmp_path: Path) -> None:
    with OutputFolder(tmp_path, RUN) as folder:
        for path in (5, "a\0b", "missing.png"):
            folder.entries[1] = {"row": 1, "path": path}
            assert folder.find_open([row(1)]) == [row(1)]


def test_what_was_tried_again_has_one_line_in_the_end(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.jsonl"
    with OutputFolder(tmp_path, RUN) as folder:
        folder.add_failure(row(1), "it broke", {})
        folder.add_picture(row(2), picture(), {})
        before = manifest.read_bytes()
        folder.tidy()
        assert manifest.read_bytes() == before, "there was nothing to tidy"
        folder.add_picture(row(1), picture(), {})
        folder.tidy()
        folder.add_failure(row(3), "it broke", {})
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    assert [(line["row"], "error" in line) for line in lines] == [(1, False), (2, False), (3, True)]


def test_a_full_disk_is_told_and_the_folder_may_be_used_again(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fill() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(AnyaccelError, match=r"cannot write .*run\.json") as raised:
            OutputFolder(out, RUN)
        return raised.value.hint

    assert "make room and start again" in call_in_fork(fill)
    assert sorted(path.name for path in out.iterdir()) == [".lock", "pictures"]

    def fill_later() -> str:
        try:
            with OutputFolder(out, RUN) as folder:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
                folder.add_failure(row(1), "it broke", {})
        except AnyaccelError as error:
            return error.message
        return ""

    assert "manifest.jsonl could not be written" in call_in_fork(fill_later), "and not what closing the file met"
    with OutputFolder(out, RUN) as folder:
        assert folder.find_open([row(1)]) == [row(1)]
