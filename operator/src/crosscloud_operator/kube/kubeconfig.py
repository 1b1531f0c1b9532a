"""Reading a member's kubeconfig that comes from someone who may be hostile. Pure: opens nothing, runs nothing.

A kubeconfig can name programs to run (`exec`), files to read and proxies to trust; in the operator all of that would
happen with the operator's rights. So the stored form is narrow: one context, an https server that is verified, and a
token or a client certificate, all as contents. Everything else is refused by the field's name, with the way out.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from crosscloud_operator.kube.access import Access

MAX_BYTES = 32 * 1024  # a file for one context is a few KiB; parsing a large one would hold everyone else up

_WAY_OUT = "`crosscloud member add NAME --kubeconfig FILE` makes and stores a service-account token instead"
_FLATTEN = "`kubectl config view --raw --minify --flatten --context=NAME` prints such a file"
_INLINE = f"a path would be read on the operator's machine: {_FLATTEN}, or {_WAY_OUT}"

_REFUSED_CLUSTER = {
    "certificate-authority": f"use certificate-authority-data; {_INLINE}",
    "proxy-url": "proxies are not used; give an address that the operator reaches directly",
}
_REFUSED_USER = {
    "exec": f"a program would run with the operator's rights; {_WAY_OUT}",
    "auth-provider": f"a program would run with the operator's rights; {_WAY_OUT}",
    "tokenFile": f"use token; {_INLINE}",
    "client-certificate": f"use client-certificate-data; {_INLINE}",
    "client-key": f"use client-key-data; {_INLINE}",
    "username": f"API servers take no passwords; {_WAY_OUT}",
    "password": f"API servers take no passwords; {_WAY_OUT}",
    "as": f"impersonation is not used; {_WAY_OUT}",
    "as-uid": f"impersonation is not used; {_WAY_OUT}",
    "as-groups": f"impersonation is not used; {_WAY_OUT}",
    "as-user-extra": f"impersonation is not used; {_WAY_OUT}",
}
_KNOWN_CLUSTER = {
    "server",
    "certificate-authority-data",
    "tls-server-name",
    "insecure-skip-tls-verify",
    "disable-compression",
    "extensions",
}
_KNOWN_USER = {"token", "client-certificate-data", "client-key-data", "extensions"}


class KubeconfigRefused(ValueError):
    """A kubeconfig that may not be used; `problems` names each field and the way out."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


@dataclass(frozen=True)
class _Entry:
    """One named item of `clusters`, `users` or `contexts`, with its path for messages."""

    path: str
    name: str
    body: Mapping[str, Any]


def vet(text: str | bytes) -> Access:
    """The access that a kubeconfig gives. Raises KubeconfigRefused with every problem found."""
    document = _document(text)
    problems: list[str] = []
    clusters = _entries(document, "clusters", "cluster", problems)
    users = _entries(document, "users", "user", problems)
    contexts = _entries(document, "contexts", "context", problems)
    # Every entry counts, the unused ones too: a file that carries a trap is not one to keep.
    for entry in clusters:
        problems += _cluster_problems(entry)
    for entry in users:
        problems += _user_problems(entry)
    context = _context(document, contexts, problems)
    cluster = _named(context, "cluster", clusters, problems)
    user = _named(context, "user", users, problems)
    if problems:
        raise KubeconfigRefused(problems)
    assert cluster is not None
    assert user is not None
    return _access(cluster, user)


def render(access: Access, member: str, token: str) -> str:
    """A kubeconfig that `vet` accepts: one context with a token, contents only."""
    cluster: dict[str, Any] = {"server": access.server}
    if access.ca:
        cluster["certificate-authority-data"] = base64.b64encode(access.ca.encode()).decode()
    if access.tls_server_name:
        cluster["tls-server-name"] = access.tls_server_name
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": member, "cluster": cluster}],
        "users": [{"name": member, "user": {"token": token}}],
        "contexts": [{"name": member, "context": {"cluster": member, "user": member}}],
        "current-context": member,
    }
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 2**20
    stream = StringIO()
    yaml.dump(document, stream)
    return stream.getvalue()


