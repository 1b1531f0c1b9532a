"""The contract is symmetric, strict, and names every fault at once."""

import dataclasses
import enum
import json
import subprocess
import sys
import types
import typing

import pytest
from contract.documents import minimal, run_document
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscloud_trainer import contract
from crosscloud_trainer.contract import (
    ContractTooNew,
    ExitCode,
    InvalidDocument,
    JobSpec,
    PeerTable,
    Report,
    RunDocument,
    counted,
    dump,
    dump_json,
    read,
    read_json,
    read_peer_table,
    read_run_document,
    retryable,
)
from crosscloud_trainer.contract.reading import camel, fields_of
from crosscloud_trainer.sizes import CodecSpec


def peer(node: int) -> dict[str, typing.Any]:
    return {
        "replica": 0,
        "stage": 0,
        "node": node,
        "incarnation": 1,
        "member": "east",
        "serverName": "a",
        "direct": "b",
    }


def strategy(kind: typing.Any, limits: contract.reading.Rule) -> st.SearchStrategy[typing.Any]:
    """Any value that the rules of a field allow, made from the rules alone."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.none() | strategy(next(a for a in args if a is not type(None)), limits)
    if origin is tuple:
        item = dataclasses.replace(limits, min_items=None, max_items=None)
        unique = (lambda x: getattr(x, limits.unique) if limits.unique else x) if limits.unique is not None else None
        top = min(limits.max_items or 3, 2 if dataclasses.is_dataclass(args[0]) else 3)
        return st.lists(strategy(args[0], item), min_size=limits.min_items or 0, max_size=top, unique_by=unique).map(
            tuple
        )
    if origin is dict:
        return st.fixed_dictionaries({"model_type": st.just("llama")})
    if dataclasses.is_dataclass(kind):
        fields = {name: strategy(of, rule) for name, of, rule, _ in fields_of(kind)}
        whole = st.builds(kind, **fields)
        if kind is contract.Data:
            whole = whole.map(consistent)
        if kind is contract.ReplicaPlan:
            whole = whole.map(alike)
        return whole.filter(lambda made: not list(made.check())) if hasattr(kind, "check") else whole
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if kind is bool:
        return st.booleans()
    low = limits.minimum if limits.minimum is not None else limits.exclusive_minimum
    if kind is int:
        return st.integers(int(low or 0), int(limits.maximum if limits.maximum is not None else 10**6))
    if kind is float:
        return st.floats(
            low,
            limits.maximum,
            exclude_min=limits.exclusive_minimum is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    return st.from_regex(limits.pattern or r"\A[a-z]{1,9}\Z", fullmatch=True).filter(
        lambda s: len(s) <= (limits.max_length or 64)
    )


def alike(plan: contract.ReplicaPlan) -> contract.ReplicaPlan:
    """`plan` with its stages numbered in order, each of the first one's size."""
    nodes, gpus = plan.stages[0].nodes, plan.stages[0].gpus_per_node
    stages = (
        dataclasses.replace(stage, index=index, nodes=nodes, gpus_per_node=gpus)
        for index, stage in enumerate(plan.stages)
    )
    return dataclasses.replace(plan, stages=tuple(stages))


def consistent(data: contract.Data) -> contract.Data:
    """`data` without what its other fields exclude."""
    train = None if data.sources else data.train or ("/data",)
    file = (data.tokenizer_file or "/a") if data.tokenizer is contract.Tokenizer.FILE else None
    return dataclasses.replace(data, train=train, tokenizer_file=file)


