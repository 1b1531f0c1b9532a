"""A plain-HTTP proxy in front of a real API server that can be told to misbehave.

Clients connect to `url` without TLS; the proxy speaks to the API server as its administrator. Everything is passed on
as it comes, until a fault is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from apiserver import ApiServer

EXPIRED: dict[str, Any] = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "message": "too old resource version: 1 (2)",
    "reason": "Expired",
    "code": 410,
}


@dataclass
class FaultProxy:
    """Faults hold until they are taken back. `requests` counts what came, by (method, is it a watch)."""

    url: str = ""
    hang: bool = False  # answer nothing at all
    hang_watches: bool = False  # open watches, then send nothing, not even bookmarks
    watch_status: int = 0  # answer watches with this status
    watch_event: dict[str, Any] | None = None  # send this ERROR event, then end the watch
    list_status: int = 0  # answer lists with this status
    expire_continue: int = 0  # so many lists fail with 410 at their second page
    garbage: bytes = b""  # send this in place of watch events
    requests: dict[tuple[str, bool], int] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    _streams: set[asyncio.Task[Any]] = field(default_factory=set)

    def count(self, method: str = "GET", *, watch: bool = False) -> int:
        return self.requests.get((method, watch), 0)

    def cut(self) -> None:
        """Break every open stream in the middle."""
        for task in set(self._streams):
            task.cancel()

    async def answer(self, request: web.Request, upstream: aiohttp.ClientSession, target: str) -> web.StreamResponse:
        watch = request.query.get("watch") == "true"
        key = (request.method, watch)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.paths.append(request.path_qs)
        if self.hang:
            await asyncio.sleep(3600)
        if watch and self.watch_status:
            return web.json_response({**EXPIRED, "code": self.watch_status}, status=self.watch_status)
        if watch and (self.watch_event or self.garbage or self.hang_watches):
            return await self._misbehaving_watch(request)
        if not watch and request.method == "GET" and self.list_status:
            return web.json_response({**EXPIRED, "code": self.list_status}, status=self.list_status)
        if "continue" in request.query and self.expire_continue:
            self.expire_continue -= 1
            return web.json_response(EXPIRED, status=410)
        return await self._pass_on(request, upstream, target)

    async def _misbehaving_watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if self.watch_event:
            await response.write(json.dumps({"type": "ERROR", "object": self.watch_event}).encode() + b"\n")
        if self.garbage:
            await response.write(self.garbage)
        while self.hang_watches:  # noqa: ASYNC110 - an attribute that tests set, seen soon enough
            await asyncio.sleep(0.02)
        return response

    async def _pass_on(self, request: web.Request, upstream: aiohttp.ClientSession, target: str) -> web.StreamResponse:
        headers = {key: request.headers[key] for key in ("Content-Type", "Accept") if key in request.headers}
        body = await request.read()
        async with upstream.request(
            request.method, target + request.path_qs, headers=headers, data=body or None
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            except asyncio.CancelledError:
                if request.transport is not None:
                    request.transport.abort()
                raise
            finally:
                self._streams.discard(task)
                if answer.connection is not None and answer.connection.transport is not None:
                    answer.connection.transport.abort()
            return response


@contextlib.asynccontextmanager
async def fault_proxy(server: ApiServer) -> AsyncIterator[FaultProxy]:
    """A proxy in front of `server`, on a port of its own."""
    context = ssl.create_default_context(cadata=server.ca)
    context.load_cert_chain(server.folder / "admin.pem")
    proxy = FaultProxy()
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=unlimited, auto_decompress=True) as upstream:

        async def handle(request: web.Request) -> web.StreamResponse:
            return await proxy.answer(request, upstream, server.url)

        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield proxy
        finally:
            proxy.hang = proxy.hang_watches = False
            proxy.cut()
            await runner.cleanup()