def _document(text: str | bytes) -> Mapping[str, Any]:
    if len(text) > MAX_BYTES:
        raise KubeconfigRefused([f"(document): {len(text)} bytes; at most {MAX_BYTES} are read: {_FLATTEN}"])
    try:
        if isinstance(text, bytes):
            text = text.decode()
        data = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, UnicodeDecodeError, ValueError, RecursionError, TypeError) as fault:
        where = getattr(fault, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        words = getattr(fault, "problem", None) or type(fault).__name__
        raise KubeconfigRefused([f"(document): not YAML{line}: {words}; {_FLATTEN}"]) from fault
    if data is None:
        raise KubeconfigRefused([f"(document): empty; must be a kubeconfig: {_FLATTEN}"])
    if not isinstance(data, Mapping):
        raise KubeconfigRefused([f"(document): found {_shown(data)}; must be a kubeconfig: {_FLATTEN}"])
    if data.get("kind", "Config") != "Config":
        raise KubeconfigRefused([f"kind: found {_shown(data['kind'])}; must be Config"])
    return data


def _entries(document: Mapping[str, Any], field: str, inner: str, problems: list[str]) -> list[_Entry]:
    found = document.get(field)
    if not isinstance(found, list) or not found:
        problems.append(f"{field}: found {_shown(found)}; must be a list with one entry")
        return []
    entries: list[_Entry] = []
    for number, item in enumerate(found):
        path = f"{field}[{number}]"
        name = item.get("name") if isinstance(item, Mapping) else None
        body = item.get(inner) if isinstance(item, Mapping) else None
        if not isinstance(name, str) or not name or not isinstance(body, Mapping):
            problems.append(f"{path}: must have a name and a {inner}")
            continue
        if any(entry.name == name for entry in entries):
            problems.append(f"{path}.name: {_shown(name)} is there twice; names must differ")
        entries.append(_Entry(f"{path}.{inner}", name, body))
    return entries


def _context(document: Mapping[str, Any], contexts: list[_Entry], problems: list[str]) -> _Entry | None:
    if len(contexts) > 1:
        names = ", ".join(entry.name for entry in contexts)
        problems.append(
            f"contexts: found {len(contexts)} ({names[:200]}); exactly one is allowed, so that nobody has to guess "
            f"and no other cluster's credentials are stored: {_FLATTEN}"
        )
    current = document.get("current-context")
    if not isinstance(current, str) or not current:
        problems.append(f"current-context: found {_shown(current)}; must name the context to use: {_FLATTEN}")
        return None
    context = next((entry for entry in contexts if entry.name == current), None)
    if context is None and contexts:
        problems.append(f"current-context: there is no context {_shown(current)} in contexts: {_FLATTEN}")
    return context


def _named(context: _Entry | None, field: str, entries: list[_Entry], problems: list[str]) -> _Entry | None:
    if context is None:
        return None
    name = context.body.get(field)
    found = next((entry for entry in entries if entry.name == name), None)
    if found is None and entries:
        problems.append(f"{context.path}.{field}: there is no {field} {_shown(name)} in {field}s")
    return found


def _cluster_problems(entry: _Entry) -> Iterator[str]:
    for field, value in entry.body.items():
        if field in _REFUSED_CLUSTER:
            if value not in (None, ""):
                yield f"{entry.path}.{field}: not allowed: {_REFUSED_CLUSTER[field]}"
        elif field not in _KNOWN_CLUSTER:
            yield f"{entry.path}.{_shown(field)}: unknown field; allowed are {', '.join(sorted(_KNOWN_CLUSTER))}"
    if entry.body.get("insecure-skip-tls-verify") not in (None, False):
        yield (
            f"{entry.path}.insecure-skip-tls-verify: not allowed: whoever sits between would get the credentials; "
            "give certificate-authority-data"
        )
    yield from server_problems(f"{entry.path}.server", entry.body.get("server"))
    authority = entry.body.get("certificate-authority-data")
    if authority is not None and _certificates(authority) is None:
        yield f"{entry.path}.certificate-authority-data: must be base64 of PEM certificates"
    name = entry.body.get("tls-server-name")
    if name is not None and not _printable(name):
        yield f"{entry.path}.tls-server-name: found {_shown(name)}; must be a host name"


def server_problems(path: str, server: Any) -> Iterator[str]:
    """What is wrong with the address of an API server; `path` names its field."""
    allowed = "must be an address like https://host:6443"
    if not isinstance(server, str) or not _printable(server):
        yield f"{path}: found {_shown(server)}; {allowed}"
        return
    try:
        parts = urlsplit(server)
        _ = parts.port
    except ValueError as fault:
        yield f"{path}: found {_shown(server)}; {allowed} ({fault})"
        return
    if parts.scheme != "https":
        yield f"{path}: found {_shown(server)}; {allowed}: without TLS the credentials could be read on the way"
    elif not parts.hostname or parts.username is not None or parts.query or parts.fragment:
        yield f"{path}: found {_shown(server)}; {allowed}, without user, query or fragment"


def _user_problems(entry: _Entry) -> Iterator[str]:
    for field, value in entry.body.items():
        if field in _REFUSED_USER:
            if value not in (None, ""):
                yield f"{entry.path}.{field}: not allowed: {_REFUSED_USER[field]}"
        elif field not in _KNOWN_USER:
            yield f"{entry.path}.{_shown(field)}: unknown field; allowed are {', '.join(sorted(_KNOWN_USER))}"
    token = entry.body.get("token")
    certificate, key = entry.body.get("client-certificate-data"), entry.body.get("client-key-data")
    if token is not None and not _printable(token):
        yield f"{entry.path}.token: must be text without spaces or line ends"
    if (certificate is None) != (key is None):
        missing = "client-key-data" if key is None else "client-certificate-data"
        yield f"{entry.path}.{missing}: missing; certificate and key go together"
    elif certificate is not None and not _pair(certificate, key):
        yield f"{entry.path}.client-certificate-data: must be base64 of a PEM certificate to which client-key-data fits"
    if not any(entry.body.get(field) for field in (*_REFUSED_USER, *_KNOWN_USER)):
        yield f"{entry.path}: no credentials; must have a token, or client-certificate-data with client-key-data"


def _access(cluster: _Entry, user: _Entry) -> Access:
    authority = cluster.body.get("certificate-authority-data")
    certificate, key = user.body.get("client-certificate-data"), user.body.get("client-key-data")
    return Access(
        server=cluster.body["server"].rstrip("/"),
        ca=_decoded(authority) if authority is not None else None,
        token=user.body.get("token"),
        certificate=_decoded(certificate) if certificate is not None else None,
        key=_decoded(key) if key is not None else None,
        tls_server_name=cluster.body.get("tls-server-name"),
    )


def _decoded(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    try:
        return base64.b64decode("".join(value.split()), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _certificates(value: Any) -> list[x509.Certificate] | None:
    text = _decoded(value)
    try:
        return x509.load_pem_x509_certificates(text.encode()) if text else None
    except ValueError:
        return None


def _pair(certificate: Any, key: Any) -> bool:
    found, text = _certificates(certificate), _decoded(key)
    if not found or not text:
        return False
    try:
        private = load_pem_private_key(text.encode(), password=None)
    except (ValueError, TypeError):
        return False
    mine = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return mine == found[0].public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _printable(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and all("!" <= letter <= "~" for letter in value)


def _shown(value: Any) -> str:
    """A value for a message: short, and never a whole structure that may hold secrets."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping | list):
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