def specs() -> st.SearchStrategy[JobSpec]:
    """Valid specs: the cross-field rules are met by construction, everything else is free."""

    @st.composite
    def build(draw: st.DrawFn) -> JobSpec:
        free = {
            n: strategy(k, r)
            for n, k, r, _ in fields_of(JobSpec)
            if n not in ("replicas", "replica_overrides", "training", "pod_template")
        }
        values = {name: draw(of) for name, of in free.items()}
        ranks = values["replica"].gpus_per_stage
        training = draw(strategy(contract.Training, contract.reading.Rule()))
        batch = min(training.batch_size, 65_536 // ranks) * ranks
        training = dataclasses.replace(training, batch_size=batch, micro_batch_size=draw(st.sampled_from([None, 1])))
        if values["sync"].algorithm is contract.Algorithm.ALL_REDUCE:
            values["sync"] = dataclasses.replace(values["sync"], inner_steps=None, outer_optimizer=None)
        if values["script"] is not None:
            training = None
            values["checkpoint"] = dataclasses.replace(values["checkpoint"], every_steps=None)
            values["replica"] = dataclasses.replace(values["replica"], stages=1)
        if values["replica"].stages == 1:
            values["activations"] = None
        names = draw(st.lists(st.from_regex(r"\A[a-z][a-z0-9]{0,8}\Z"), max_size=3, unique=True))
        overrides = tuple(contract.ReplicaOverride(name=name, index=index) for index, name in enumerate(names))
        return JobSpec(
            **values,
            training=training,
            replicas=draw(st.integers(max(1, len(names)), 64)),
            replica_overrides=overrides,
        )

    return build()


@settings(max_examples=150, deadline=None)
@given(specs())
def test_every_valid_spec_survives_writing_and_reading(spec: JobSpec) -> None:
    assert read(JobSpec, json.loads(json.dumps(dump(spec)))) == spec


def test_a_script_stands_in_place_of_training() -> None:
    script = {"script": {"file": "/app/train.py", "args": ["--steps", "10"]}, "storage": {"uri": "/models"}}
    assert read(JobSpec, script).script == contract.Script("/app/train.py", ("--steps", "10"))
    for spec, fault in (
        ({"storage": script["storage"]}, 'found "neither"; set exactly one of training and script'),
        (minimal() | script, 'found "both"; set exactly one of training and script'),
        (script | {"checkpoint": {"everySteps": 5}}, "checkpoint.everySteps: found 5; is for training only"),
        (script | {"script": {}}, "script.file: found null; is required"),
    ):
        with pytest.raises(InvalidDocument) as caught:
            read(JobSpec, spec)
        assert fault in str(caught.value)


@pytest.mark.parametrize("kind", [RunDocument, PeerTable, Report])
def test_every_valid_document_survives_writing_and_reading(kind: type) -> None:
    @settings(max_examples=50, deadline=None)
    @given(strategy(kind, contract.reading.Rule()))
    def check(document: typing.Any) -> None:
        assert read_json(kind, dump_json(document)) == document

    check()


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        "{",
        "[" * 100_000,
        json.dumps({"sequence": 1})[:-2] + "9" * 5000 + "}",
        '{"sequence": ' + "9" * 400 + "}",
        '{"progress": {"tokensPerSecond": ' + "9" * 400 + "}}",
    ],
)
def test_whatever_a_pod_writes_into_its_report_is_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(InvalidDocument):
        read_json(Report, text)


def test_a_report_of_a_day_that_the_calendar_lacks_is_refused_by_name() -> None:
    report = {
        "apiVersion": contract.REPORT_VERSION,
        "attempt": 1,
        "home": 1,
        "term": 0,
        "view": 0,
        "replica": 0,
        "incarnation": 1,
        "sequence": 1,
        "activity": "Training",
        "progress": {"step": 0, "totalSteps": 1, "round": 0, "tokens": 0},
    }
    assert read(Report, {**report, "time": "2028-02-29T23:59:59.999Z"}).attempt == 1
    with pytest.raises(InvalidDocument, match=r"^time: "):
        read(Report, {**report, "time": "2026-02-29T00:00:00Z"})


def test_all_faults_are_named_at_once_with_path_value_and_what_is_allowed() -> None:
    bad = minimal()
    bad["replicas"] = 0
    bad["training"]["tokens"] = "5X"
    bad["training"]["bachSize"] = 3
    bad["sync"] = {"codec": "Int9", "outerOptimizer": {"learningRate": 0}}
    with pytest.raises(InvalidDocument) as caught:
        read(JobSpec, bad)
    found = {problem.path: str(problem) for problem in caught.value.problems}
    assert set(found) == {
        "replicas",
        "training.tokens",
        "training.bachSize",
        "sync.codec",
        "sync.outerOptimizer.learningRate",
    }
    assert "at least 1" in found["replicas"]
    assert '"5X"' in found["training.tokens"]
    assert "batchSize" in found["training.bachSize"]
    assert "None, BF16, Int8, TopK" in found["sync.codec"]


