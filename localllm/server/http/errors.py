"""Errors of the HTTP border, what every error adds to its response, and what is logged of the unforeseen."""

from __future__ import annotations

import logging
import traceback

from localllm.errors import AuthError, BusyError, LocalLLMError, NotFoundError, RequestError
from localllm.server.http.accounts import RateLimitError

log = logging.getLogger("localllm.server")


class KeyRequiredError(AuthError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    http_status = 401
    default_hint = "send the key as `Authorization: Bearer KEY`"


class MediaTypeError(RequestError):
    """A body that does not say it is JSON: what a web page could send without the user's consent."""

    code = "unsupported_media_type"
    http_status = 415
    default_hint = "send Content-Type: application/json"


class EncodingError(RequestError):
    """A body packed in a way that the server does not unpack."""

    code = "unsupported_encoding"
    http_status = 415
    default_hint = "send it plain, or with Content-Encoding: gzip or deflate"


class BodyTooLargeError(RequestError):
    """The body is larger than the server reads."""

    code = "request_too_large"
    http_status = 413


class SlowBodyError(RequestError):
    """The body did not arrive in time."""

    code = "request_timeout"
    http_status = 408


class RouteNotFoundError(NotFoundError):
    """No such path here."""

    code = "route_not_found"


class MethodError(RequestError):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    http_status = 405


def headers_of(error: LocalLLMError) -> dict[str, str]:
    """Headers an error adds to its response."""
    if isinstance(error, BusyError | RateLimitError):
        return {"retry-after": str(error.retry_after_s)}
    if error.http_status == 401:
        return {"www-authenticate": "Bearer"}
    return {"retry-after": "1"} if error.http_status == 503 else {}


def log_failure(error: BaseException) -> None:
    """Log where the server failed, not with which words: a message can quote a prompt."""
    places = [f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
    log.error("unforeseen %s at %s", type(error).__name__, " < ".join(reversed(places)))


def internal(error: BaseException) -> LocalLLMError:
    """`error` as something a client may see: our own as they are, anything else without its text, which could name
    paths, prompts or addresses."""
    if isinstance(error, LocalLLMError):
        return error
    return LocalLLMError(f"the server failed on this request ({type(error).__name__})", hint="see the server's log")
