"""The small HTTPS client against servers that don't behave; well-behaved ones are in test_register.py."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from apiserver import ApiServer

from crosscloud_trainer.membership.kube import ConfigMapClient, KubeError
from crosscloud_trainer.pki import CertificateAuthority

GOOD = b'{"kind": "ConfigMap", "metadata": {"resourceVersion": "7"}, "data": {"a": "b"}}'


def answer(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def served(home: ApiServer, reply: Callable[[ssl.SSLSocket], None]) -> Iterator[int]:
    """A server with the real one's certificate whose answer is up to a test."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(home.folder / "server.crt", home.folder / "server.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            plain, _ = listener.accept()
            with context.wrap_socket(plain, server_side=True) as secured:
                secured.recv(65536)
                reply(secured)
        except OSError:
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(30)


def client(home: ApiServer, folder: Path, port: int, seconds: float = 30.0) -> ConfigMapClient:
    (folder / "token").write_text("t")
    return ConfigMapClient("127.0.0.1", port, folder / "token", home.folder / "ca.crt", seconds)


def test_the_hand_written_server_is_understood(home: ApiServer, tmp_path: Path) -> None:
    with served(home, lambda end: end.sendall(answer(GOOD))) as port:
        assert client(home, tmp_path, port).get("ml", "view").data == {"a": "b"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(answer(b"not JSON"), "no ConfigMap", id="no JSON"),
        pytest.param(answer(b"[" * 100_000), "no ConfigMap", id="deep JSON"),
        pytest.param(answer(b'{"kind": "Secret"}'), "no ConfigMap", id="another kind"),
        pytest.param(answer(b'{"kind": "ConfigMap", "metadata": null}'), "no ConfigMap", id="no metadata"),
        pytest.param(answer(b"<html>", "502 Bad Gateway"), "502", id="a proxy's page"),
        pytest.param(answer(b" " * (5 * 2**20)), "more than", id="too large"),
        pytest.param(b"\x00\x01\x02\r\n\r\n", "BadStatusLine|\x00", id="no HTTP"),
        pytest.param(answer(GOOD)[:-10], "IncompleteRead|ConfigMap", id="cut short"),
        pytest.param(b"", "RemoteDisconnected|closed", id="nothing"),
    ],
)
def test_answers_that_are_no_config_map_are_one_error(
    home: ApiServer, tmp_path: Path, content: bytes, words: str
) -> None:
    with served(home, lambda end: end.sendall(content)) as port, pytest.raises(KubeError, match=words):
        client(home, tmp_path, port).get("ml", "view")


def test_a_server_that_drips_is_left_at_the_deadline(home: ApiServer, tmp_path: Path) -> None:
    def drip(end: ssl.SSLSocket) -> None:
        for byte in answer(GOOD + b" " * 10_000):
            end.sendall(bytes([byte]))
            time.sleep(0.02)

    with served(home, drip) as port, pytest.raises(KubeError, match=f"127.0.0.1:{port}"):
        client(home, tmp_path, port, seconds=0.5).get("ml", "view")


def test_a_server_of_another_authority_gets_no_token(home: ApiServer, tmp_path: Path) -> None:
    heard: list[bytes] = []
    with served(home, lambda end: heard.append(end.recv(65536))) as port:
        (tmp_path / "ca.crt").write_bytes(CertificateAuthority.create("other").certificate)
        (tmp_path / "token").write_text("secret")
        stranger = ConfigMapClient("127.0.0.1", port, tmp_path / "token", tmp_path / "ca.crt", 10)
        with pytest.raises(KubeError, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.get("ml", "view")
    assert heard == []


def test_the_client_needs_no_torch() -> None:
    code = "import sys, crosscloud_trainer.membership.kube; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