@pytest.mark.parametrize(
    ("sync", "spec"),
    [
        ({}, CodecSpec("Int8")),
        ({"codec": "BF16"}, CodecSpec("BF16")),
        ({"codec": "TopK"}, CodecSpec("TopK", 64, 2)),
        ({"codec": "TopK", "topK": {}}, CodecSpec("TopK", 64, 2)),
        ({"codec": "TopK", "topK": {"keep": 2048}}, CodecSpec("TopK", 2048, 2)),
        ({"codec": "TopK", "topK": {"keep": 1, "bits": 8}}, CodecSpec("TopK", 1, 8)),
    ],
)
def test_a_codec_has_the_settings_that_the_manifest_gives_it(sync: dict[str, typing.Any], spec: CodecSpec) -> None:
    assert read(JobSpec, minimal() | {"sync": sync}).sync.codec_spec == spec


@pytest.mark.parametrize(
    ("sync", "rate", "momentum"),
    [
        ({}, 0.7, 0.9),
        ({"codec": "TopK"}, 1, 0),
        ({"codec": "TopK", "outerOptimizer": {}}, 1, 0),
        ({"codec": "TopK", "outerOptimizer": {"momentum": 0.5}}, 1, 0.5),
        ({"codec": "TopK", "outerOptimizer": {"learningRate": 0.7}}, 0.7, 0),
        ({"outerOptimizer": {"momentum": 0}}, 0.7, 0),
        ({"codec": "BF16", "outerOptimizer": {"learningRate": 1}}, 1, 0.9),
    ],
)
def test_what_is_left_out_of_the_outer_optimizer_is_what_suits_the_codec(
    sync: dict[str, typing.Any], rate: float, momentum: float
) -> None:
    outer = read(JobSpec, minimal() | {"sync": sync}).sync.outer
    assert (outer.learning_rate, outer.momentum) == (rate, momentum)


@pytest.mark.parametrize(
    ("sync", "fault"),
    [
        ({"topK": {}}, r"^sync\.topK: .*for codec TopK only, and codec is Int8; leave it out"),
        ({"codec": "BF16", "topK": {"keep": 8}}, r"^sync\.topK: .*\"keep\": 8.*for codec TopK only"),
        ({"codec": "TopK", "topK": {"keep": 0}}, r"^sync\.topK\.keep: found 0; must be at least 1$"),
        ({"codec": "TopK", "topK": {"keep": 2049}}, r"^sync\.topK\.keep: found 2049; must be at most 2048$"),
        ({"codec": "TopK", "topK": {"bits": 3}}, r"^sync\.topK\.bits: found 3; must be one of 2, 4, 8$"),
        ({"codec": "TopK", "topK": {"bits": "2"}}, r'^sync\.topK\.bits: found "2"; must be one of 2, 4, 8$'),
        ({"codec": "TopK", "topK": {"density": 0.1}}, r"^sync\.topK\.density: .*unknown field"),
    ],
)
def test_settings_of_top_k_that_make_no_sense_are_refused_by_name(sync: dict[str, typing.Any], fault: str) -> None:
    with pytest.raises(InvalidDocument, match=fault):
        read(JobSpec, minimal() | {"sync": sync})


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", 10**9, True, [], {}])
def test_a_number_of_replicas_that_makes_no_sense_is_refused_by_name(value: typing.Any) -> None:
    with pytest.raises(InvalidDocument, match=r"^replicas: "):
        read(JobSpec, minimal() | {"replicas": value})


def test_null_counts_as_left_out_as_it_does_for_the_api_server() -> None:
    assert read(JobSpec, minimal() | {"replicas": None, "placement": None}) == read(JobSpec, minimal())
    with pytest.raises(InvalidDocument, match=r"^storage: .*is required"):
        read(JobSpec, minimal() | {"storage": None})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0, "3e-4", True])
