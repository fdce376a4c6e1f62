"""The explorer's server: what it answers, and what it refuses."""

import contextlib
import http.client
import json
import logging
import socket
import threading

import pytest

pytest.importorskip("matplotlib", reason="the explorer needs the extra `inspect`")

from transformer_jax.errors import UserError
from transformer_jax.inspect.explorer import CHARACTERS
from transformer_jax.inspect.serve import LARGEST_BODY, make_server


def explore(text):
    """Stands for the model: it says what it was asked."""
    if text == "long":
        raise UserError("too long. Give a shorter one.")
    if text == "broken":
        raise RuntimeError("secret")
    return {"text": text}


@pytest.fixture(scope="module")
def server():
    with serving(explore) as server:
        yield server


@contextlib.contextmanager
def serving(explore):
    with make_server(explore, title="<b>A & B") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, body=b'{"text": "a cat"}', *, method="POST", path="/explore", **headers):
    """Status and body of an answer; a header of None is not sent."""
    host = f"localhost:{server.server_address[1]}"
    given = {"Host": host, "Content-Type": "application/json", "Content-Length": str(len(body))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in given.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def refused(server, *arguments, **options):
    """Status and message of an error, which is always JSON."""
    status, body, headers = ask(server, *arguments, **options)
    assert headers["Content-Type"] == "application/json"
    found = json.loads(body)
    assert list(found) == ["error"]
    return status, found["error"]


def test_it_listens_on_the_loopback_and_gives_the_page(server):
    assert server.server_address[0] == "127.0.0.1"
    status, body, headers = ask(server, b"", method="GET", path="/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert b"<title>&lt;b&gt;A &amp; B</title>" in body
    assert b"connect-src 'self'" in body
    assert b'"asks":true' in body


def test_a_sentence_is_explored_on_one_line(server):
    for text, expected in (("a cat", "a cat"), ("a\n  cat\u2028sat", "a cat sat"), ("<script>", "<script>")):
        status, body, _ = ask(server, json.dumps({"text": text}).encode())
        assert (status, json.loads(body)) == (200, {"text": expected})


def test_what_the_model_refuses_is_said_and_what_breaks_is_not(server, caplog):
    assert refused(server, b'{"text": "long"}') == (422, "too long. Give a shorter one.")
    with caplog.at_level(logging.ERROR):
        status, message = refused(server, b'{"text": "broken"}')
    assert status == 500
    assert "secret" not in message
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", None, "[", "user@x"]
)
def test_another_host_is_refused(server, host):
    assert refused(server, Host=host)[0] == 403
    assert refused(server, b"", method="GET", path="/", Host=host)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "[::1]:8000", "LOCALHOST:1"])
def test_this_machine_is_not_refused(server, host):
    assert ask(server, b"", method="GET", path="/", Host=host)[0] == 200


def test_a_page_from_elsewhere_cannot_ask(server):
    own = f"http://localhost:{server.server_address[1]}"
    assert ask(server, Origin=own)[0] == 200
    for origin in ("http://evil.example", "null", own.replace("http", "https"), f"{own}0"):
        assert refused(server, Origin=origin)[0] == 403
    assert refused(server, Content_Type="text/plain")[0] == 415  # what a form of another page could send


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"a cat",
        b"[]",
        b'"text"',
        b"{}",
        b'{"text": 1}',
        b'{"text": null}',
        b'{"text": "\\ud800"}',
        b"\xff",
        b"[" * 9000,
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_has_no_text_is_refused(server, body):
    assert refused(server, body) == (400, 'send a JSON object with a text: {"text": "…"}.')


def test_sizes_are_bounded(server):
    longest = json.dumps({"text": "é" * CHARACTERS}).encode()
    assert ask(server, longest)[0] == 200
    assert (
        "2,001 characters of at most 2,000" in refused(server, json.dumps({"text": "é" * (CHARACTERS + 1)}).encode())[1]
    )
    assert refused(server, b'{"text": " \\n "}') == (422, "the sentence is empty.")
    assert refused(server, b"", Content_Length=str(LARGEST_BODY + 1))[0] == 413
    for length in (None, "-1", "x", "１"):
        assert refused(server, b"", Content_Length=length and length.encode())[0] == 411
    assert refused(server, b"", Content_Length="9" * 5000)[0] == 413


def test_other_paths_and_methods_are_errors(server):
    assert refused(server, b"", method="GET", path="/etc/passwd")[0] == 404
    assert refused(server, b"", method="GET", path="/explore")[0] == 404
    assert refused(server, path="/")[0] == 404
    assert refused(server, b"", method="PUT")[0] == 501


def test_sentences_are_explored_one_at_a_time():
    inside, most, lock, both = 0, 0, threading.Lock(), threading.Barrier(2)

    def slow(text):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.05)
        with lock:
            inside -= 1
        return {}

    with serving(slow) as server:

        def asks():
            both.wait()
            assert ask(server)[0] == 200

        threads = [threading.Thread(target=asks) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == 1


def test_a_port_that_is_taken_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port} of 127.0.0.1 can't be had"):
            make_server(explore, title="A", port=port)
