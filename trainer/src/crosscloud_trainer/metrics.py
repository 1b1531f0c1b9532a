"""Prometheus metrics of one replica, served by its rank 0. Names have one prefix and base units."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from crosscloud_trainer.contract import RunDocument
from crosscloud_trainer.contract.report import seconds_of
from crosscloud_trainer.journal import LOSS_STEPS, Journal

PREFIX = "crosscloud_trainer_"


class RunCollector(Collector):
    """Turns a journal into metric families at each scrape. Labels `training_job` and `replica` are on all of them."""

    def __init__(self, journal: Journal, run: RunDocument, replica: int) -> None:
        self._journal = journal
        self._own = [run.job.name, str(replica)]
        incarnation = run.replica(replica).incarnation
        self._info = {"version": package_version(), "attempt": str(run.attempt), "incarnation": str(incarnation)}

    def collect(self) -> Iterator[Metric]:
        info = InfoMetricFamily(
            PREFIX.rstrip("_"), "Version and place of this replica", labels=["training_job", "replica"]
        )
        info.add_metric(self._own, self._info)
        yield info
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        progress = self._journal.progress
        age = max(0.0, time.time() - seconds_of(progress.saved_at)) if progress.saved_at else None
        ratio = progress.dense_bytes / progress.wan_bytes_sent if progress.wan_bytes_sent else None
        for name, text, value in (
            ("loss", f"Training loss, mean of the last {LOSS_STEPS} steps and of the ranks", progress.loss),
            ("validation_loss", "Loss of the last evaluation", progress.validation_loss),
            ("validation_perplexity", "Perplexity of the last evaluation", progress.perplexity),
            ("best_validation_loss", "The lowest loss of an evaluation so far", progress.best_validation_loss),
            ("best_step", "Inner step after which that was measured", progress.best_step),
            ("step", "Inner steps done", progress.step),
            ("steps", "Inner steps planned", progress.total_steps),
            ("round", "Rounds done", progress.round),
            ("tokens_per_second", "Tokens trained per second, mean over the last steps", progress.tokens_per_second),
            ("compression_ratio", "Bytes of an exchange in fp32 at every step over those that were sent", ratio),
            ("unsaved_steps", "Inner steps since the last checkpoint, or since the start", progress.unsaved_steps),
            ("checkpoint_age_seconds", "Time since the last checkpoint, or since the start", age),
            ("residual_norm", "Norm of what encoding has lost and later updates bring", progress.residual_norm),
        ):
            if value is not None:
                yield self._gauge(name, text, value)

    def _counters(self) -> Iterator[Metric]:
        journal, progress = self._journal, self._journal.progress
        yield self._counter("tokens", "Tokens trained", progress.tokens)
        yield self._counter("skipped_steps", "Steps skipped for gradients that were not finite", progress.skipped_steps)
        yield self._counter(
            "skipped_rounds", "Rounds without this replica's update, which was not finite", progress.skipped_rounds
        )
        yield self._counter(
            "dense_bytes", "What an exchange in fp32 at every step would have sent", progress.dense_bytes
        )
        yield self._counter(
            "digest_mismatches", "Rounds before which replicas' outer states differed", progress.digest_mismatches
        )
        seconds = self._labelled("seconds", "Time by activity", "activity")
        for activity, value in journal.seconds.items():
            seconds.add_metric([*self._own, activity], max(0.0, value))
        yield seconds
        refusals = self._labelled("link_refusals", "Connections refused, by reason", "reason")
        for reason, count in journal.refusals.items():
            refusals.add_metric([*self._own, reason], count)
        yield refusals
        sent = self._labelled("wan_sent_bytes", "Bytes sent over the link", "peer", "kind")
        received = self._labelled("wan_received_bytes", "Bytes received over the link", "peer", "kind")
        for part in progress.wan:
            place = [*self._own, str(part.replica), part.kind]
            sent.add_metric(place, part.sent)
            received.add_metric(place, part.received)
        yield sent
        yield received

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["training_job", "replica"])
        family.add_metric(self._own, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = self._labelled(name, text)
        family.add_metric(self._own, value)
        return family

    def _labelled(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(PREFIX + name, text, labels=["training_job", "replica", *labels])


class Server:
    """A running metrics endpoint."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server, self._thread = server, thread

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(journal: Journal, run: RunDocument, replica: int, port: int) -> Server:
    """Serve /metrics on `port` in a thread that ends with the process. Raises OSError where the port is taken."""
    registry = CollectorRegistry()
    registry.register(RunCollector(journal, run, replica))
    return Server(*start_http_server(port, registry=registry))


def package_version() -> str:
    """Version of the installed trainer; "source" where it runs from a checkout that isn't installed."""
    try:
        return version("crosscloud-trainer")
    except PackageNotFoundError:
        return "source"
