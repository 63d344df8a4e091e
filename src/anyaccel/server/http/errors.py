"""API errors in OpenAI's JSON format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

__all__ = ["NO_RETRY", "ApiError", "describe_failure", "describe_invalid", "make_response"]

# OpenAI's clients retry every 408, 409, 429 and 5xx response that lacks this non-standard header (seen in openai-python
# 3.49). Retrying a failed or cancelled job would queue it a second time.
NO_RETRY = {"x-should-retry": "false"}
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Error returned to the client as a JSON response."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON body of the error response."""
        error_type = _ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        if self.code == "content_policy_violation":
            error_type = "image_generation_user_error"
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


def make_response(error: ApiError) -> JSONResponse:
    """Return the HTTP response for an API error: status, headers and JSON body."""
    return JSONResponse(error.to_dict(), error.status, error.headers)


def describe_failure(error: Mapping[str, Any] | None) -> ApiError:
    """Convert the error stored with a failed job to an API error."""
    values = error or {}
    return ApiError(
        int(values.get("status", 500)),
        str(values.get("code", "internal_error")),
        str(values.get("message", "the job failed")),
        headers=NO_RETRY,
    )


def describe_invalid(error: RequestValidationError | ValidationError) -> ApiError:
    """Return the API error for the first invalid field of a request."""
    # OpenAI's format has one `param` per error, so only the first problem is reported.
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    name, kind, message = ".".join(path), str(first["type"]), str(first["msg"])
    if kind == "json_invalid":
        return ApiError(400, "invalid_json", f"the request body is not valid JSON: {message}")
    if kind == "extra_forbidden":
        return ApiError(400, "unknown_parameter", f"unknown parameter {name[:60]!r}", param=name[:60])
    # Without a JSON content type, FastAPI passes the raw bytes to pydantic.
    if not name and kind in ("model_attributes_type", "dict_type", "model_type"):
        return ApiError(
            400, "invalid_value", "the request body must be a JSON object with Content-Type: application/json"
        )
    if kind == "missing":
        missing = f"the parameter {name!r}" if name else "the request body"
        return ApiError(400, "missing_required_parameter", f"{missing} is missing", param=name or None)
    return ApiError(400, "invalid_value", f"{name or 'the request body'}: {message}", param=name or None)
