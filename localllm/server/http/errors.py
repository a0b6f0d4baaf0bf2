"""Errors of the HTTP layer, the bodies and headers of error responses, and logging of unexpected
exceptions."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from starlette.responses import JSONResponse

from localllm.errors import (
    AuthError,
    BusyError,
    ContextLengthError,
    LocalLLMError,
    NotFoundError,
    RequestError,
)
from localllm.server.http.asgi import Scope, request_id

log = logging.getLogger("localllm.server")


class KeyRequiredError(
    AuthError,
    code="invalid_api_key",
    http_status=401,
    default_hint="send the key as `Authorization: Bearer KEY`",
):
    """The API key is missing or wrong."""


class MediaTypeError(
    RequestError,
    code="unsupported_media_type",
    http_status=415,
    default_hint="send Content-Type: application/json",
):
    """The body is not declared as JSON. A web page could send such a body without a CORS
    preflight."""


class EncodingError(
    RequestError,
    code="unsupported_encoding",
    http_status=415,
    default_hint="send it uncompressed, or with Content-Encoding: gzip or deflate",
):
    """The server does not decode this Content-Encoding."""


class BodyTooLargeError(RequestError, code="request_too_large", http_status=413):
    """The body exceeds the size limit."""


class SlowBodyError(RequestError, code="request_timeout", http_status=408):
    """The body did not arrive in time."""


class RouteNotFoundError(NotFoundError, code="route_not_found"):
    """The server has no such path."""


def stopping() -> BusyError:
    """Return the error for requests that the end of the server cuts off. Clients send a request
    again if the text has the status or the code of a busy server."""
    return BusyError("503 server_busy: the server is stopping", hint="send the request again later")


class MethodError(RequestError, code="method_not_allowed", http_status=405):
    """The path exists but does not answer the method. `methods`: the methods that it answers."""

    methods = ""


# Anthropic's error types by status.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# LM Studio's own API, and Lemonade's copy of OpenAI's.
_OTHER_BASE_PATHS = ("/api/v0", "/api/v1")


def envelope(error: LocalLLMError, scope: Scope) -> dict[str, Any]:
    """Return the body of `error` in the format that the client expects. The path decides, because a
    request may be refused before it reaches a route."""
    path = scope["path"]
    if path.startswith("/v1/messages") or speaks_anthropic(scope):
        return anthropic_envelope(error)
    if path.startswith("/api/") and not is_another_server_s(path):
        return ollama_envelope(error)
    return error.to_openai()


def is_another_server_s(path: str) -> bool:
    """Return whether `path` is below LM Studio's or Lemonade's base path. Ollama has none there."""
    return path.startswith(_OTHER_BASE_PATHS)


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether the client uses Anthropic's API on a path that two dialects share."""
    named = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return named and scope["path"].startswith("/v1/models")


def anthropic_envelope(error: LocalLLMError) -> dict[str, Any]:
    """Return Anthropic's error object. For a prompt that is too long, clients parse the message and
    then compact the conversation."""
    message = error.message
    if isinstance(error, ContextLengthError) and error.counts is not None:
        tokens, window = error.counts
        message = f"prompt is too long: {tokens} tokens > {window} maximum"
        if error.hint:
            message += f"; {error.hint}"
    return {"type": "error", "error": {"type": _anthropic_type(error), "message": message}}


def _anthropic_type(error: LocalLLMError) -> str:
    status = error.http_status
    if status in _ERROR_TYPES:
        return _ERROR_TYPES[status]
    return "invalid_request_error" if 400 <= status < 500 else "api_error"


def ollama_envelope(error: LocalLLMError) -> dict[str, Any]:
    """Return Ollama's error object, which has only a text. For a prompt that is too long, clients
    parse the message and then compact the conversation."""
    message = error.message
    if isinstance(error, ContextLengthError) and error.counts is not None:
        tokens, window = error.counts
        message = (
            f"prompt too long; exceeded max context length by {max(1, tokens - window)} tokens: "
            f"{message}; {error.hint}"
        )
    return {"error": message}


def refusal(error: LocalLLMError, scope: Scope) -> JSONResponse:
    """Return the response for `error`, in the format of the path."""
    headers = {**request_id(), **_headers_of(error)}
    body = envelope(error, scope)
    if body.get("type") == "error":  # Anthropic's SDKs read the id from the body too
        body["request_id"] = headers["request-id"]
    return JSONResponse(body, status_code=error.http_status, headers=headers)


def _headers_of(error: LocalLLMError) -> dict[str, str]:
    if isinstance(error, MethodError):
        return {"allow": error.methods}
    if error.http_status in (429, 503) and error.retry_after_s is not None:
        return {"retry-after": f"{error.retry_after_s:.0f}"}
    if error.http_status == 401:
        return {"www-authenticate": "Bearer"}
    if error.http_status == 503:
        return {"retry-after": "1"}
    return {}


def for_client(error: BaseException) -> LocalLLMError:
    """Return `error` in a form that clients may see. LocalLLMErrors are returned themselves.

    For any other exception, its type and the places in the traceback are logged. Its message is
    never shown or logged, because it could quote a prompt or name a path. The tracebacks are
    removed."""
    if isinstance(error, LocalLLMError):
        _drop_tracebacks(error)
        return error
    places = [
        f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}"
        for f in traceback.extract_tb(error.__traceback__)
    ]
    kind = type(error).__name__
    log.error("unforeseen %s at %s", kind, " < ".join(reversed(places)))
    _drop_tracebacks(error)
    return LocalLLMError(f"the server failed on this request ({kind})", hint="see the server's log")


def _drop_tracebacks(error: BaseException | None) -> None:
    """Remove the tracebacks of `error` and of the errors before it.

    They hold the variables of all functions that the error went through, and most of these hold the
    error or its task. So a request of 30 MB would stay in memory until the next garbage
    collection."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
