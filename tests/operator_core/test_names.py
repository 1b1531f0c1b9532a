"""C01: names and labels that are derived from a job never pass Kubernetes' limits, and never collide."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from crosscloud_operator.domain import names
from crosscloud_operator.domain.names import JobId, PodId

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # what a Service's name must be
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")

# DNS-1123 subdomains, as the API server accepts them for metadata.name
job_names = st.from_regex(
    r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?){0,3}", fullmatch=True
)
numbers = st.integers(0, 99_999)
pod_ids = st.builds(PodId, numbers, numbers, numbers, numbers, numbers)


def every_name(job: str, pod: PodId) -> dict[str, str]:
    attempt = pod.attempt
    return {
        "ConfigMap anchor": names.anchor(job),
        "ConfigMap view": names.view(job),
        "ConfigMap report": names.report(job, pod.replica),
        "ConfigMap run": names.run_document(job, attempt),
        "ConfigMap peers": names.peer_table(job, attempt),
        "ConfigMap gateway": names.gateway(job, attempt),
        "Secret keys": names.keys_secret(job, attempt),
        "Secret storage": names.storage_secret(job),
        "Service pods": names.peers_service(job),
        "Service gateway": names.gateway_service(job),
        "Deployment gateway": names.gateway(job, attempt),
        "ServiceAccount reporter": names.reporter(job),
        "NetworkPolicy": names.network_policy(job),
        "Pod": names.pod(job, pod),
    }


@given(job_names, pod_ids)
@example("a" * 63, PodId(1, 0, 1, 0, 0))
@example("a" * 64, PodId(1, 0, 1, 0, 0))
@example("a" * 200, PodId(99_999, 63, 99_999, 9, 1023))
@example("1.2.3", PodId(1, 0, 1, 0, 0))
@example("0", PodId(1, 0, 1, 0, 0))
def test_every_derived_name_is_a_dns_label_that_may_name_a_service(job: str, pod: PodId) -> None:
    for name in every_name(job, pod).values():
        assert len(name) <= 63
        assert DNS_1035.fullmatch(name)


@given(job_names, pod_ids)
@example("a" * 200, PodId(1, 0, 1, 0, 0))
def test_every_label_is_one_that_the_api_server_accepts(job: str, pod: PodId) -> None:
    uid = "7b1ad4a6-35a4-4b8e-9d5b-0d6f6a0c7c11"
    for key, value in names.pod_labels(JobId("hub-1", "ml", job, uid), pod).items():
        assert len(key.rpartition("/")[2]) <= 63
        assert len(value) <= 63
        assert LABEL_VALUE.fullmatch(value)


@given(job_names, job_names, pod_ids, pod_ids)
def test_two_jobs_never_share_a_name_of_one_kind(first: str, second: str, pod: PodId, other: PodId) -> None:
    if first == second:
        return
    mine = {(kind.split()[0], name) for kind, name in every_name(first, pod).items()}
    theirs = {(kind.split()[0], name) for kind, name in every_name(second, other).items()}
    assert not mine & theirs


@given(st.text("ab", min_size=80, max_size=200), st.text("ab", min_size=1, max_size=53))
def test_two_long_names_with_one_beginning_stay_apart(start: str, end: str) -> None:
    pod = PodId(1, 0, 1, 0, 0)
    mine, theirs = every_name(start + "a" + end, pod), every_name(start + "b" + end, pod)
    assert all(mine[kind] != theirs[kind] for kind in mine)


@given(job_names, pod_ids, pod_ids)
def test_two_pods_of_a_job_never_share_a_name(job: str, first: PodId, second: PodId) -> None:
    assert (names.pod(job, first) == names.pod(job, second)) == (first == second)


def test_a_short_name_is_used_as_it_is() -> None:
    assert names.pod("tiny-llama", PodId(2, 1, 3, 0, 1)) == "tiny-llama-a2-r1-i3-s0-n1"


def test_names_are_the_same_on_every_machine_and_in_every_version() -> None:
    # A changed hash would orphan what an older operator has made. SHA-256 of the name, base32: by coreutils.
    # printf '%s' "$(printf 'a%.0s' {1..70})" | sha256sum | xxd -r -p | base32 | tr A-Z a-z | cut -c1-10
    assert names.anchor("a" * 70) == f"{'a' * 45}-npk6ka2ikw-anchor"
