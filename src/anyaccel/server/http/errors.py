"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

__all__ = ["FINAL", "ApiError", "describe_failure", "describe_invalid", "make_answer"]

FINAL = {"x-should-retry": "false"}
"""Tells OpenAI's clients that the same request would come to the same end."""
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an error."""

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
        """The object that a client reads."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        if self.code == "content_policy_violation":
            kind = "image_generation_user_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def make_answer(error: ApiError) -> JSONResponse:
    """The answer to a request."""
    return JSONResponse(error.to_dict(), error.status, error.headers)


def describe_failure(error: Mapping[str, Any] | None) -> ApiError:
    """The error of a job that failed."""
    kept = error or {}
    return ApiError(
        int(kept.get("status", 500)),
        str(kept.get("code", "internal_error")),
        str(kept.get("message", "it failed")),
        headers=FINAL,
    )


def describe_invalid(error: RequestValidationError | ValidationError) -> ApiError:
    """What is wrong with the fields of a request, the first of them by name."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    name, kind, words = ".".join(where), str(first["type"]), str(first["msg"])
    if kind == "json_invalid":
        return ApiError(400, "invalid_json", f"the body is no JSON: {words}")
    if kind == "extra_forbidden":
        return ApiError(400, "unknown_parameter", f"there is no parameter {name[:60]!r}", param=name[:60])
    if not name and kind in ("model_attributes_type", "dict_type", "model_type"):
        return ApiError(400, "invalid_value", "the body is a JSON object, sent with Content-Type: application/json")
    if kind == "missing":
        return ApiError(400, "missing_required_parameter", f"{name or 'the body'} is missing", param=name or None)
    return ApiError(400, "invalid_value", f"{name or 'the body'}: {words}", param=name or None)
