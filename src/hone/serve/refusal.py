"""What a client is told when it gets no answer: OpenAI's error object with a fitting status."""

import json
from collections.abc import Mapping
from typing import Any

ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class Refusal(Exception):
    """One line for the client; never a traceback."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status >= 500:
            return "server_error"
        return {408: "timeout", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """The request itself is wrong: 400."""
    return Refusal(400, message, param=param, code=code)


def json_text(value: Any) -> str:
    """JSON in ASCII: no line separator and no half of a surrogate pair can break a stream of events."""
    return ENCODE(value)
