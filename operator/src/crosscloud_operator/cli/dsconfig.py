"""What a DeepSpeed configuration says, in the words of a job's manifest. Pure."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from crosscloud_trainer.contract import InvalidDocument, JobSpec, Training, read

_DEEPSPEED_CLIPPING = 1.0  # what DeepSpeed 0.19 clips to where its configuration doesn't say
_AUTO = "auto"  # transformers' Trainer fills these in
_MUTE = frozenset(
    {
        "steps_per_print",
        "wall_clock_breakdown",
        "dump_state",
        "memory_breakdown",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "comms_logger",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "flops_profiler",
        "prescale_gradients",
        "gradient_predivide_factor",
    }
)  # of no weight for what is trained, or DeepSpeed's own business
_ADAM = frozenset({"adam", "adamw"})
_ADAM_PARAMS = frozenset({"lr", "weight_decay", "torch_adam", "adam_w_mode"})
_BETAS = [0.9, 0.95]  # of the built-in training
_ZERO_SPEED = frozenset(
    {
        "overlap_comm",
        "contiguous_gradients",
        "reduce_scatter",
        "allgather_partitions",
        "allgather_bucket_size",
        "reduce_bucket_size",
        "round_robin_gradients",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save",
    }
)


class BadConfig(Exception):
    """The file can't be used; one line for each fault."""


@dataclass
class Taken:
    """What was taken over, each with where it comes from, and what was not."""

    zero_stage: int = 0
    training: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def parse(text: str) -> Mapping[str, Any]:
    """The configuration as plain data; JSON, else YAML 1.2. Raises BadConfig, also for keys that stand twice."""
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as wrong_json:
        if text.lstrip()[:1] in "{[":
            where = f"line {wrong_json.lineno}, column {wrong_json.colno}"
            raise BadConfig(f"{where}: this is not valid JSON: {wrong_json.msg}") from wrong_json
        data = _yaml(text)
    except RecursionError as fault:
        raise BadConfig("objects lie too deep in each other") from fault
    except ValueError as fault:  # a number of thousands of digits
        raise BadConfig(f"holds a value that can't be read: {fault}") from fault
    if not isinstance(data, Mapping):
        raise BadConfig("must hold one object, as deepspeed.initialize takes it")
    if wrong := [key for key in data if not isinstance(key, str)]:
        raise BadConfig(f"found {wrong[0]!r} as the name of a field; put quotes around it")
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise BadConfig(f"stands twice: {', '.join(twice)}; keep one of each")
    return found


def _no_constant(text: str) -> Any:
    raise BadConfig(f"found {text}; numbers must be finite")


def _yaml(text: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(io.StringIO(text))
    except MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise BadConfig(f"{where}: this is not valid YAML: {' '.join(str(fault.problem).split())}") from fault
    except (YAMLError, ValueError, RecursionError) as fault:
        raise BadConfig(f"this is not valid YAML: {' '.join(str(fault).split())}") from fault


def _finite(value: float) -> bool:
    """Whether a float can hold it: whole numbers may be larger."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class _Reader:
    """Takes fields out of the configuration one by one, collecting every fault."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = dict(data)
        self.faults: list[str] = []

    def number(
        self, key: str, *, whole: bool, least: float, taken: Taken, below: Mapping[str, Any] | None = None
    ) -> Any:
        """The value of `key`, None where it isn't given; "auto" is noted."""
        source = self.data if below is None else below
        name = key.rpartition(".")[2]
        value = source.get(name)
        if value is None:
            return None
        if value == _AUTO:
            taken.notes.append(f'{key}: "auto" is filled in by the transformers Trainer; set it in the manifest')
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)
        if good and whole and float(value).is_integer():
            value = int(value)
        if not good or (whole and not isinstance(value, int)) or value < least:
            self.faults.append(f"{key}: found {value!r}; must be a {'whole ' if whole else ''}number from {least:g}")
            return None
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.data.pop(key, None)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.faults.append(f"{key}: found {value!r}; must be an object")
            return {}
        return value


def converted(data: Mapping[str, Any], gpus: int) -> Taken:
    """The configuration of replicas of `gpus` GPUs each. Raises BadConfig with every fault."""
    reader, taken = _Reader(data), Taken()
    _zero(reader, taken)
    _batch(reader, taken, gpus)
    _precision(reader, taken)
    _optimizer(reader, taken)
    _clipping(reader, taken)
    _schedule(reader, taken)
    for key in sorted(reader.data.keys() - _MUTE):
        taken.notes.append(f"{key}: has no counterpart in a manifest")
    if reader.faults:
        raise BadConfig("\n  ".join(["", *reader.faults]) if len(reader.faults) > 1 else reader.faults[0])
    return taken


