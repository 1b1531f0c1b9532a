"""The spec of a `CrossCloudTrainingJob`, as the operator, the trainer's `local` and the run document read it.

The same limits stand in `crds/` for the API server; tests/contract holds the two together. Every field works: one that
only later versions act on is not here.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from crosscloud_trainer.contract.checkpoint import CheckpointPolicy
from crosscloud_trainer.contract.reading import Fault, dump, rule
from crosscloud_trainer.contract.sync import Activations, Sync

API_VERSION = "crosscloud.dev/v1alpha1"
KIND = "CrossCloudTrainingJob"

NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
NOT_BLANK = r"[^ \t\r\n]"
MAX_REPLICAS = 64
MAX_STAGES = 64


class Precision(enum.Enum):
    FP32 = "FP32"
    BF16 = "BF16"


class Schedule(enum.Enum):
    CONSTANT = "Constant"
    COSINE = "Cosine"


class Tokenizer(enum.Enum):
    BYTES = "Bytes"
    FILE = "File"


class DataFormat(enum.Enum):
    TEXT = "Text"
    JSONL = "JSONL"
    PARQUET = "Parquet"


class Packing(enum.Enum):
    DOCUMENTS = "Documents"
    STREAM = "Stream"


class ModelPreset(enum.Enum):
    TINY_LLAMA = "tiny-llama"
    SMALL_LLAMA = "small-llama"


@dataclass(frozen=True)
class Replica:
    """What one full copy of the model looks like: `stages` slices of its layers, of `gpus_per_stage` ranks each."""

    stages: int = rule(1, minimum=1, maximum=MAX_STAGES)
    gpus_per_stage: int = rule(1, minimum=1, maximum=1024)
    zero_stage: int = rule(1, minimum=0, maximum=3)


@dataclass(frozen=True)
class ReplicaOverride:
    """What differs in the replica of this index: its size, or where it may run.

    `members` may run any of its stages, none means all; `stage_members` names the member of each stage, in order.
    """

    name: str = rule(pattern=NAME_PATTERN, max_length=63)
    index: int = rule(minimum=0, maximum=MAX_REPLICAS - 1)
    members: tuple[str, ...] | None = rule(None, pattern=NAME_PATTERN, max_length=63, max_items=16, unique="")
    stage_members: tuple[str, ...] | None = rule(
        None, pattern=NAME_PATTERN, max_length=63, min_items=1, max_items=MAX_STAGES
    )
    stages: int | None = rule(None, minimum=1, maximum=MAX_STAGES)
    gpus_per_stage: int | None = rule(None, minimum=1, maximum=1024)
    zero_stage: int | None = rule(None, minimum=0, maximum=3)


@dataclass(frozen=True)
class Placement:
    """Which nodes qualify. `gpu` is the node label `nvidia.com/gpu.product`; None takes any."""

    gpu: str | None = rule(None, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=63)


@dataclass(frozen=True)
class Model:
    """A preset of ours, or a `transformers` configuration with its `model_type`; exactly one of the two.

    `init_from` is where the weights come from at first, a `transformers` folder or another job's storage; None draws
    them. Where it is given alone, the configuration is the one that lies beside those weights.
    """

    preset: ModelPreset | None = rule(None)
    config: dict[str, Any] | None = rule(None)
    init_from: str | None = rule(None, max_length=1024, pattern=r"^([a-z][a-z0-9+.-]*://|/).+")

    def check(self) -> Iterator[Fault]:
        if self.preset is not None and self.config is not None:
            yield "", "both", "set exactly one of preset and config"
        if self.preset is None and self.config is None and self.init_from is None:
            yield "", "neither", "set exactly one of preset and config, or initFrom alone"
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            yield "config.model_type", self.config.get("model_type"), "must name a transformers model type, like llama"


@dataclass(frozen=True)
class Source:
    """Files with documents, and the members whose replicas read them; none means all members.

    Without `format` a file's suffix tells it. `field` is the JSON key or the column that holds the text.
    """

    name: str = rule(pattern=NAME_PATTERN, max_length=63)
    paths: tuple[str, ...] = rule(min_items=1, max_items=64, max_length=1024, pattern=NOT_BLANK)
    format: DataFormat | None = rule(None)
    field: str | None = rule(None, max_length=256, pattern=NOT_BLANK)
    members: tuple[str, ...] | None = rule(
        None, pattern=NAME_PATTERN, max_length=63, min_items=1, max_items=16, unique=""
    )

    def check(self) -> Iterator[Fault]:
        if self.field is not None and self.format is DataFormat.TEXT:
            yield "field", self.field, "is for formats JSONL and Parquet only, and format is Text; leave it out"


@dataclass(frozen=True)
class Data:
    """What is read, as globs or fsspec addresses; `stdlib:` in front stands for the library folder of the Python that
    runs the trainer. `train` is the short form of one source that is open to all.

    Without `validation` every fiftieth document is held out for validation.
    """

    train: tuple[str, ...] | None = rule(None, min_items=1, max_items=64, max_length=1024, pattern=NOT_BLANK)
    sources: tuple[Source, ...] | None = rule(None, min_items=1, max_items=16, unique="name")
    validation: tuple[str, ...] = rule((), max_items=64, max_length=1024, pattern=NOT_BLANK)
    tokenizer: Tokenizer = rule(Tokenizer.BYTES)
    tokenizer_file: str | None = rule(None, max_length=1024, pattern=NOT_BLANK)
    packing: Packing = rule(Packing.DOCUMENTS)

    def sources_of(self, members: Collection[str]) -> tuple[int, ...]:
        """Places in `all_sources` of those that a replica in these members reads: each of them holds the source."""
        return tuple(
            place
            for place, source in enumerate(self.all_sources)
            if source.members is None or set(members) <= set(source.members)
        )

    @property
    def all_sources(self) -> tuple[Source, ...]:
        return self.sources or (Source(name="train", paths=self.train or ()),)

    def path_of(self, place: int) -> str:
        """The field with the files of a source."""
        return "training.data.train" if self.sources is None else f"training.data.sources[{place}].paths"

    def check(self) -> Iterator[Fault]:
        if (self.train is None) == (self.sources is None):
            yield "", "neither" if self.train is None else "both", "set exactly one of train and sources"
        if self.tokenizer is Tokenizer.FILE and self.tokenizer_file is None:
            yield "tokenizerFile", None, "is required with tokenizer File: a tokenizers file or a transformers folder"
        if self.tokenizer is not Tokenizer.FILE and self.tokenizer_file is not None:
            allowed = f"is for tokenizer File only, and tokenizer is {self.tokenizer.value}; leave it out"
            yield "tokenizerFile", self.tokenizer_file, allowed


@dataclass(frozen=True)
class Training:
    """What is trained and for how long.

    `tokens` counts those of the whole job. `batch_size` is sequences per replica and inner step, shared by the ranks of
    a stage; each takes `micro_batch_size` at a time and accumulates gradients, or what `micro_batch` says if that is
    None. `sequence_length` is in tokens. `gradient_clipping` is the largest norm; 0 is no clipping.
    """

    model: Model = rule()
    data: Data = rule()
    tokens: int = rule(quantity=True, minimum=1, maximum=10**15)
    batch_size: int = rule(8, minimum=1, maximum=65_536)
    micro_batch_size: int | None = rule(None, minimum=1, maximum=65_536)
    sequence_length: int = rule(256, minimum=8, maximum=1_048_576)
    learning_rate: float = rule(3e-4, exclusive_minimum=0, maximum=10)
    schedule: Schedule = rule(Schedule.COSINE)
    warmup_steps: int = rule(0, minimum=0, maximum=1_000_000)
    weight_decay: float = rule(0.1, minimum=0, maximum=10)
    gradient_clipping: float = rule(1.0, minimum=0, maximum=1e6)
    precision: Precision = rule(Precision.BF16)
    seed: int = rule(0, minimum=0, maximum=2**31 - 1)
    evaluate_every: int = rule(100, minimum=1, maximum=1_000_000)

    def micro_batch(self, ranks: int, stages: int) -> int:
        """Sequences that each of a stage's `ranks` takes at a time in a replica of so many stages. If not given, the
        most that make at least one micro-batch for each stage: with fewer, stages stand still by turns.
        """
        share = self.batch_size // ranks
        even = (size for size in range(share // stages, 0, -1) if share % size == 0)
        return self.micro_batch_size or next(even, 1)


@dataclass(frozen=True)
class Storage:
    """Where checkpoints and the result go: any fsspec address. `secret_name` holds its environment variables."""

    uri: str = rule(max_length=1024, pattern=r"^([a-z][a-z0-9+.-]*://|/).+")
    secret_name: str | None = rule(None, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)


@dataclass(frozen=True)
class FailurePolicy:
    """`attempts` counts those that ran; an attempt that never started is not counted."""

    attempts: int = rule(3, minimum=1, maximum=100)


@dataclass(frozen=True)
class Script:
    """The user's own training script, in place of `training`: it drives DeepSpeed itself and calls `join()`.

    `file` is a path in the image, relative to its working directory, or an fsspec address that each pod reads it from.
    """

    file: str = rule(max_length=1024, pattern=r"[^ \t\r\n]")
    args: tuple[str, ...] = rule((), max_items=256, max_length=4096)


@dataclass(frozen=True)
class JobSpec:
    """`spec` of a CrossCloudTrainingJob. `pod_template` is a PodTemplateSpec, judged by the members' API servers.

    Exactly one of `training` and `script` is given, the other one is None; `activations` only where a replica has
    several stages.
    """

    storage: Storage = rule()
    training: Training = rule(None)
    script: Script | None = rule(None)
    replicas: int = rule(1, minimum=1, maximum=MAX_REPLICAS)
    replica: Replica = rule(factory=Replica)
    replica_overrides: tuple[ReplicaOverride, ...] = rule((), max_items=MAX_REPLICAS, unique="name")
    placement: Placement = rule(factory=Placement)
    sync: Sync = rule(factory=Sync)
    activations: Activations | None = rule(None)
    checkpoint: CheckpointPolicy = rule(factory=CheckpointPolicy)
    failure_policy: FailurePolicy = rule(factory=FailurePolicy)
    pod_template: dict[str, Any] | None = rule(None)

    def override(self, replica: int) -> ReplicaOverride | None:
        """The override of this replica, if there is one."""
        return next((item for item in self.replica_overrides if item.index == replica), None)

    def gpus_of(self, replica: int) -> int:
        """Ranks of each stage of this replica."""
        found = self.override(replica)
        return (found.gpus_per_stage if found else None) or self.replica.gpus_per_stage

    def stages_of(self, replica: int) -> int:
        """Stages of this replica."""
        found = self.override(replica)
        return (found.stages if found else None) or self.replica.stages

    def zero_stage_of(self, replica: int) -> int:
        """ZeRO stage of this replica."""
        found = self.override(replica)
        given = found.zero_stage if found else None
        return self.replica.zero_stage if given is None else given

    def check(self) -> Iterator[Fault]:
        seen: set[int] = set()
        for number, item in enumerate(self.replica_overrides):
            if item.index in seen:
                yield (
                    f"replicaOverrides[{number}].index",
                    item.index,
                    "two overrides may not name one replica",
                )
            seen.add(item.index)
            if item.index >= self.replicas:
                allowed = f"must be below spec.replicas ({self.replicas})"
                yield f"replicaOverrides[{number}].index", item.index, allowed
        yield from self._check_stages()
        yield from self._check_training()

    def _check_stages(self) -> Iterator[Fault]:
        for number, item in enumerate(self.replica_overrides):
            path, named = f"replicaOverrides[{number}].stageMembers", item.stage_members
            if named is not None and item.members:
                yield path, list(named), "can't stand beside members; leave one of them out"
            if named is not None and len(named) != (count := item.stages or self.replica.stages):
                yield path, list(named), f"must name one member for each stage of the replica, which has {count}"
        most = max(self.stages_of(replica) for replica in range(self.replicas))
        if most > 1 and self.script is not None:
            yield "script", self.script.file, f"runs replicas of one stage only, and one has {most} stages"
        if most == 1 and self.activations is not None:
            allowed = "is for replicas of several stages only, and every replica has one; leave it out"
            yield "activations", dump(self.activations), allowed

    def _check_training(self) -> Iterator[Fault]:
        if (self.training is None) == (self.script is None):
            yield "", "both" if self.script else "neither", "set exactly one of training and script"
        if self.script is not None and self.checkpoint.every_steps is not None:
            found = self.checkpoint.every_steps
            yield "checkpoint.everySteps", found, "is for training only: a script stores its own; leave it out"
        if self.training is None:
            return
        for ranks in sorted({self.gpus_of(replica) for replica in range(self.replicas)}):
            if self.training.batch_size % ranks:
                allowed = f"must be a multiple of the ranks of every stage; one has {ranks}"
                yield "training.batchSize", self.training.batch_size, allowed
            elif (self.training.batch_size // ranks) % (self.training.micro_batch_size or 1):
                share = self.training.batch_size // ranks
                allowed = f"must divide the share of batchSize that each rank of every replica has; one has {share}"
                yield "training.microBatchSize", self.training.micro_batch_size, allowed
