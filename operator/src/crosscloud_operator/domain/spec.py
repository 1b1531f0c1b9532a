"""A job as read once from the API server's object into frozen values, with every fault at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from crosscloud_operator.domain.errors import InvalidJob
from crosscloud_operator.domain.names import TRAINER, JobId
from crosscloud_operator.domain.placement import Request
from crosscloud_operator.domain.search import ReplicaNeed
from crosscloud_operator.domain.settings import JobSettings
from crosscloud_trainer.contract import InvalidDocument, JobSpec, Problem, read

Obj = Mapping[str, Any]

RESERVED = "crosscloud-"  # volumes of ours
MOUNT_ROOT = "/etc/crosscloud"
# What the operator itself decides; a podTemplate that sets one of these would break the gang or the contract.
_OUR_POD_FIELDS = {
    "restartPolicy": "Never",
    "schedulingGates": None,
    "nodeName": None,
    "hostname": None,
    "subdomain": None,
    "setHostnameAsFQDN": None,
}
Shape = dict[str, Any] | list[Any]  # of a podTemplate: objects with the fields that we look into, lists of objects
_CONTAINER_SHAPE: Shape = {
    **{name: [{}] for name in ("env", "envFrom", "ports", "volumeMounts")},
    "resources": {"limits": {}, "requests": {}},
    "securityContext": {},
}
_NODE_TERM: Shape = {"matchExpressions": [{}], "matchFields": [{}]}
_TEMPLATE_SHAPE: Shape = {
    "metadata": {"labels": {}, "annotations": {}},
    "spec": {
        **{name: [{}] for name in ("volumes", "tolerations", "imagePullSecrets", "initContainers")},
        **{name: {} for name in ("nodeSelector", "securityContext")},
        "containers": [_CONTAINER_SHAPE],
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_NODE_TERM]}}
        },
    },
}


@dataclass(frozen=True)
class Job:
    """A job that can be run as written."""

    id: JobId
    generation: int
    spec: JobSpec
    template: Obj

    @property
    def pod_spec(self) -> Obj:
        return self.template.get("spec") or {}


def job_id(obj: Obj, hub: str) -> JobId:
    meta = obj["metadata"]
    return JobId(hub, meta["namespace"], meta["name"], meta["uid"])


def read_job(obj: Obj, settings: JobSettings) -> Job:
    """Raises InvalidJob with every fault of spec and podTemplate."""
    try:
        spec = read(JobSpec, obj.get("spec") or {}, "spec")
    except InvalidDocument as fault:
        raise InvalidJob(fault.problems) from fault
    template = spec.pod_template or {}
    if problems := [*_template_problems(template, settings), *_data_problems(spec)]:
        raise InvalidJob(problems)
    return Job(job_id(obj, settings.hub), obj["metadata"].get("generation", 0), spec, template)


def request(job: Job, settings: JobSettings) -> Request:
    """What the planner has to place: a replica only where there is data for it."""
    needs = []
    holders = data_members(job.spec)
    for replica in range(job.spec.replicas):
        override = job.spec.override(replica)
        needs.append(
            ReplicaNeed(
                replica=replica,
                gpus=job.spec.gpus_of(replica),
                stages=job.spec.stages_of(replica),
                zero_stage=job.spec.zero_stage_of(replica),
                members=_narrowed((override.members if override else None) or (), holders),
                together=_sharing(job.spec),
                stage_members=(override.stage_members if override else None) or (),
            )
        )
    return Request(
        namespace=job.id.namespace,
        replicas=tuple(needs),
        gpu=job.spec.placement.gpu,
        pod_spec=job.pod_spec,
        tolerations=tolerations(job.pod_spec, settings),
    )


def data_members(spec: JobSpec) -> tuple[str, ...]:
    """The members that hold data, where all of it is for certain members; else empty."""
    sources = spec.training.data.all_sources if spec.training is not None else ()
    if any(source.members is None for source in sources):
        return ()
    return tuple(sorted({member for source in sources for member in source.members or ()}))


def _sharing(spec: JobSpec) -> tuple[frozenset[str], ...]:
    """Sets of members that hold a source together, where all data is for certain members: a replica's stages read the
    same sequences, each in its own member.
    """
    sources = spec.training.data.all_sources if spec.training is not None and data_members(spec) else ()
    return tuple(dict.fromkeys(frozenset(source.members or ()) for source in sources))


def _narrowed(members: tuple[str, ...], holders: tuple[str, ...]) -> tuple[str, ...]:
    """Names that are in both, where an empty list stands for all members."""
    return tuple(name for name in members if name in holders) if members and holders else members or holders


def _data_problems(spec: JobSpec) -> Iterator[Problem]:
    """Replicas that could run only where no data is for them."""
    holders = data_members(spec)
    for number, item in enumerate(spec.replica_overrides):
        if item.members and not _narrowed(item.members, holders):
            allowed = f"training.data.sources are for {', '.join(holders)} only; name one of these, or add a source"
            yield Problem(f"spec.replicaOverrides[{number}].members", list(item.members), allowed)
        named = item.stage_members
        if named and holders and not any(source.issuperset(named) for source in _sharing(spec)):
            allowed = "the members of one replica must hold a source of data together; add them to the members of one"
            yield Problem(f"spec.replicaOverrides[{number}].stageMembers", list(named), allowed)


def tolerations(pod_spec: Obj, settings: JobSettings) -> tuple[Obj, ...]:
    """The user's, and the one for the taint that GPU nodes usually carry."""
    ours = {"key": settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    users = list(pod_spec.get("tolerations") or ())
    return (*users, ours) if ours not in users else tuple(users)


def _template_problems(template: Obj, settings: JobSettings) -> Iterator[Problem]:
    shape = list(_shape_problems(template, "spec.podTemplate", _TEMPLATE_SHAPE))
    if shape:
        yield from shape  # nothing else can be said about it
        return
    path = "spec.podTemplate.spec"
    pod = template.get("spec") or {}
    for name, allowed in _OUR_POD_FIELDS.items():
        if name in pod and pod[name] != allowed:
            yield Problem(f"{path}.{name}", pod[name], "leave it out: the operator sets it")
    for index, volume in enumerate(pod.get("volumes") or ()):
        if str(volume.get("name", "")).startswith(RESERVED):
            yield Problem(f"{path}.volumes[{index}].name", volume["name"], f"must not start with {RESERVED}")
    for index, container in enumerate(pod.get("containers") or ()):
        where = f"{path}.containers[{index}]"
        if not container.get("name"):
            yield Problem(f"{where}.name", container.get("name"), f"must be given; the trainer's is {TRAINER}")
        elif container["name"] == TRAINER:
            yield from _trainer_problems(container, where, settings)


def _shape_problems(data: Any, path: str, shape: Shape) -> Iterator[Problem]:
    """Whether what we look into is what it must be; the rest is for the members' API servers to judge."""
    if data is None:
        return
    if isinstance(shape, list):
        if not isinstance(data, list):
            yield Problem(path, data, "must be a list")
            return
        for index, item in enumerate(data):
            yield from _shape_problems(item or "", f"{path}[{index}]", shape[0])
    elif not isinstance(data, Mapping):
        yield Problem(path, data, "must be an object")
    else:
        for name, inner in shape.items():
            yield from _shape_problems(data.get(name), f"{path}.{name}", inner)


def _trainer_problems(container: Obj, where: str, settings: JobSettings) -> Iterator[Problem]:
    for name in ("command", "args"):
        if name in container:
            yield Problem(f"{where}.{name}", container[name], "leave it out: the trainer is started by the operator")
    for index, item in enumerate(container.get("env") or ()):
        if str(item.get("name", "")).startswith("CROSSCLOUD_"):
            yield Problem(f"{where}.env[{index}].name", item["name"], "must not start with CROSSCLOUD_")
    for index, item in enumerate(container.get("volumeMounts") or ()):
        at = str(item.get("mountPath", ""))
        if at == MOUNT_ROOT or at.startswith(f"{MOUNT_ROOT}/"):
            yield Problem(f"{where}.volumeMounts[{index}].mountPath", at, f"must not lie under {MOUNT_ROOT}")
    for part in ("requests", "limits"):
        given = ((container.get("resources") or {}).get(part) or {}).get(settings.gpu_resource)
        if given is not None:
            at = f"{where}.resources.{part}[{settings.gpu_resource}]"
            yield Problem(at, given, "leave it out: it follows from gpusPerStage")
