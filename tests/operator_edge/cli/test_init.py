"""`crosscloud init`: a manifest from a DeepSpeed configuration, read back by the reader that `local` uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from crosscloud_operator.cli.main import main
from crosscloud_trainer.contract import JobSpec, Precision, Schedule
from crosscloud_trainer.launcher.manifest import read_manifest

CONFIG: dict[str, Any] = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "weight_decay": 0.01}},
    "gradient_clipping": 0.5,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "steps_per_print": 10,
}


class Init:
    """The command in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.source, self.output = folder / "ds.json", folder / "job.yaml"
        self.said = ""

    def __call__(self, text: str, *options: str, code: int = 0) -> str:
        self.source.write_text(text)
        arguments = ["init", "--deepspeed-config", str(self.source), "-o", str(self.output), *options]
        result = CliRunner().invoke(main, arguments)
        assert "Traceback" not in result.output
        assert result.exit_code == code, result.output
        return result.output

    def spec(self, config: dict[str, Any], *options: str) -> JobSpec:
        self.said = self(json.dumps(config), *options)
        return read_manifest(self.output).spec


@pytest.fixture
def init(tmp_path: Path) -> Init:
    return Init(tmp_path)


def test_everything_that_a_manifest_can_say_is_taken_over(init: Init) -> None:
    spec = init.spec(CONFIG, "--gpus", "4", "--replicas", "3", "--name", "llama")
    training = spec.training
    assert (spec.replicas, spec.replica.gpus_per_stage, spec.replica.zero_stage) == (3, 4, 2)
    assert (training.batch_size, training.micro_batch_size) == (32, 32 // (2 * 4))
    assert (training.learning_rate, training.weight_decay) == (3e-5, 0.01)
    assert (training.gradient_clipping, training.precision) == (0.5, Precision.BF16)
    assert (training.warmup_steps, training.schedule) == (100, Schedule.CONSTANT)
    assert "not taken over" not in init.said
    assert read_manifest(init.output).name == "llama"


def test_deepspeed_clips_at_one_and_trains_in_fp32_where_nothing_is_said(init: Init) -> None:
    training = init.spec({"train_micro_batch_size_per_gpu": 2}, "--gpus", "2").training
    assert (training.gradient_clipping, training.precision) == (1.0, Precision.FP32)
    assert (training.batch_size, training.micro_batch_size) == (4, 2)


def test_a_script_reads_its_configuration_itself(init: Init) -> None:
    spec = init.spec(CONFIG, "--script", "/app/train.py")
    assert spec.script is not None
    assert (spec.script.file, spec.training, spec.replica.zero_stage) == ("/app/train.py", None, 2)


def test_of_a_script_s_configuration_it_says_what_a_job_refuses_and_nothing_else(init: Init) -> None:
    init.spec(
        {
            "optimizer": {"type": "Lamb", "params": {"betas": [0.8, 0.9]}},
            "fp16": {"enabled": True},
            "zero_optimization": {
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "none"},
            },
            "moe": {"enabled": True},
        },
        "--script",
        "train.py",
    )
    notes = [line for line in init.said.splitlines() if line.startswith("refused in a job: ")]
    assert [note.split(": ")[1] for note in notes] == ["optimizer", "fp16", "zero_optimization.offload_optimizer"]
    assert "not taken over" not in init.said
    assert all(note[1:] in init.output.read_text() for note in notes)


def test_betas_that_the_built_in_training_has_too_are_no_loss(init: Init) -> None:
    init.spec({"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}}})
    assert "not taken over" not in init.said


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"fp16": {"enabled": True}}, "fp16: jobs train in BF16 or FP32; BF16 was written"),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, "optimizer.type: Lamb"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9]}}}, "optimizer.params.betas: "),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param: "),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type: OneCycle"),
        ({"train_batch_size": "auto"}, 'train_batch_size: "auto" is filled in by the transformers Trainer'),
        ({"moe": {"enabled": True}}, "moe: has no counterpart in a manifest"),
        ({"a\nspec: 1": 1}, "has no counterpart in a manifest"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 0}}}, "optimizer.params.lr: with 0 nothing is learned"),
    ],
)
def test_what_is_not_taken_over_is_said_on_the_screen_and_in_the_file(
    init: Init, config: dict[str, Any], note: str
) -> None:
    init.spec(config)
    assert f"not taken over: {note}" in init.said or note in init.said
    assert note in init.output.read_text()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": 1,}', "line 1, column 9: this is not valid JSON"),
        ('{"bf16": {}, "bf16": {}}', "stands twice: bf16"),
        ('{"gradient_clipping": NaN}', "found NaN; numbers must be finite"),
        ("[1]", "must hold one object"),
        ("a: b: c", "this is not valid YAML"),
        ("1: 2", "found 1 as the name of a field"),
        ('{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}', "(2 x 1); --gpus says how many GPUs"),
        ('{"train_batch_size": true}', "train_batch_size: found True; must be a whole number from 1"),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage: found 4"),
        ('{"optimizer": {"type": "Adam", "params": {"lr": 11}}}', "spec.training.learningRate: found 11.0"),
        ('{"bf16": {"enabled": 1}}', "bf16.enabled: found 1; must be true or false"),
        pytest.param('{"gradient_clipping": 1%s}' % ("0" * 400), "gradient_clipping: found 1000", id="above floats"),
        pytest.param('{"train_batch_size": 1%s}' % ("0" * 5000), "holds a value that can't be read", id="digits"),
        pytest.param('{"\\ud800": 1}', "a manifest can't hold what stands there", id="half of a letter"),
    ],
)
def test_what_can_not_be_read_is_one_clear_message_and_no_file(init: Init, text: str, fault: str) -> None:
    assert fault in init(text, code=1)
    assert not init.output.exists()


def test_all_faults_are_told_at_once(init: Init) -> None:
    said = init('{"gradient_clipping": -1, "zero_optimization": 3, "bf16": {"enabled": 2}}', code=1)
    assert all(name in said for name in ("gradient_clipping", "zero_optimization", "bf16.enabled"))


def test_yaml_is_read_by_its_newer_rules(init: Init) -> None:
    init("optimizer: {type: AdamW, params: {lr: 3e-4}}")
    assert read_manifest(init.output).spec.training.learning_rate == 3e-4


def test_names_in_yaml_that_are_no_text_are_told_like_others(init: Init) -> None:
    said = init("optimizer: {type: Adam, params: {1: 2, a: b}}\nzero_optimization: {3: 4, c: 5}")
    assert all(f"{name}: " in said for name in ("params.1", "params.a", "zero_optimization.3", "zero_optimization.c"))


def test_a_script_may_have_any_name(init: Init) -> None:
    init("{}", "--script", "école-😀.py")
    script = read_manifest(init.output).spec.script
    assert script is not None
    assert script.file == "école-😀.py"


def test_a_file_that_is_there_stays_unless_told(init: Init) -> None:
    init.output.write_text("mine")
    assert "exists; name another file, or overwrite it with --force" in init("{}", code=1)
    assert init.output.read_text() == "mine"
    init("{}", "--force")
    assert read_manifest(init.output).name == "my-job"
