"""The way to a server: keys, and what never comes to light."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from medusa_heads.inference.regeneration.connections import Servers
from medusa_heads.inference.regeneration.server_backend import ServerBackend
from tests.inference.speaking import make_tokenizer


class Echo(ThreadingHTTPServer):
    """Answers every request with `{}`, but first with what `before` holds: statuses, each with
    headers. It remembers the paths and headers that it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.before: list[tuple[int, dict[str, str]]] = []
        self.paths: list[str] = []
        self.headers: list[Message] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Echo

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)
        self.server.headers.append(self.headers)
        status, headers = self.server.before.pop(0) if self.server.before else (200, {})
        self.send_response(status)
        for name, value in ({"Content-Length": "2"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def reach(*urls: str, retries: int = 0, timeout: float = 10.0) -> Servers:
    """Servers that want the key in MY_KEY."""
    return Servers(urls, retries=retries, timeout=timeout, connections=1, key_variable="MY_KEY")


@pytest.mark.parametrize("key", ["sesame\u20ac4711", "sesame\n4711", "Bearer sesame4711", " \r\n"])
def test_a_key_that_cannot_stand_in_a_request_is_not_repeated(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(ValueError, match=r"^the environment variable MY_KEY .* no API key") as told:
        ServerBackend(
            "http://host/v1", "tiny", make_tokenizer(), ends=[], api_key_variable="MY_KEY"
        )
    assert "sesame" not in str(told.value) and told.value.__context__ is None


@pytest.mark.parametrize("end", ["\r", "\n", " \r\n", "\t"])
def test_white_space_around_a_key_is_not_sent(
    end: str, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", f"sesame-4711{end}")
    assert reach(echo.url).post("/completions", "{}")[0] == 200
    assert echo.headers[-1]["Authorization"] == "Bearer sesame-4711"
    monkeypatch.delenv("MY_KEY")
    assert reach(echo.url).post("/completions", "{}")[0] == 200
    assert "Authorization" not in echo.headers[-1]


def sleeping(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long pauses between requests would have been; other threads sleep as they did."""
    waited: list[float] = []
    clock = SimpleNamespace(sleep=waited.append, time=time.time)
    monkeypatch.setattr("urllib3.util.retry.time", clock)
    return waited


@pytest.mark.parametrize("asked", ["7200", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_no_server_makes_a_run_wait_for_hours(
    asked: str, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = sleeping(monkeypatch)
    echo.before = [(429, {"Retry-After": asked}), (503, {"Retry-After": "2"})]
    assert reach(echo.url, retries=2).post("/completions", "{}")[0] == 200
    assert waited == [30.0, 2.0]


@pytest.mark.parametrize("asked", ["soon", "9" * 5000])
def test_a_pause_that_cannot_be_read_is_the_usual_one(
    asked: str, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = sleeping(monkeypatch)
    echo.before = [(429, {"Retry-After": asked})] * 2
    assert reach(echo.url, retries=2).post("/completions", "{}")[0] == 200
    assert len(waited) == 1 and waited[0] <= 30  # the first is none


@pytest.mark.parametrize(
    ("login", "sent"),
    [("me:sesame", b"me:sesame"), ("me:se%40s%C3%A9%3Aame", "me:se@s\u00e9:ame".encode())],
)
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_the_password_of_a_proxy_is_sent_and_not_shown(
    scheme: str,
    login: str,
    sent: bytes,
    echo: Echo,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"{scheme}{login}@127.0.0.1:{echo.server_port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level("DEBUG"):
        servers = reach("http://far.example/v1")
        assert servers.post("/completions", "{}")[0] == 200
        echo.before = [(407, {})]
        assert servers.post("/completions", "{}") == (407, {})
    assert echo.paths == ["http://far.example/v1/completions"] * 2
    expected = f"Basic {b64encode(sent).decode()}"
    assert [each["Proxy-Authorization"] for each in echo.headers] == [expected] * 2
    assert "ame@" not in caplog.text and "sesame" not in f"{caplog.text} {vars(servers)}"


@pytest.mark.parametrize("proxy", ["socks5://me:sesame@host:1", "http://me:sesame@host:70000"])
def test_a_proxy_that_is_none_is_named_by_its_variable(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"^the proxy in http_proxy cannot be used") as told:
        reach("http://far.example/v1")
    assert "sesame" not in str(told.value) and told.value.__cause__ is None
    assert told.value.__suppress_context__
