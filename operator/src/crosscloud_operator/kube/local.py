"""Access as the person or pod that runs us has it: a service account's files, or the user's own kubeconfig.

Here, and only here, programs may be run and files be read, since they are the user's own (the client library does it).
Members' kubeconfigs never come this way: see kubeconfig.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from kubernetes import config
from kubernetes.client import Configuration
from kubernetes.config.config_exception import ConfigException

from crosscloud_operator.kube.access import Access

log = logging.getLogger(__name__)
READ_AGAIN_SECONDS = 60

# The library lets anything out: YAML, base64, OS and type errors.
_ANY = Exception


class NoAccess(Exception):
    """No usable credentials; the message says what was looked at and what to do."""


def in_cluster() -> Access:
    """The pod's service account, its token read anew (it rotates)."""
    found = Configuration(proxy="")  # none from the surroundings
    try:
        config.load_incluster_config(client_configuration=found)
    except ConfigException as fault:
        raise NoAccess(f"no service account in this pod: {fault}") from fault
    return _access(found, "the service account")


def user_kubeconfig(path: str | None, context: str | None = None, option: str = "kubeconfig") -> Access:
    """A user's kubeconfig (default: $KUBECONFIG, then ~/.kube/config) at one of its contexts (default: the current).

    `option` is what messages call the one that `path` comes from. Raises NoAccess.
    """
    name = _kubeconfig_file(path, option)
    if context is not None and (known := _contexts(name)) and context not in known:
        asked = option.replace("kubeconfig", "context")
        raise NoAccess(f"{asked}: there is no context {context!r} in {name!r}; it has {', '.join(known)[:400]}")
    found = Configuration(proxy="")  # none from the surroundings; one that the kubeconfig names is refused below
    try:
        config.load_kube_config(name, context, found, persist_config=False)
    except ConfigException as fault:
        raise NoAccess(f"kubeconfig {name!r}: {_words(fault)}") from fault
    except _ANY as fault:
        raise NoAccess(f"kubeconfig {name!r}: can't be read: {_words(fault)}") from fault
    return _access(found, f"kubeconfig {name!r}")


def _kubeconfig_file(path: str | None, option: str) -> str:
    """The name of a file, or several, of which one is there. Raises NoAccess that says where the name comes from."""
    variable, default = os.environ.get("KUBECONFIG"), str(Path.home() / ".kube" / "config")
    name = path if path is not None else variable or default
    parts = [Path(part).expanduser() for part in name.split(os.pathsep) if part]
    if any(part.is_file() for part in parts):
        return name
    if path is None and not variable:
        raise NoAccess(f"{option}: not given, KUBECONFIG isn't set, and there is no file {default!r}; give one of them")
    source = option if path is not None else "KUBECONFIG"
    folder = any(part.is_dir() for part in parts)
    found = "which is a folder" if folder else "but there is no such file" if name else "which names no file"
    more = "" if path is not None else f", or give {option}"
    raise NoAccess(f"{source}: found {name!r}, {found}; must be the path of a cluster's kubeconfig{more}")


def _contexts(name: str) -> list[str]:
    """The names of a kubeconfig's contexts; none where it can't be read, which loading it will tell."""
    try:
        return sorted(str(item["name"]) for item in config.list_kube_config_contexts(name)[0])
    except _ANY:
        return []


def is_in_cluster(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("KUBERNETES_SERVICE_HOST"))


def _access(found: Any, what: str) -> Access:
    if not str(found.host).startswith("https://"):
        raise NoAccess(f"{what}: server: found {found.host!r}; must be an https:// address")
    if not found.verify_ssl:
        raise NoAccess(f"{what}: insecure-skip-tls-verify: not allowed; give the server's certificate authority")
    if getattr(found, "proxy", None):
        raise NoAccess(f"{what}: proxy-url: proxies are not used; give an address that is reached directly")
    word = next((str(value) for value in found.api_key.values() if value), "")
    token = word.split(" ", 1)[-1].strip() or None
    certificate = _content(found.cert_file, f"{what}: client-certificate")
    if token is None and certificate is None:  # the library goes on without any where a program fails
        raise NoAccess(
            f"{what}: user: no token and no client certificate came of it; give one, or mend its exec command"
        )
    return Access(
        server=found.host.rstrip("/"),
        ca=_content(found.ssl_ca_cert, f"{what}: certificate-authority"),
        token=token,
        certificate=certificate,
        key=_content(found.key_file, f"{what}: client-key"),
        tls_server_name=getattr(found, "tls_server_name", None) or None,
    )


def _content(path: Any, what: str) -> str | None:
    try:
        return Path(path).read_text() if path else None
    except (OSError, ValueError) as fault:
        raise NoAccess(f"{what}: must be PEM text ({_words(fault)})") from fault


def _words(fault: BaseException) -> str:
    return " ".join(str(fault).split()) or type(fault).__name__


async def read_again(access: Callable[[], Access]) -> AsyncIterator[Access]:
    """The hub's access once a minute, for as long as it is asked for: a service account's token rotates in its file."""
    while True:
        await asyncio.sleep(READ_AGAIN_SECONDS)
        try:
            found = await asyncio.to_thread(access)
        except NoAccess as fault:
            log.warning("the hub's credentials can't be read again: %s", fault)
            continue
        yield found
