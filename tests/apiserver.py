"""A real API server on a loopback port, in about three seconds: etcd and kube-apiserver, nothing else.

No controller and no scheduler run here, so pods stay Pending and nothing is garbage collected. Tests write what those
would write. Usage, in a conftest.py:

    from apiserver import ApiServer, api_server

    @pytest.fixture(scope="session")
    def east() -> Iterator[ApiServer]:
        with api_server("east") as server:
            yield server
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.client
import ipaddress
import json
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from crosscloud_lab.binaries import Binaries
from crosscloud_lab.errors import LabError
from crosscloud_lab.paths import cache_dir
from crosscloud_lab.progress import PlainProgress

START_SECONDS = 120.0


@dataclass
class ApiServer:
    """A running API server; `admin` may do everything. Paths are files below `folder`."""

    name: str
    folder: Path
    port: int
    ca: str
    certificate: str
    key: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, all contents inline, one context called like the server."""
        return self.folder / "admin.kubeconfig"

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Standard output of the real kubectl as administrator. Raises with its words where it fails."""
        command = [str(program("kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=60)
        if check and done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr}")
        return done.stdout if check else done.stdout + done.stderr

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """One request as administrator; the parsed answer. Raises AssertionError on a status of 400 or more."""
        status, answer = self.raw(method, path, body, content_type)
        assert status < 400, f"{method} {path}: {status} {answer}"
        return answer

    def raw(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> tuple[int, Any]:
        """Status and parsed answer, whatever the status."""
        context = ssl.create_default_context(cadata=self.ca)
        context.load_cert_chain(self.folder / "admin.pem")
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=30)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, body=text, headers={"Content-Type": content_type})
            response = connection.getresponse()
            data = response.read()
            try:
                return response.status, json.loads(data)
            except ValueError:
                return response.status, data.decode()
        finally:
            connection.close()

    def namespace(self, name: str, **labels: str) -> str:
        """Make a namespace (or take the one that is there)."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        status, answer = self.raw("POST", "/api/v1/namespaces", body)
        assert status in (201, 409), answer
        return name


def program(name: str) -> Path:
    """A binary of the lab, built now if the cache lacks it."""
    binaries = Binaries(cache_dir())
    try:
        return binaries.path(name)
    except LabError:
        binaries.ensure(PlainProgress())
        return binaries.path(name)


@contextlib.contextmanager
def api_server(name: str, *, extra_args: tuple[str, ...] = ()) -> Iterator[ApiServer]:
    """Start etcd and kube-apiserver, wait until it is ready, and stop both at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"crosscloud-{name}-"))
    server: ApiServer | None = None
    try:
        server = _prepare(name, folder)
        etcd = _start_etcd(server)
        _start_api_server(server, etcd, extra_args)
        _wait(server)
        yield server
    finally:
        for process in reversed(server.processes if server else []):
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(name: str, folder: Path) -> ApiServer:
    authority, signer = _authority()
    ca = authority.public_bytes(serialization.Encoding.PEM).decode()
    certificate, key = _issue(authority, signer, "kubernetes-admin", "system:masters")
    server_certificate, server_key = _issue(authority, signer, "kube-apiserver", None)
    account = ec.generate_private_key(ec.SECP256R1())
    (folder / "ca.crt").write_text(ca)
    (folder / "server.crt").write_text(server_certificate)
    (folder / "server.key").write_text(server_key)
    (folder / "sa.key").write_text(_pem(account))
    (folder / "admin.pem").write_text(certificate + key)
    server = ApiServer(name, folder, free_port(), ca, certificate, key)
    server.kubeconfig.write_text(_kubeconfig(server))
    return server


def _kubeconfig(server: ApiServer) -> str:
    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    user = {"client-certificate-data": encoded(server.certificate), "client-key-data": encoded(server.key)}
    cluster = {"server": server.url, "certificate-authority-data": encoded(server.ca)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": server.name, "cluster": cluster}],
        "users": [{"name": "admin", "user": user}],
        "contexts": [{"name": server.name, "context": {"cluster": server.name, "user": "admin"}}],
        "current-context": server.name,
    }
    return json.dumps(document, indent=1)  # JSON is YAML too


def _start_etcd(server: ApiServer) -> str:
    client, peer = free_port(), free_port()
    url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    arguments = [
        f"--data-dir={server.folder / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
        "--unsafe-no-fsync",
        "--log-level=error",
    ]
    _spawn(server, "etcd", arguments)
    return url


def _start_api_server(server: ApiServer, etcd: str, extra_args: tuple[str, ...]) -> None:
    folder = server.folder
    arguments = [
        f"--etcd-servers={etcd}",
        f"--secure-port={server.port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={folder / 'server.crt'}",
        f"--tls-private-key-file={folder / 'server.key'}",
        f"--client-ca-file={folder / 'ca.crt'}",
        f"--service-account-issuer={server.url}",
        f"--service-account-key-file={folder / 'sa.key'}",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=RBAC",
        # No controller makes the default service account, and this plugin would wait for it at every pod.
        "--disable-admission-plugins=ServiceAccount",
        f"--cert-dir={folder}",
        *extra_args,
    ]
    _spawn(server, "kube-apiserver", arguments)


def _spawn(server: ApiServer, name: str, arguments: list[str]) -> None:
    # The kernel ends the child with us, also when the test run is killed.
    guard = [found, "--pdeathsig", "KILL"] if (found := shutil.which("setpriv")) else []
    with (server.folder / f"{name}.log").open("wb") as log:
        command = [*guard, str(program(name)), *arguments]
        server.processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=server.folder))


def _wait(server: ApiServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        for process in server.processes:
            if process.poll() is not None:
                logs = "\n".join(path.read_text()[-2000:] for path in server.folder.glob("*.log"))
                raise AssertionError(f"{server.name}: {process.args} ended with {process.returncode}\n{logs}")
        try:
            if server.raw("GET", "/readyz")[0] == 200:
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"{server.name}: not ready after {START_SECONDS} s")
        time.sleep(0.05)


def free_port() -> int:
    """A loopback port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test-ca")])
    builder = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = builder.add_extension(usage, critical=True).add_extension(identifier, critical=False)
    return builder.sign(key, hashes.SHA256()), key


def _issue(
    authority: x509.Certificate, signer: ec.EllipticCurvePrivateKey, name: str, group: str | None
) -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if group:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = _builder(x509.Name(attributes), authority.subject, key)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(issuer, critical=False)
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode(), _pem(key)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    ).decode()
