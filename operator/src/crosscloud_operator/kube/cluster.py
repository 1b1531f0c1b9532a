"""One API server by HTTP and raw JSON (`Cluster` of kube/api.py), and the paged lists and watches of the informers.

Raw JSON, not model classes: decoding thousands of pods costs a fraction. Nothing here retries; a call ends with the
answer, an ApiError, or its deadline.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp

from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.answers import Expired, Silent, error_of
from crosscloud_operator.kube.api import KINDS, ApiError, Conflict, Kind, NotFound, Obj, Ref, Unreachable

FIELD_MANAGER = "crosscloud-operator"
CONNECT_SECONDS = 5.0
CALL_SECONDS = 10.0
PAGE_SECONDS = 30.0
PAGE_ITEMS = 500
MAX_PAGES = 2_000
MAX_ANSWER_BYTES = 64 * 2**20
MAX_EVENT_BYTES = 8 * 2**20
QUIET = "Quiet"  # reason of the errors that stand for no call
QUIET_SECONDS = 5.0  # after a call that ran into its deadline, others fail at once for so long
RESTARTED_LISTS = 3

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"


def path_of(kind: Kind, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
    """The path of a resource on any API server."""
    root = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
    parts = [root]
    if namespace is not None:
        parts += ["namespaces", quote(namespace, safe="")]
    parts.append(kind.plural)
    if name is not None:
        parts.append(quote(name, safe=""))
    if subresource is not None:
        parts.append(subresource)
    return "/".join(parts)


class HttpCluster:
    """The Cluster protocol over HTTPS. `replace` changes the credentials under way; `close` ends everything."""

    def __init__(self, name: str, access: Access) -> None:
        self.name = name
        self._access = access
        self._session: aiohttp.ClientSession | None = None
        self._retired: dict[aiohttp.ClientSession, asyncio.Task[None]] = {}
        self._watches: set[aiohttp.ClientResponse] = set()
        self._quiet_until = 0.0

    @property
    def access(self) -> Access:
        return self._access

    async def replace(self, access: Access) -> None:
        """From now on use other credentials. Watches are cut and go on by new connections; calls under way end as they
        would have."""
        if access == self._access:
            return
        self._access = access
        self._quiet_until = 0.0
        session, self._session = self._session, None
        self._cut_watches()
        if session is not None:
            task = asyncio.get_running_loop().create_task(_close_later(session), name=f"{self.name}: old connections")
            self._retired[session] = task
            task.add_done_callback(lambda _: self._retired.pop(session, None))

    async def close(self) -> None:
        self._cut_watches()
        session, self._session = self._session, None
        retired, self._retired = self._retired, {}
        for task in retired.values():
            task.cancel()
        for item in (*retired, *([session] if session else [])):
            await item.close()

    def _cut_watches(self) -> None:
        # Closing a session alone leaves its readers waiting.
        for response in tuple(self._watches):
            response.close()

    async def get(self, ref: Ref) -> Obj | None:
        try:
            return await self._object("GET", _path(ref))
        except NotFound:
            return None

    async def list(self, kind: Kind, *, namespace: str | None = None, selector: str | None = None) -> Sequence[Obj]:
        items, _ = await self.list_versioned(kind, namespace=namespace, selector=selector)
        return items

    async def create(self, obj: Obj) -> Obj:
        # Strict: a misspelt field of a user's podTemplate is refused by name, not dropped in silence.
        params = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        kind = KINDS[obj["kind"]]
        path = path_of(kind, obj["metadata"].get("namespace") if kind.namespaced else None)
        return await self._object("POST", path, params=params, body=obj)

    async def json_patch(self, ref: Ref, operations: Sequence[Obj]) -> Obj:
        return await self._object("PATCH", _path(ref), params=_MANAGER, body=list(operations), content_type=JSON_PATCH)

    async def merge_patch(self, ref: Ref, patch: Obj, *, subresource: str | None = None) -> Obj:
        path = _path(ref, subresource)
        uid = (patch.get("metadata") or {}).get("uid")
        try:
            return await self._object("PATCH", path, params=_MANAGER, body=patch, content_type=MERGE_PATCH)
        except ApiError as fault:
            # Another UID is refused as the change of an immutable field, as a 409 or as a 422.
            if uid is not None and "metadata.uid" in fault.message:
                raise Conflict(fault.message, reason=fault.reason) from fault
            raise

    async def delete(self, ref: Ref, *, uid: str) -> None:
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        try:
            await self._object("DELETE", _path(ref), body=options)
        except NotFound:
            return

    async def version(self) -> str:
        """The server's version, like v1.34.4."""
        return str((await self._object("GET", "/version")).get("gitVersion", ""))

    async def request_token(self, namespace: str, account: str, seconds: int) -> Obj:
        """`status` of a TokenRequest: token and expirationTimestamp. The server may grant less time than asked."""
        path = path_of(_ACCOUNT, namespace, account, "token")
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        status: Obj = (await self._object("POST", path, body=body))["status"]
        return status

    async def list_versioned(
        self, kind: Kind, *, namespace: str | None = None, selector: str | None = None
    ) -> tuple[Sequence[Obj], str]:
        """A complete list and the resourceVersion from which a watch goes on."""
        for _ in range(RESTARTED_LISTS):
            try:
                return await self._pages(kind, namespace, selector, PAGE_ITEMS)
            except Expired:  # the snapshot of the first page is gone: half of an old list is no list
                continue
        return await self._pages(kind, namespace, selector, 0)

    async def _pages(
        self, kind: Kind, namespace: str | None, selector: str | None, limit: int
    ) -> tuple[Sequence[Obj], str]:
        path = path_of(kind, namespace)
        base: dict[str, str] = {"limit": str(limit)} if limit else {}
        if selector:
            base["labelSelector"] = selector
        found: list[Obj] = []
        proceed = ""
        for _ in range(MAX_PAGES):
            params = {**base, "continue": proceed} if proceed else base
            page = await self._object("GET", path, params=params, deadline=PAGE_SECONDS)
            try:
                items, meta = page.get("items") or [], page.get("metadata") or {}
                found += [{**item, "apiVersion": kind.api_version, "kind": kind.kind} for item in items]
                proceed, version = str(meta.get("continue") or ""), str(meta.get("resourceVersion") or "")
            except (TypeError, AttributeError) as fault:
                raise Unreachable(f"{self.name}: a list of {kind.plural} that can't be read") from fault
            if not proceed:
                return found, version
        raise Unreachable(f"{self.name}: the list of {kind.plural} doesn't end")

    async def watch(
        self,
        kind: Kind,
        version: str,
        *,
        namespace: str | None = None,
        selector: str | None = None,
        seconds: float,
        inactivity: float,
    ) -> AsyncGenerator[tuple[str, Obj], None]:
        """Changes since `version`: (OPENED, {}) once, then (ADDED | MODIFIED | DELETED | BOOKMARK, object).

        Ends after `seconds` by the server's clock. Raises Expired (the answer or an event says 410), Silent where
        nothing at all, not even a bookmark, comes for `inactivity` seconds, Unreachable where the connection breaks.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(seconds)),
        }
        if selector:
            params["labelSelector"] = selector
        limits = aiohttp.ClientTimeout(total=seconds + 30, connect=CONNECT_SECONDS, sock_read=inactivity)
        try:
            async with self._open("GET", path_of(kind, namespace), params=params, limits=limits) as response:
                if response.status >= 300:
                    raise error_of("GET", response.status, await _read(response))
                self._watches.add(response)
                try:
                    yield "OPENED", {}
                    async for line in _lines(response):
                        yield _event(kind, line)
                finally:
                    self._watches.discard(response)
                    _drop(response)
        except aiohttp.SocketTimeoutError as fault:
            raise Silent(f"{self.name}: watch: nothing came for {inactivity:g} s") from fault
        except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as fault:
            raise _unreachable(self.name, "watch", fault) from fault

    async def _object(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        deadline: float = CALL_SECONDS,
    ) -> Obj:
        if time.monotonic() < self._quiet_until:
            raise Unreachable(f"{self.name}: no answer a moment ago", reason=QUIET)
        limits = aiohttp.ClientTimeout(total=deadline, connect=CONNECT_SECONDS)
        try:
            opened = self._open(method, path, params=params, limits=limits, body=body, content_type=content_type)
            async with opened as response:
                data = await _read(response)
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as fault:
            if isinstance(fault, TimeoutError):
                self._quiet_until = time.monotonic() + QUIET_SECONDS
            raise _unreachable(self.name, f"{method} {path}", fault) from fault
        if status >= 300:
            raise error_of(method, status, data)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as fault:
            raise Unreachable(f"{self.name}: {method} {path}: the answer is no JSON") from fault
        if not isinstance(answer, dict):
            raise Unreachable(f"{self.name}: {method} {path}: the answer is no object")
        return answer

    def _open(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None,
        limits: aiohttp.ClientTimeout,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        headers = {"Accept": "application/json", "User-Agent": FIELD_MANAGER}
        if self._access.token:
            headers["Authorization"] = f"Bearer {self._access.token}"
        if body is not None:
            headers["Content-Type"] = content_type
        return self._connected().request(
            method,
            self._access.server.rstrip("/") + path,
            params=params,
            headers=headers,
            data=None if body is None else json.dumps(body).encode(),
            timeout=limits,
            allow_redirects=False,  # credentials go to the server that was named and to no other
            server_hostname=self._access.tls_server_name,
        )

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            try:
                context = self._access.ssl_context()
            except (ssl.SSLError, ValueError) as fault:
                raise Unreachable(f"{self.name}: certificate or key can't be used: {fault}") from fault
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context, limit=64),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,  # no proxy and no .netrc from the operator's surroundings
            )
        return self._session


_ACCOUNT = KINDS["ServiceAccount"]
_MANAGER = {"fieldManager": FIELD_MANAGER}


async def _close_later(session: aiohttp.ClientSession) -> None:
    """When every call that was under way has ended by its deadline."""
    await asyncio.sleep(PAGE_SECONDS)
    await session.close()


def _path(ref: Ref, subresource: str | None = None) -> str:
    return path_of(ref.kind, ref.namespace if ref.kind.namespaced else None, ref.name, subresource)


def _unreachable(name: str, call: str, fault: BaseException) -> Unreachable:
    words = "no answer in time" if isinstance(fault, TimeoutError) else str(fault) or type(fault).__name__
    return Unreachable(f"{name}: {call}: {words}", reason=type(fault).__name__)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, up to a limit: a server that lies may not fill our memory."""
    data = bytearray()
    async for chunk in response.content.iter_chunked(2**18):
        data += chunk
        if len(data) > MAX_ANSWER_BYTES:
            raise Unreachable(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(data)


def _drop(response: aiohttp.ClientResponse) -> None:
    """End a stream that isn't over at once: a TLS farewell to a server that hangs would take half a minute."""
    if (connection := response.connection) is not None and connection.transport is not None:
        connection.transport.abort()


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length up to the limit (the stream's own reader ends at 128 KiB)."""
    rest = bytearray()
    async for chunk in response.content.iter_any():
        rest += chunk
        if b"\n" in chunk:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                if line.strip():
                    yield line
        if len(rest) > MAX_EVENT_BYTES:
            raise Unreachable(f"a watch event of more than {MAX_EVENT_BYTES} bytes")


def _event(kind: Kind, line: bytes) -> tuple[str, Obj]:
    try:
        event = json.loads(line)
        word, obj = str(event["type"]), event["object"]
        code = int(obj.get("code", 0)) if word == "ERROR" else 0
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise Unreachable(f"a watch event that can't be read: {line[:80]!r}") from fault
    if word == "ERROR":
        raise error_of("GET", code if code >= 300 else 500, json.dumps(obj).encode())
    return word, {**obj, "apiVersion": kind.api_version, "kind": kind.kind}
