"""What an API server's answer means: status code and body in, ApiError out. Pure."""

from __future__ import annotations

import json
from typing import Any

from crosscloud_operator.kube.api import (
    AlreadyExists,
    ApiError,
    Conflict,
    NotFound,
    Refused,
    Unreachable,
)


class Silent(Unreachable):
    """A watch on which nothing came for too long, not even a bookmark."""


class Expired(ApiError):
    """410: the resourceVersion or the continue token is too old; only a new list helps."""


# How the API server words a JSON patch that could not be applied; a patched object that breaks its schema is also
# a 422, but names the object and the fields.
_PATCH_NOT_APPLIED = "the server rejected our request due to an error in our request"


def error_of(method: str, status: int, body: bytes) -> ApiError:
    """The error that an answer with a status of 300 or more stands for."""
    message, reason, causes = _status(status, body)
    if status == 404:
        return NotFound(message, reason=reason)
    if status == 410:
        return Expired(message, reason=reason)
    if status == 409:
        return _conflict(method, message, reason)
    if status == 401:
        return Unreachable(f"credentials not accepted (401): {message}", reason="Unauthorized")
    if status == 422 and method == "PATCH" and message.startswith(_PATCH_NOT_APPLIED):
        return Conflict(f"{message}: {causes}" if causes else message, reason=reason)
    if 400 <= status < 500 and status not in (408, 429):
        return Refused(message, reason=reason)
    return Unreachable(f"HTTP {status}: {message}", reason=reason)


def _conflict(method: str, message: str, reason: str) -> ApiError:
    if method != "POST":
        return Conflict(message, reason=reason)
    if reason == "AlreadyExists":
        return AlreadyExists(message, reason=reason)
    # A quota that others are changing, for example: the object wasn't made, and may be a moment later.
    return Unreachable(message, reason=reason)


def _status(status: int, body: bytes) -> tuple[str, str, str]:
    """Message, reason and causes of a Status object; the bare text where a proxy answered."""
    try:
        data: Any = json.loads(body)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        text = body[:200].decode(errors="replace").strip()
        return text or f"HTTP {status} without a text", "", ""
    details = data.get("details")
    found = details.get("causes") if isinstance(details, dict) else None
    causes = [str(item.get("message", "")) for item in found or () if isinstance(item, dict)]
    return str(data.get("message") or f"HTTP {status}"), str(data.get("reason") or ""), "; ".join(causes)
