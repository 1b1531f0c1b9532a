"""Manifests of `local`: the same file that kubectl takes, read by the same rules, all errors at once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from trainer.jobs import TRAINER, manifest, written

from crosscloud_trainer.contract import ExitCode, ModelPreset
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.launcher.manifest import read_manifest

EXAMPLES = Path(__file__).parents[2] / "examples"


def message(path: Path) -> str:
    with pytest.raises(Failure) as caught:
        read_manifest(path)
    assert caught.value.code == ExitCode.INVALID_INPUT
    return str(caught.value)


def test_the_example_has_two_unequal_replicas() -> None:
    found = read_manifest(EXAMPLES / "tiny.yaml")
    assert found.name == "tiny"
    assert found.spec.replicas == 2
    assert [found.spec.gpus_of(replica) for replica in range(2)] == [1, 2]
    assert found.spec.training.model.preset is ModelPreset.TINY_LLAMA


def test_numbers_are_read_by_yaml_1_2_rules(tmp_path: Path) -> None:
    path = written(tmp_path, manifest())
    text = path.read_text()
    assert "learningRate: 0.003" in text
    path.write_text(text.replace("learningRate: 0.003", "learningRate: 3e-4").replace("tokens: 3072", "tokens: 20k"))
    training = read_manifest(path).spec.training
    assert training.learning_rate == 3e-4
    assert training.tokens == 20_000


def test_every_fault_is_told_at_once_with_its_path(tmp_path: Path) -> None:
    document = manifest(replicas=0, sync={"innerSteps": "twenty", "codec": "Int9"}, storage={})
    document["apiVersion"] = "v1"
    document["metadata"] = {"name": "Tiny!", "nam": 1}
    document["extra"] = True
    document["spec"]["training"]["learningrate"] = 1
    told = message(written(tmp_path, document))
    for part in (
        'apiVersion: found "v1"; must be crosscloud.dev/v1alpha1',
        "extra: found true; unknown field",
        "metadata.nam: found 1; unknown field",
        'metadata.name: found "Tiny!"',
        "spec.replicas: found 0; must be at least 1",
        'spec.sync.innerSteps: found "twenty"; must be a whole number',
        'spec.sync.codec: found "Int9"; must be one of None, BF16, Int8, TopK',
        "spec.storage.uri: found null; is required",
        "spec.training.learningrate: found 1; unknown field",
    ):
        assert part in told
    assert "9 thing(s) to mend" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2\nb: 3\n", "line 2, column 2: this is not valid YAML"),
        ("a: 1\na: 2\n", "line 2, column 1: this is not valid YAML: found duplicate key"),
        ("a:\n\t- 1\n", "line 2, column 1: this is not valid YAML"),
        ("", "must hold one object"),
        ("- 1\n", "must hold one object"),
        ("kind: Pod\n---\nkind: Service\n", "holds 0 objects of kind CrossCloudTrainingJob"),
        ("a: &a [*a]\n", "lie too deep in each other, or in themselves"),
        ("[" * 5000, "lie too deep in each other, or in themselves"),
        ("a: " + "9" * 5000, "holds a value that can't be read"),
        ("spec: {training: {1: 2}}\n", 'spec.training: found "1"; is no name of a field'),
        ("spec: {a: [0, .nan]}\n", "spec.a[1]: found NaN; must be finite"),
        ("spec: !!set {a}\n", "spec: found \"{'a'}\"; must be text, a number"),
        ("kind: 2026-13-41\n", 'kind: found "2026-13-41"; must be CrossCloudTrainingJob'),
        ('kind: "\\ud800"\n', r'kind: found "\ud800"; must be CrossCloudTrainingJob'),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{key}: &{key} [{','.join([f'*{last}'] * 10)}]\n"
                for last, key in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "more than 100000 values",
        ),
    ],
)
def test_a_file_that_is_no_manifest_is_one_message_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert words in message(path)


def test_a_file_that_is_not_there_or_no_text_is_one_message(tmp_path: Path) -> None:
    assert "can't be read: No such file or directory" in message(tmp_path / "none.yaml")
    (tmp_path / "image.yaml").write_bytes(b"\x89PNG\xff\xfe")
    assert "is not UTF-8 text" in message(tmp_path / "image.yaml")


def test_the_command_prints_the_message_and_no_traceback(tmp_path: Path) -> None:
    path = written(tmp_path, manifest(replicas=-1))
    done = subprocess.run([*TRAINER, "local", str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == ExitCode.INVALID_INPUT
    assert done.stderr.startswith("error: ")
    assert "spec.replicas: found -1; must be at least 1" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not (tmp_path / "crosscloud-runs").exists()  # nothing half made


def test_generate_says_what_a_result_folder_is(tmp_path: Path) -> None:
    command = [*TRAINER, "generate", str(tmp_path), "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == ExitCode.INVALID_INPUT
    assert "holds no model (no config.json)" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_generate_tells_in_one_line_that_a_model_is_broken_or_a_prompt_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for prompt, words in ((b"x", "can't be loaded: "), (b"\xff", "--prompt: found '\\udcff'; must be UTF-8 text")):
        done = subprocess.run(
            [*TRAINER, "generate", str(tmp_path), b"--prompt", prompt], capture_output=True, text=True
        )
        assert done.returncode == ExitCode.INVALID_INPUT
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
