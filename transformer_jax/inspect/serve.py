"""The explorer with a field for sentences: a small server, of the standard library, for one reader at this machine.

    python3 -m transformer_jax.inspect --model runs/phrases --serve

`GET /` is the page, `POST /explore` with `{"text": …}` what it shows of a sentence. Errors are JSON: `{"error": …}`.
It listens on the loopback only, unless another address is asked for.
"""

import http.server
import ipaddress
import json
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from transformer_jax.errors import UserError
from transformer_jax.inspect.explorer import CHARACTERS, explorer_page

LOOPBACK = "127.0.0.1"
LARGEST_BODY = 8 * CHARACTERS  # bytes: every character may be an escape of six
TIMEOUT = 30  # seconds for a reader to send what they announced

log = logging.getLogger(__name__)

Explore = Callable[[str], dict[str, Any]]  # a sentence → what the page shows of it


class Refused(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


def make_server(
    explore: Explore, *, title: str, host: str = LOOPBACK, port: int = 0
) -> http.server.ThreadingHTTPServer:
    """A server that is bound and not yet serving; port 0 takes a free one. Sentences are explored one at a time.

    Raises:
      UserError: if the address can't be had.
    """
    page = explorer_page([], title=title, asks=True).encode()
    handler = type(
        "ExplorerHandler", (Handler,), {"explore": staticmethod(explore), "page": page, "one": threading.Lock()}
    )
    try:
        return http.server.ThreadingHTTPServer((host, port), handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port {port} of {host} can't be had ({error}). Give another --port.") from error


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers a request; `make_server` sets the fields."""

    explore: Explore
    page: bytes
    one: threading.Lock
    timeout = TIMEOUT
    server_version, sys_version = "explorer", ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, respond: Callable[[], tuple[str, bytes]]) -> None:
        try:
            check_host(self.headers.get("Host"))
            kind, body = respond()
        except Refused as refused:
            self._send_error(refused.status, str(refused))
        except UserError as error:
            self._send_error(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except (TimeoutError, ConnectionError):
            self.close_connection = True
        except Exception:
            log.exception("a sentence could not be explored")
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "that went wrong here; the terminal says how.")
        else:
            self._send(HTTPStatus.OK, kind, body)

    def _get(self) -> tuple[str, bytes]:
        if self.path != "/":
            raise Refused(HTTPStatus.NOT_FOUND, "there is only the page, at /.")
        return "text/html; charset=utf-8", self.page

    def _post(self) -> tuple[str, bytes]:
        if self.path != "/explore":
            raise Refused(HTTPStatus.NOT_FOUND, "sentences are sent to /explore.")
        check_origin(self.headers.get("Origin"), self.headers.get("Host"))
        text = text_of(
            self.rfile.read(body_length(self.headers.get("Content-Type"), self.headers.get("Content-Length")))
        )
        with self.one:
            found = self.explore(text)
        return "application/json", json.dumps(found, allow_nan=False).encode()

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        self.close_connection = True  # what was sent may not have been read
        self._send(status, "application/json", json.dumps({"error": message}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses, as JSON too."""
        status = HTTPStatus(code)
        self._send_error(status, message or status.phrase)

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug(format, *arguments)


def check_host(host: str | None) -> None:
    """Only this machine's own name and plain addresses: a page elsewhere can't have its name lead here.

    Raises:
      Refused: for another Host.
    """
    name = _hostname(f"//{host or ''}")
    if name == "localhost":
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise Refused(HTTPStatus.FORBIDDEN, "the Host is not this machine. Open it as http://localhost.") from None


def check_origin(origin: str | None, host: str | None) -> None:
    """Only this server's own page sends sentences.

    Raises:
      Refused: if another one does.
    """
    if origin is not None and origin != f"http://{host}":
        raise Refused(HTTPStatus.FORBIDDEN, "the page that asks is not this server's.")


def _hostname(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def body_length(kind: str | None, length: str | None) -> int:
    """Bytes to read.

    Raises:
      Refused: unless it is JSON of a length that is said and small enough.
    """
    if (kind or "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send JSON, with Content-Type: application/json.")
    if length is None or not (length.isascii() and length.isdecimal()):
        raise Refused(HTTPStatus.LENGTH_REQUIRED, "send the body's Content-Length.")
    if len(length) > 9 or int(length) > LARGEST_BODY:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {LARGEST_BODY:,} bytes.")
    return int(length)


def text_of(body: bytes) -> str:
    """The sentence that a body asks for, on one line.

    Raises:
      Refused: if there is none, or it is too long.
    """
    try:
        asked = json.loads(body)
        text = " ".join(asked["text"].split())
        text.encode()  # half of a surrogate pair is no text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(HTTPStatus.BAD_REQUEST, 'send a JSON object with a text: {"text": "…"}.') from error
    if not text:
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "the sentence is empty.")
    if len(text) > CHARACTERS:
        raise Refused(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"the sentence has {len(text):,} characters of at most {CHARACTERS:,}."
        )
    return text
