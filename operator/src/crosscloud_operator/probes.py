"""The operator's HTTP port: /metrics, /healthz (this process should go on), /readyz (it leads and sees the hub)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Check = Callable[[], str]  # what is wrong, or an empty text


@contextlib.asynccontextmanager
async def serve(host: str, port: int, registry: CollectorRegistry, healthy: Check, ready: Check) -> AsyncIterator[int]:
    """Serve until the block ends; yields the port (chosen by the system where 0 was asked for)."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def probe(check: Check) -> Callable[[web.Request], object]:
        async def answer(_: web.Request) -> web.Response:
            problem = check()
            return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

        return answer

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", probe(healthy))  # type: ignore[arg-type]
    app.router.add_get("/readyz", probe(ready))  # type: ignore[arg-type]
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
