"""Downloads of huggingface_hub: the class of its errors, and the file that an error is about."""

import importlib
from typing import Any

import pytest

from anyaccel.upstream.hub_downloads import FailedDownload, find_download_error, find_failed_download, showing_one_bar

ERRORS: Any = importlib.import_module("huggingface_hub.errors")
HTTP: Any = importlib.import_module(find_download_error().__module__.split(".")[0])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "/owner/model/resolve/main/unet/a%20b.safetensors",
            FailedDownload("owner/model", "unet/a b.safetensors", False),
        ),
        ("/gpt2/resolve/0123/config.json", FailedDownload("gpt2", "config.json", False)),
        ("/api/models/owner/model", None),
    ],
)
def test_the_file_comes_from_the_request(path: str, expected: FailedDownload | None) -> None:
    lost = HTTP.ConnectError("lost", request=HTTP.Request("GET", f"https://hub{path}"))
    assert isinstance(lost, find_download_error())
    wrapped = OSError("cannot download")
    wrapped.__cause__ = lost
    assert find_failed_download(wrapped) == expected
    assert find_failed_download(HTTP.ConnectError("no request")) is None


def test_gated() -> None:
    response = HTTP.Response(403, request=HTTP.Request("GET", "https://hub/owner/model/resolve/main/a.json"))
    error = ERRORS.GatedRepoError("gated", response=response)
    assert find_failed_download(error) == FailedDownload("owner/model", "a.json", is_gated=True)


def test_diffusers_downloads_with_the_bar() -> None:
    module: Any = importlib.import_module("diffusers.pipelines.pipeline_utils")
    download = module.snapshot_download
    with showing_one_bar():
        bar = module.snapshot_download.keywords["tqdm_class"]
        hidden = bar(total=1, disable=False)
        shown = bar(total=1, disable=False, name="huggingface_hub.snapshot_download")
        assert (hidden.disable, shown.disable) == (True, False)
        shown.close()
    assert module.snapshot_download is download