def _zero(reader: _Reader, taken: Taken) -> None:
    zero = dict(reader.table("zero_optimization"))
    stage = reader.number("zero_optimization.stage", whole=True, least=0, taken=taken, below=zero)
    if stage is not None and stage > 3:
        reader.faults.append(f"zero_optimization.stage: found {stage}; must be 0, 1, 2 or 3")
    taken.zero_stage = stage or 0
    zero.pop("stage", None)
    for key in sorted(zero.keys() - _ZERO_SPEED, key=str):
        offload = isinstance(zero[key], Mapping) and zero[key].get("device") == "none"
        if not offload:
            taken.notes.append(f"zero_optimization.{key}: jobs train without it")


def _batch(reader: _Reader, taken: Taken, gpus: int) -> None:
    """DeepSpeed's train_batch_size is of all its GPUs: here of one replica."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = (reader.number(name, whole=True, least=1, taken=taken) for name in names)
    for name in names:
        reader.data.pop(name, None)
    if whole is None and micro is not None:
        whole = micro * (steps or 1) * gpus
    if whole is None:
        return
    if micro is None and whole % ((steps or 1) * gpus) == 0:
        micro = whole // ((steps or 1) * gpus)
    if micro is None or whole % (micro * gpus) or (steps is not None and micro * steps * gpus != whole):
        said = " x ".join(str(part) for part in (micro, steps, gpus) if part is not None)
        reader.faults.append(
            f"train_batch_size: found {whole}; must be micro-batch x accumulation x GPUs ({said}); "
            "--gpus says how many GPUs a replica has"
        )
        return
    source = f"{micro} a GPU x {whole // micro // gpus} accumulated x {gpus} GPUs"
    taken.training["batchSize"] = (whole, f"sequences of a replica in a step: {source}")
    taken.training["microBatchSize"] = (micro, "train_micro_batch_size_per_gpu")


def _precision(reader: _Reader, taken: Taken) -> None:
    enabled = {}
    for key in ("bf16", "bfloat16", "fp16"):
        table = reader.table(key)
        enabled[key] = table.get("enabled", False)
        if not isinstance(enabled[key], bool) and enabled[key] != _AUTO:
            reader.faults.append(f"{key}.enabled: found {enabled[key]!r}; must be true or false")
    if enabled["fp16"] is True:
        taken.notes.append("fp16: jobs train in BF16 or FP32; BF16 was written, which needs no loss scaling")
    if any(value == _AUTO for value in enabled.values()):
        taken.notes.append('bf16, fp16: "auto" is filled in by the transformers Trainer; BF16 was written')
    half = any(value is True or value == _AUTO for value in enabled.values())
    taken.training["precision"] = ("BF16" if half else "FP32", "bf16.enabled")


def _optimizer(reader: _Reader, taken: Taken) -> None:
    table = reader.table("optimizer")
    if not table:
        return
    kind, given = table.get("type"), table.get("params") or {}
    if not isinstance(kind, str) or not isinstance(given, Mapping):
        reader.faults.append(f"optimizer: found {dict(table)!r}; must be an object with type and params")
        return
    rate = reader.number("optimizer.params.lr", whole=False, least=0, taken=taken, below=given)
    decay = reader.number("optimizer.params.weight_decay", whole=False, least=0, taken=taken, below=given)
    if rate:
        taken.training["learningRate"] = (float(rate), "optimizer.params.lr")
    elif rate is not None:
        taken.notes.append("optimizer.params.lr: with 0 nothing is learned; set learningRate in the manifest")
    if decay is not None:
        taken.training["weightDecay"] = (float(decay), "optimizer.params.weight_decay")
    if kind.lower() not in _ADAM:
        taken.notes.append(f"optimizer.type: {kind}; a job's built-in training uses AdamW, a script whatever it likes")
    for key in sorted(given.keys() - _ADAM_PARAMS, key=str):
        if key == "betas" and given[key] == _BETAS:
            continue
        uses = f"uses {_BETAS[0]} and {_BETAS[1]}" if key == "betas" else "has its own"
        note = f"a job's built-in training {uses}"
        taken.notes.append(f"optimizer.params.{key}: {note}")


def _clipping(reader: _Reader, taken: Taken) -> None:
    value = reader.number("gradient_clipping", whole=False, least=0, taken=taken)
    reader.data.pop("gradient_clipping", None)
    source = "gradient_clipping" if value is not None else "DeepSpeed's own default"
    taken.training["gradientClipping"] = (float(_DEEPSPEED_CLIPPING if value is None else value), source)


def _schedule(reader: _Reader, taken: Taken) -> None:
    table = reader.table("scheduler")
    if not table:
        return
    kind, given = table.get("type"), table.get("params") or {}
    if not isinstance(kind, str) or not isinstance(given, Mapping):
        reader.faults.append(f"scheduler: found {dict(table)!r}; must be an object with type and params")
        return
    warmup = reader.number("scheduler.params.warmup_num_steps", whole=True, least=0, taken=taken, below=given)
    if warmup is not None:
        taken.training["warmupSteps"] = (warmup, "scheduler.params.warmup_num_steps")
    known = {"warmuplr": "Constant", "warmupcosinelr": "Cosine"}
    if kind.lower() in known:
        taken.training["schedule"] = (known[kind.lower()], f"scheduler.type {kind}")
    else:
        taken.notes.append(f"scheduler.type: {kind}; schedules are Constant and Cosine")
    for key in sorted(given.keys() - {"warmup_num_steps", "total_num_steps"}, key=str):
        taken.notes.append(f"scheduler.params.{key}: the learning rate rises from 0 to learningRate in equal steps")


def refused(data: Mapping[str, Any]) -> list[str]:
    """What a script's engine may not have in a job, each with what to do; the rest stays the script's own."""
    notes = []
    if data.get("optimizer"):
        notes.append("optimizer: DeepSpeed would make it; build it in the script, wrap it and leave this out")
    if _table(data, "fp16").get("enabled") is True:
        notes.append("fp16: loss scaling is each replica's own; use bf16 or fp32")
    zero = _table(data, "zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key) and _table(zero, key).get("device") != "none":
            notes.append(f"zero_optimization.{key}: leave it out")
    return notes


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key)
    return found if isinstance(found, Mapping) else {}


def render(taken: Taken, notes: list[str], name: str, replicas: int, gpus: int, script: str | None) -> str:
    """The manifest's text, with the notes at its top."""
    lines = [
        "# Made by `crosscloud init` from a DeepSpeed configuration.",
        *(f"# {note[0].upper()}{note[1:]}" for note in notes),
        "apiVersion: crosscloud.dev/v1alpha1",
        "kind: CrossCloudTrainingJob",
        "metadata:",
        f"  name: {name}",
        "spec:",
        f"  replicas: {replicas}  # full copies of the model; each trains in one cluster",
        "  replica:",
        f"    gpusPerStage: {gpus}  # GPUs of a copy",
        f"    zeroStage: {taken.zero_stage}  # zero_optimization.stage",
        "  sync:",
        "    algorithm: DiLoCo  # train apart for a window of steps, then exchange one update",
        "    innerSteps: 20  # the window",
        "    codec: Int8  # 8 bits per value; what that loses is added to the next update",
    ]
    if script is not None:
        lines += [
            "  script:  # it reads its DeepSpeed configuration itself",
            f"    file: {json.dumps(script, ensure_ascii=False)}",
        ]
    else:
        lines += [
            "  training:",
            "    model: {preset: tiny-llama}  # yours: `config:` with any causal model of transformers",
            "    data:",
            '      train: ["/data/**/*.txt"]  # yours; globs, as the pods see them',
            "    tokens: 200M  # of the whole job",
        ]
        lines += [f"    {key}: {_scalar(value)}  # {source}" for key, (value, source) in ordered(taken.training)]
    lines += [
        "  storage:",
        "    uri: s3://bucket/folder  # yours: checkpoints and the result",
        "    # secretName: s3  # AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL",
        "",
    ]
    return "\n".join(lines)


def check(manifest: str) -> None:
    """Raises BadConfig with every value that a manifest doesn't take."""
    try:
        read(JobSpec, YAML(typ="safe", pure=True).load(manifest)["spec"], "spec")
    except YAMLError as fault:  # half of a letter, which stands in a name or in a text
        raise BadConfig(f"a manifest can't hold what stands there: {' '.join(str(fault).split())}") from fault
    except InvalidDocument as fault:
        raise BadConfig(f"the manifest that follows from it can't be: {fault}") from fault


def ordered(training: Mapping[str, tuple[Any, str]]) -> list[tuple[str, tuple[Any, str]]]:
    """In the order in which the contract has them."""
    names = [name.replace("_", "") for name in Training.__dataclass_fields__]
    return sorted(training.items(), key=lambda item: names.index(item[0].lower()))


def _scalar(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
