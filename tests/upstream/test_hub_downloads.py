"""Downloads of huggingface_hub: the class of its errors, and the file that an error is about."""

import errno
import importlib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from anyaccel.upstream.hub_downloads import find_download_error, find_failed_download, showing_one_bar

ERRORS: Any = importlib.import_module("huggingface_hub.errors")
HTTP: Any = importlib.import_module(find_download_error().__module__.split(".")[0])
RESPONSE: Any = HTTP.Response(403, request=HTTP.Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (HTTP.ConnectError("lost"), "connection"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
        (ERRORS.GatedRepoError("gated", response=RESPONSE), "gated"),
        (ERRORS.RemoteEntryNotFoundError("no such file", response=RESPONSE), None),
        (ERRORS.RepositoryNotFoundError("no such repository", response=RESPONSE), None),
        (ERRORS.LocalEntryNotFoundError("no network"), None),
    ],
)
def test_the_file_is_that_of_the_call(
    error: Exception, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.file_download._hf_hub_download_to_cache_dir", fail)
    with pytest.raises(type(error)) as caught:
        huggingface_hub.hf_hub_download("owner/model", "model.safetensors", subfolder="unet", cache_dir=tmp_path)
    failed = find_failed_download(caught.value)
    assert (failed and failed.reason) == reason
    if failed is not None:
        assert (failed.repository, failed.file) == ("owner/model", "unet/model.safetensors")


def test_other_errors() -> None:
    assert issubclass(ERRORS.HfHubHTTPError, find_download_error())
    assert issubclass(HTTP.ConnectError, find_download_error())
    assert find_failed_download(ValueError("bad config")) is None


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
