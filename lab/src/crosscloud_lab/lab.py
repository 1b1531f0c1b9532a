"""The lab as a whole: `up`, `down`, `status` and its links, for the command line, the demo and tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from crosscloud_lab import cgroups, network, preflight, storage
from crosscloud_lab.archive import write_busybox_archive
from crosscloud_lab.binaries import Binaries
from crosscloud_lab.cluster import Cluster, ClusterStatus
from crosscloud_lab.components import SANDBOX_IMAGE
from crosscloud_lab.errors import LabError
from crosscloud_lab.layout import ClusterFiles
from crosscloud_lab.limits import raise_limits, restore_limits
from crosscloud_lab.network import LinkState
from crosscloud_lab.packages import find_tool
from crosscloud_lab.paths import cache_dir, state_dir
from crosscloud_lab.plan import LabPlan, lab_id, plan_lab, wan_interface
from crosscloud_lab.progress import Progress, SilentProgress
from crosscloud_lab.sandbox import Sandbox
from crosscloud_lab.shell import run
from crosscloud_lab.spec import LabSpec, rate_bits
from crosscloud_lab.state import LabState
from crosscloud_lab.storage import S3

T = TypeVar("T")


@dataclass(frozen=True)
class LinkStatus:
    """A WAN link; `sent` counts bytes on the interface of each end: (first to second, second to first).

    A count is None where the cluster doesn't run.
    """

    between: tuple[str, str]
    rate: str
    cut: bool
    sent: tuple[int | None, int | None]


@dataclass(frozen=True)
class LabStatus:
    name: str
    ready: bool
    clusters: tuple[ClusterStatus, ...]
    links: tuple[LinkStatus, ...]
    s3: str
    s3_ready: bool


class Lab:
    """A lab described by `spec`. Every method raises LabError with a message for the user."""

    def __init__(self, spec: LabSpec, progress: Progress | None = None) -> None:
        self.spec = spec
        self.plan: LabPlan = plan_lab(spec)
        self._progress = progress or SilentProgress()
        self._state = LabState(state_dir(spec.name))
        self._binaries = Binaries(cache_dir())
        group = cgroups.ledger_root() / self.plan.cgroup / "clusters"
        self._clusters = {}
        for cluster in self.plan.clusters:
            files = ClusterFiles(self._state.folder / "clusters" / cluster.name)
            sandbox = Sandbox(group / cluster.name, files.root)
            self._clusters[cluster.name] = Cluster(cluster, files, sandbox, self._binaries, self.plan.cgroup)

    @classmethod
    def open(cls, name: str, progress: Progress | None = None) -> Lab:
        """A lab that `up` has brought up before, by name."""
        return cls(LabState(state_dir(name)).spec(), progress)

    def check(self) -> None:
        """Whether this machine carries the lab, before anything is built for it; installs missing system packages."""
        preflight.require_root()
        with self._state.locked():
            self._check(self._same_lab())

    def up(self) -> None:
        """Brings up whatever isn't; a healthy lab is left as it is."""
        preflight.require_root()
        with self._state.locked():
            known = self._same_lab()
            self._check(known)
            if not known:
                _remove_leftovers(self.spec.name)
            self._binaries.ensure(self._progress)
            self._state.save_spec(self.spec)
            raise_limits()
            with self._progress.phase("networks"):
                self._networks_up()
            busybox = self._busybox()
            _in_parallel([partial(self._cluster_up, cluster, busybox) for cluster in self._clusters.values()])
            with self._progress.phase("S3 server"):
                storage.up(self.plan, self._storage_sandbox(), self._state, self._binaries)

    def down(self) -> None:
        """Removes the lab and everything it made, but not the cache."""
        remove_lab(self.spec.name, self._progress)

    def status(self) -> LabStatus:
        """What runs and what doesn't."""
        self._known()
        clusters = tuple(_in_parallel([cluster.status for cluster in self._clusters.values()]))
        links = tuple(
            LinkStatus(pair, link.rate, link.cut, (self._counted(*pair), self._counted(*reversed(pair))))
            for pair, link in self._state.links(self.spec).items()
        )
        s3 = storage.daemon(self.plan, self._state.folder / "s3", self._binaries)
        stored = self._storage_sandbox().alive(s3)
        ready = stored and all(cluster.ready for cluster in clusters)
        return LabStatus(self.spec.name, ready, clusters, links, self.plan.storage_url, stored)

    def cluster(self, name: str) -> Cluster:
        """A cluster of the lab by name."""
        if name not in self._clusters:
            raise LabError(f"cluster {name!r} is not in lab {self.spec.name}; it has {', '.join(self._clusters)}")
        return self._clusters[name]

    def clusters(self) -> list[Cluster]:
        """All clusters, in the order of the lab file."""
        return list(self._clusters.values())

    def kubeconfig(self, name: str) -> Path:
        """File with the administrator's kubeconfig of a cluster."""
        cluster = self.cluster(name)
        self._known()
        return cluster.files.admin_kubeconfig

    def kubectl(self, name: str, *arguments: str, stdin: str | None = None, timeout: float = 120) -> str:
        """Output of kubectl, as administrator of a cluster."""
        command = [str(self._binaries.path("kubectl")), f"--kubeconfig={self.kubeconfig(name)}", *arguments]
        return run(command, stdin=stdin, timeout=timeout)

    def binary(self, name: str) -> Path:
        """Path of a cached program such as kubectl or helm."""
        return self._binaries.path(name)

    @property
    def s3(self) -> S3:
        """Endpoint and keys of the object store."""
        self._known()
        return storage.access(self.plan, self._state)

    def s3_environment(self) -> dict[str, str]:
        """The object store as environment variables, the way S3 clients read them."""
        store = self.s3
        return {
            "AWS_ENDPOINT_URL": store.endpoint,
            "AWS_DEFAULT_REGION": store.region,
            "AWS_ACCESS_KEY_ID": store.access_key,
            "AWS_SECRET_ACCESS_KEY": store.secret_key,
        }

    def set_rate(self, a: str, b: str, rate: str) -> None:
        """Sets the rate of the link between two clusters, both ways: `20mbit`, `unlimited`."""
        try:
            rate_bits(rate)
        except ValueError as error:
            raise LabError(f"rate: {error}") from error
        self._change([self._pair(a, b)], lambda link: replace(link, rate=rate))

    def cut(self, a: str, b: str) -> None:
        """Drops everything between two clusters without a word to anyone."""
        self._change([self._pair(a, b)], lambda link: replace(link, cut=True))

    def heal(self, a: str | None = None, b: str | None = None) -> list[tuple[str, str]]:
        """Ends the cut between two clusters, or every cut; the links that were cut."""
        if (a is None) != (b is None):
            raise LabError("heal: name both clusters of the link, or none to heal every link")
        pairs = self.plan.pairs() if a is None or b is None else [self._pair(a, b)]
        before = self._change(pairs, lambda link: replace(link, cut=False))
        return [pair for pair in pairs if before[pair].cut]

    def wan_bytes(self) -> dict[tuple[str, str], int]:
        """Bytes sent from one cluster to another, (from, to) to count, since their interfaces were made."""
        self._known()
        return {(a, b): self._sent(a, b) for pair in self.plan.pairs() for a, b in (pair, pair[::-1])}

    def enter(self, target: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in the namespaces of a cluster, named by itself or a node."""
        for cluster in self.plan.clusters:
            if target in (cluster.name, *(node.name for node in cluster.nodes)):
                return self.cluster(cluster.name).sandbox.enter(command)
        nodes = [node.name for cluster in self.plan.clusters for node in cluster.nodes]
        raise LabError(f"{target!r} is no cluster ({', '.join(self._clusters)}) and no node ({', '.join(nodes)})")

    def _same_lab(self) -> bool:
        """Whether this lab is known already; LabError when another one of its name is."""
        if not self._state.exists():
            return False
        if self._state.spec() != self.spec:
            raise LabError(
                f"lab {self.spec.name} exists with another lab file: run "
                f"`crosscloud-lab --lab {self.spec.name} down` first, or choose another name and network"
            )
        return True

    def _check(self, known: bool) -> None:
        preflight.check(self.plan, self._state.folder, cache_dir(), known, self._progress)

    def _known(self) -> None:
        self._state.spec()

    def _storage_sandbox(self) -> Sandbox:
        return self._clusters[self.plan.storage_cluster.name].sandbox

    def _networks_up(self) -> None:
        sandboxes = {name: cluster.sandbox for name, cluster in self._clusters.items()}
        for cluster in self.plan.clusters:
            sandboxes[cluster.name].ensure()
        for cluster in self.plan.clusters:
            network.connect_host(cluster, sandboxes[cluster.name], self.plan)
        for a, b in self.plan.pairs():
            network.connect_pair(self.plan, a, b, sandboxes)
        links = self._state.links(self.spec)
        self._state.save_links(links)
        self._apply_links(links, self.plan.pairs())

    def _cluster_up(self, cluster: Cluster, busybox: Path) -> None:
        with self._progress.phase(f"cluster {cluster.plan.name}") as note:
            cluster.prepare()
            cluster.up(busybox, note)

    def _busybox(self) -> Path:
        target = self._state.folder / "busybox.tar"
        if not target.exists():
            program = find_tool("busybox") or "busybox"
            applets = [name for name in run([program, "--list"]).split() if name != "busybox"]
            write_busybox_archive(Path(program), applets, target, SANDBOX_IMAGE)
        return target

    def _pair(self, a: str, b: str) -> tuple[str, str]:
        for name in (a, b):
            self.cluster(name)
        if a == b:
            raise LabError(f"link: {a!r} and {b!r} are the same cluster; name two")
        return (a, b) if (a, b) in self.plan.pairs() else (b, a)

    def _change(
        self, pairs: list[tuple[str, str]], change: Callable[[LinkState], LinkState]
    ) -> dict[tuple[str, str], LinkState]:
        """Changes links; all of them as they were before."""
        self._known()
        with self._state.locked():
            before = self._state.links(self.spec)
            links = before | {pair: change(before[pair]) for pair in pairs}
            self._state.save_links(links)
            self._apply_links(links, pairs)
        return before

    def _apply_links(self, links: dict[tuple[str, str], LinkState], pairs: list[tuple[str, str]]) -> None:
        for a, b in pairs:
            network.shape(self._clusters[a].sandbox, b, links[a, b].rate)
            network.shape(self._clusters[b].sandbox, a, links[a, b].rate)
        for name in sorted({name for pair in pairs for name in pair}):
            cut = [a if b == name else b for (a, b), link in links.items() if link.cut and name in (a, b)]
            network.apply_cuts(self._clusters[name].sandbox, cut)

    def _counted(self, a: str, b: str) -> int | None:
        try:
            return self._sent(a, b)
        except LabError:
            return None

    def _sent(self, a: str, b: str) -> int:
        return network.sent_bytes(self._clusters[a].sandbox, wan_interface(b))


def remove_lab(name: str, progress: Progress) -> None:
    """Removes the lab `name`, whatever is left of it: by its name alone, so that lost files don't matter."""
    preflight.require_root()
    state = LabState(state_dir(name))
    with state.locked(), progress.phase(f"remove lab {name}"):
        _remove_leftovers(name)
        restore_limits()
        state.remove()


def _remove_leftovers(name: str) -> None:
    cgroups.remove(f"crosscloud-{name}")
    links = json.loads(run(["ip", "-json", "link", "show"]) or "[]")
    for link in links:
        if link["ifname"].startswith(f"cc{lab_id(name)}h"):
            network.await_no_interface(link["ifname"])


def _in_parallel(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Results of all tasks in order; when some fail, one LabError with all their messages.

    An interrupt ends the wait at once: the next `up` carries on wherever the tasks were.
    """
    outcomes: list[T | BaseException | None] = [None] * len(tasks)

    def work(index: int) -> None:
        try:
            outcomes[index] = tasks[index]()
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcomes[index] = error

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in failures:
        if not isinstance(error, LabError):
            raise error
    if failures:
        raise LabError("\n".join(str(error) for error in failures)) from failures[0]
    return cast("list[T]", outcomes)
