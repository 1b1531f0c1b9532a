"""A stage over two nodes: pods that find each other by the peer table, beside a replica with one."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

from trainer.jobs import DEADLINE_SECONDS, TRAINER, manifest, record, written

from crosscloud_trainer.contract import RUN_VERSION, Peer, PeerTable, RunDocument, dump_json, retryable
from crosscloud_trainer.environment import PARENT
from crosscloud_trainer.launcher.attempt import LocalJob, free_ports
from crosscloud_trainer.launcher.manifest import read_manifest
from crosscloud_trainer.pki import CertificateAuthority, PodIdentity

UID = "00000000-0000-4000-8000-000000000002"
PODS = [(1, 1), (0, 0), (1, 0)]  # (replica, node), in an order that is nobody's: the table's order means nothing
ROUND = re.compile(r"^\[rank 0\] round (\d+) applied: digest ([0-9a-f]{16})", re.MULTILINE)


def environments(
    folder: Path, run: RunDocument, places: list[tuple[int, int]] = PODS
) -> dict[tuple[int, int], dict[str, str]]:
    """The documents of these pods in `folder`, and what each pod is told."""
    authority = CertificateAuthority.create(UID)
    ports = dict(zip(places, free_ports([2] * len(places)), strict=True))
    peers, made = [], {}
    for replica, node in places:
        identity = PodIdentity(job_uid=UID, attempt=1, replica=replica, stage=0, node=node, incarnation=1)
        place = {"replica": replica, "stage": 0, "node": node, "incarnation": 1}
        address = {"direct": "127.0.0.1", "link_port": ports[replica, node][0]}
        peers.append(Peer(**place, **address, member=f"m{replica}", server_name=identity.server_name))  # type: ignore[arg-type]
        tls = folder / f"tls-{replica}-{node}"
        tls.mkdir()
        pair = authority.issue(identity)
        for name, data in (("tls.crt", pair.certificate), ("tls.key", pair.key), ("ca.crt", authority.certificate)):
            (tls / name).write_bytes(data)
        made[replica, node] = {
            **os.environ,
            PARENT: str(os.getpid()),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            **{f"CROSSCLOUD_{key.upper()}": str(value) for key, value in place.items()},
            "CROSSCLOUD_RUN": str(folder / "run.json"),
            "CROSSCLOUD_PEERS": str(folder / "peers.json"),
            "CROSSCLOUD_TLS": str(tls),
            "CROSSCLOUD_METRICS_PORT": "0",
            "CROSSCLOUD_MASTER_PORT": str(ports[replica, 0][1]) if (replica, 0) in ports else "0",
        }
    made[1, 0]["CROSSCLOUD_REPORT"] = f"file:{folder}/report.json"
    made[0, 0]["CROSSCLOUD_REGISTER"] = f"file:{folder}/view.json"
    (folder / "run.json").write_text(dump_json(run))
    (folder / "peers.json").write_text(dump_json(PeerTable(api_version=RUN_VERSION, attempt=1, peers=tuple(peers))))
    return made


def test_two_nodes_of_a_stage_train_as_one_replica(tmp_path: Path) -> None:
    found = read_manifest(written(tmp_path, manifest()))
    run = LocalJob(found, record(tmp_path, UID), tmp_path, tmp_path, str(tmp_path / "out"))._run_document(1)
    wide = replace(run.replicas[1], stages=(replace(run.replicas[1].stages[0], nodes=2),))
    run = replace(run, replicas=(run.replicas[0], wide))
    pods = {
        place: subprocess.Popen([*TRAINER, "pod"], env=env, stdout=subprocess.PIPE, text=True)
        for place, env in environments(tmp_path, run).items()
    }
    texts = {place: process.communicate(timeout=DEADLINE_SECONDS)[0] for place, process in pods.items()}
    assert {place: process.returncode for place, process in pods.items()} == dict.fromkeys(PODS, 0), texts
    assert ROUND.findall(texts[0, 0]) == ROUND.findall(texts[1, 0]) != []
    assert "[rank 1] training" in texts[1, 1]  # node 1 has rank 1, and no report of its own
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["completion"]["outcome"] == "Succeeded"
    assert report["progress"]["tokens"] == 1536  # half of the job's


def test_replicas_with_one_changed_file_are_refused_by_what_differs_and_not_tried_again(tmp_path: Path) -> None:
    document = manifest(training={"data": {"train": ["text/*.txt"]}})  # below each pod's own working folder
    run = LocalJob(
        read_manifest(written(tmp_path, document)), record(tmp_path, UID), tmp_path, tmp_path, str(tmp_path / "out")
    )
    pods = []
    made = environments(tmp_path, run._run_document(1), places=[(0, 0), (1, 0)])
    for (replica, _), env in made.items():
        text = tmp_path / f"member-{replica}" / "text"
        text.mkdir(parents=True)
        for number in range(3):
            (text / f"{number}.txt").write_bytes(b"the same text in each " * 100)
        (text / "3.txt").write_bytes(b"changed" if replica else b"as it was")
        pods.append(subprocess.Popen([*TRAINER, "pod"], env=env, cwd=text.parent, stdout=subprocess.PIPE, text=True))
    texts = [pod.communicate(timeout=DEADLINE_SECONDS)[0] for pod in pods]
    assert not retryable(pods[0].returncode), texts
    assert not retryable(pods[1].returncode), texts
    unlike = r"differ in data of train: 4 files, 6\.6 kB, sha256 [0-9a-f]{32} and 4 files, 6\.6 kB, sha256 [0-9a-f]{32}"
    assert all(re.search(unlike, text) for text in texts), texts
