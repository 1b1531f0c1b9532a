"""The demo from its first phase to its goodbye, on a lab that answers as recorded; the commands are ours to see."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from crosscloud_lab.demo import __main__ as demo
from crosscloud_lab.demo.follow import Sample, Story
from crosscloud_lab.demo.steps import Written
from crosscloud_lab.demo.summary import summarise
from crosscloud_lab.demo.trainers import Progress
from crosscloud_lab.errors import LabError

ROOT = Path(__file__).parents[2]
PLAN = [
    {"replica": 0, "stage": 0, "member": "east", "nodes": [{"name": "e1", "gpus": 1}]},
    {"replica": 1, "stage": 0, "member": "west", "nodes": [{"name": "w1", "gpus": 2}, {"name": "w2", "gpus": 2}]},
    {"replica": 1, "stage": 1, "member": "east", "nodes": [{"name": "e2", "gpus": 2}]},
]
# Writes what it was called with; `fetch` fills its target as the real one does, `generate` goes on from the prompt.
PROGRAM = """\
#!/bin/sh
echo "${0##*/} $*" >> "$(dirname "$0")/called"
case "$*" in
  *" fetch "*) mkdir -p "$5" && touch "$5/config.json" ;;
  generate*) test -f "$2/config.json" && printf '%s\\n    return path\\n\\n' "$4" ;;
esac
"""


def status(reason: str, step: int, digests: tuple[str | None, ...] = (), message: str = "") -> dict[str, Any]:
    rows = [{"index": replica, "digest": digest} for replica, digest in enumerate(digests)]
    progress = {"step": step, "totalSteps": 40, "tokens": 4096 * step, "denseBytes": 12_500_000 * step}
    progress |= {"firstLoss": "5.6", "loss": "2.25", "validationLoss": "2.5", "tokensPerSecond": 900}
    return {
        "conditions": [{"type": "Running", "reason": reason, "message": message}],
        "plan": PLAN,
        "progress": progress,
        "replicaStatuses": rows,
        "result": {"uri": "s3://crosscloud/tiny-llama/result"},
    }


class RecordedLab:
    """Each look at the job finds the next status; the WAN carries a megabyte meanwhile, each way."""

    def __init__(self, folder: Path, statuses: list[dict[str, Any]]) -> None:
        self.folder, self.asked = folder, list[tuple[str, ...]]()
        self.up = self.check = lambda: None
        self._statuses, self._looks = statuses, 0

    def kubectl(self, cluster: str, *arguments: str, stdin: str | None = None, **_: float) -> str:
        if arguments[0] == "get":
            self._looks += 1
            spec = YAML(typ="safe", pure=True).load(ROOT / "examples" / "demo.yaml")["spec"]
            return json.dumps({"spec": spec, "status": self._statuses.pop(0)})
        kind = json.loads(stdin)["kind"] if stdin else arguments[2]
        self.asked.append((cluster, arguments[0], kind))
        return ""

    def wan_bytes(self) -> dict[tuple[str, str], int]:
        return {("hub", "east"): 10**9} | dict.fromkeys([("east", "west"), ("west", "east")], self._looks * 1_000_000)

    def binary(self, name: str) -> Path:
        return self.folder / "bin" / name

    def kubeconfig(self, cluster: str) -> Path:
        return Path(f"{cluster}.kubeconfig")

    def s3_environment(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL": "http://store.example"}

    def cluster(self, name: str) -> Any:
        raise LabError(f"no pod in {name} answers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    for name in ("helm", "crosscloud", "crosscloud-trainer"):
        (tmp_path / "bin" / name).write_text(PROGRAM)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(demo, "interrupt_when_asked_to_end", lambda: None)
    images = {f"crosscloud.dev/{name}:1": tmp_path for name in ("operator", "trainer", "gateway")}
    monkeypatch.setattr(demo, "build_all", lambda *_: images)
    monkeypatch.setattr(demo, "load_images", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(printed: str) -> str:
    """What was printed, without frames and widths of columns."""
    return " ".join(printed.replace("│", " ").split())


def told(lab: RecordedLab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code of the demo, and what it printed."""
    monkeypatch.setattr(demo, "Lab", lambda *_: lab)
    code = demo.main()
    return code, words(capsys.readouterr().out)