def test_a_learning_rate_that_is_no_positive_number_is_refused_by_name(value: typing.Any) -> None:
    bad = minimal()
    bad["training"]["learningRate"] = value
    with pytest.raises(InvalidDocument, match=r"^training\.learningRate: "):
        read(JobSpec, bad)


@pytest.mark.parametrize(
    ("model", "word"), [({}, "neither"), ({"preset": "tiny-llama", "config": {"model_type": "gpt2"}}, "both")]
)
def test_a_model_is_exactly_one_of_preset_and_config(model: dict[str, typing.Any], word: str) -> None:
    bad = minimal()
    bad["training"]["model"] = model
    with pytest.raises(InvalidDocument, match=word):
        read(JobSpec, bad)


def test_a_model_may_be_the_one_that_lies_beside_its_weights() -> None:
    good = minimal()
    good["training"]["model"] = {"initFrom": "s3://models/base"}
    assert read(JobSpec, good).training.model.init_from == "s3://models/base"


@pytest.mark.parametrize(("name", "value"), [("innerSteps", 5), ("outerOptimizer", {})])
def test_settings_of_diloco_are_refused_under_all_reduce(name: str, value: typing.Any) -> None:
    with pytest.raises(InvalidDocument, match=rf"^sync\.{name}: .* for algorithm DiLoCo only"):
        read(JobSpec, minimal() | {"sync": {"algorithm": "AllReduce", name: value}})


@pytest.mark.parametrize(
    ("written", "tokens"), [("200M", 200_000_000), ("1G", 10**9), ("3k", 3000), (17, 17), ("17", 17)]
)
def test_tokens_may_be_written_with_a_suffix(written: typing.Any, tokens: int) -> None:
    good = minimal()
    good["training"]["tokens"] = written
    assert read(JobSpec, good).training.tokens == tokens


def test_a_run_document_of_a_newer_version_is_told_apart_from_a_broken_one() -> None:
    with pytest.raises(ContractTooNew, match="v2"):
        read_run_document(json.dumps(run_document() | {"apiVersion": "run.crosscloud.dev/v2"}))
    for text in ("", "[]", "{", "null", json.dumps({"apiVersion": "apps/v1"})):
        with pytest.raises(InvalidDocument):
            read_run_document(text)


def test_the_digest_of_a_run_document_does_not_depend_on_the_order_of_its_fields() -> None:
    document = run_document()
    turned = dict(reversed(list(document.items())))
    assert read_run_document(json.dumps(document)).digest() == read_run_document(json.dumps(turned)).digest()
    assert (
        read_run_document(json.dumps(document | {"attempt": 2})).digest()
        != read_run_document(json.dumps(document)).digest()
    )


def test_a_peer_table_names_each_pod_once() -> None:
    table = {"apiVersion": contract.RUN_VERSION, "attempt": 1, "peers": [peer(0), peer(1)]}
    assert len(read_peer_table(json.dumps(table)).peers) == 2
    with pytest.raises(InvalidDocument, match=r"^peers\[1\]: "):
        read_peer_table(json.dumps(table | {"peers": [peer(0), peer(0)]}))


def test_documents_use_camel_case_only() -> None:
    assert camel("gpus_per_stage") == "gpusPerStage"
    assert "_" not in "".join(dump(read(JobSpec, minimal())))


def test_each_exit_code_says_whether_trying_again_helps() -> None:
    assert not retryable(ExitCode.INVALID_INPUT)
    assert not retryable(ExitCode.CONTRACT_TOO_NEW)
    assert retryable(ExitCode.PEER_LOST)
    assert retryable(1)
    assert retryable(137)
    assert not counted(ExitCode.PEERS_MISSING)
    assert counted(1)


def test_importing_the_contract_loads_the_standard_library_only() -> None:
    script = "import sys, crosscloud_trainer.contract; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", script], check=True, capture_output=True, text=True
    ).stdout.split()
    foreign = {
        m for m in loaded if m not in sys.stdlib_module_names and not m.startswith(("_", "crosscloud", "sitecustomize"))
    }
    assert not {m for m in foreign if "editable" not in m and m != "distutils-precedence"}