def test_the_demo_does_what_it_says_and_tells_how_to_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "demo" / "model").mkdir(parents=True)
    (folder / "demo" / "model" / "of-an-earlier-demo").touch()
    lab = RecordedLab(folder, [status("Training", 10), status("Succeeded", 40, ("ab12", "ab12"))])
    code, said = told(lab, monkeypatch, capsys)
    assert code == 0, said
    for part in (
        "[1/7] builds: ",
        "[7/7] result: crosscloud fetch",
        "step 10/40 loss 2.250 900 tokens/s WAN 2.0 MB",
        "equal: digest ab12, ab12",
        "we wrote def read_file(path):",
        "it went on return path",
        "export KUBECONFIG=hub.kubeconfig",
        "kubectl apply -f examples/long.yaml",
        "make down",
    ):
        assert part in said
    assert said.count("done in") == 7
    assert lab.asked == [
        *((cluster, "apply", "Namespace") for cluster in ("hub", "east", "west")),
        ("hub", "apply", "Secret"),
        ("hub", "delete", "examples/demo.yaml"),
        ("hub", "apply", "examples/demo.yaml"),
    ]
    helm, *members, fetch, generate = (folder / "bin" / "called").read_text().splitlines()
    assert helm.startswith("helm --kubeconfig hub.kubeconfig upgrade --install crosscloud charts/crosscloud ")
    assert "--set gateway.image.repository=crosscloud.dev/gateway --set gateway.image.tag=1" in helm
    assert [line.split("--allow")[0] for line in members] == [
        f"crosscloud --kubeconfig hub.kubeconfig member add {name} --kubeconfig {name}.kubeconfig "
        for name in ("east", "west")
    ]
    assert fetch == "crosscloud --kubeconfig hub.kubeconfig fetch tiny-llama demo/model --namespace ml"
    assert generate == "crosscloud-trainer generate demo/model --prompt def read_file(path): --tokens 160"
    assert {path.name for path in (folder / "demo").rglob("*")} == {"model", "config.json", "loss-and-wan.png"}


def test_replicas_that_differ_end_the_demo_with_exit_code_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = RecordedLab(folder, [status("Succeeded", 40, ("ab12", "cd34"))])
    code, said = told(lab, monkeypatch, capsys)
    assert code == 1
    assert "DIFFERENT: digest ab12, cd34" in said
    assert "make down" in said


def test_a_job_that_fails_ends_the_demo_with_the_operators_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = RecordedLab(folder, [status("Failed", 10, message="5 of 5 attempts failed")])
    code, said = told(lab, monkeypatch, capsys)
    assert code == 1
    assert "demo: tiny-llama: Failed: 5 of 5 attempts failed The lab stays up for a look" in said


@pytest.mark.parametrize(
    ("digests", "same", "word"),
    [
        (("ab12", "ab12"), True, "equal: digest ab12, ab12"),
        (("ab12", "cd34"), False, "DIFFERENT: digest ab12, cd34"),
        (("ab12", None), False, "DIFFERENT: digest ab12, None"),
        ((None, None), False, "DIFFERENT: digest None, None"),
    ],
)
def test_the_summary_tells_places_losses_speed_bytes_and_whether_the_weights_are_equal(
    digests: tuple[str | None, ...], same: bool, word: str
) -> None:
    samples = [
        Sample(seconds, Progress(step, 1, 4096 * step, 12_500_000 * step, 2.25, 2.5), 250_000 * step)
        for seconds, step in ((1.0, 0), (11.0, 20), (21.0, 40))
    ]
    story = Story({"status": status("Succeeded", 40, digests)}, samples)
    console = Console(width=140)
    with console.capture() as captured:
        assert summarise(console, story, Written("def ", "f(x):"), Path("demo/picture.png")) is same
    said = words(captured.get())
    for part in (
        "replica 0 ran in east: e1 1 GPU replica 1 ran in west: w1 2 GPUs, w2 2 GPUs -> east: e2 2 GPUs",
        "training loss 5.6 at the start, 2.25 at the end",
        "validation loss 2.5",
        "speed 8192 tokens/s",  # 40 steps of 4096 tokens in 20 seconds
        "WAN, counted at the interface 10.0 MB",
        "in fp32, exchanged at every step 500.0 MB: 50 times as much",
        f"weights of the replicas {word}",
        "picture demo/picture.png",
        "result s3://crosscloud/tiny-llama/result",
        "after 163,840 tokens",
        "we wrote def it went on f(x):",
    ):
        assert part in said
