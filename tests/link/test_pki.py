"""Certificates: what openssl says about them, and what happens to damaged ones."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from crosscloud_trainer.pki import (
    CertificateAuthority,
    InvalidAuthority,
    InvalidIdentity,
    PodIdentity,
    identity_of,
    rank_server_name,
)

UID = "0b7c8a3e-6f5d-4f0a-9a53-3c1f6ad5b7e1"
POD = PodIdentity(UID, attempt=2, replica=1, stage=0, node=3, incarnation=4)


def der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


def openssl(*arguments: str) -> str:
    return subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True).stdout


def test_openssl_accepts_the_pod_for_both_ends_of_a_connection_and_for_the_names_of_its_ranks(tmp_path: Path) -> None:
    authority = CertificateAuthority.create(UID)
    (tmp_path / "ca.crt").write_bytes(authority.certificate)
    (tmp_path / "tls.crt").write_bytes(authority.issue(POD).certificate)
    for purpose in ("sslserver", "sslclient"):
        for name in (POD.server_name, rank_server_name(POD.server_name, 0), rank_server_name(POD.server_name, 7)):
            checked = openssl(
                "verify", "-x509_strict", "-purpose", purpose, "-verify_hostname", name,
                "-CAfile", str(tmp_path / "ca.crt"), str(tmp_path / "tls.crt"),
            )  # fmt: skip
            assert checked.strip().endswith("OK")
    text = openssl("x509", "-in", str(tmp_path / "tls.crt"), "-noout", "-text")
    assert f"URI:crosscloud://{UID}/attempt/2/replica/1/stage/0/node/3/incarnation/4" in text
    assert f"DNS:*.r1-s0-n3-i4.a2.{UID}.crosscloud" in text
    assert "prime256v1" in text


def test_a_certificate_tells_its_pod() -> None:
    issued = CertificateAuthority.create(UID).issue(POD)
    assert identity_of(der(issued.certificate)) == POD


def test_an_authority_that_was_stored_issues_certificates_that_the_first_one_would_accept(tmp_path: Path) -> None:
    first = CertificateAuthority.create(UID)
    again = CertificateAuthority.load(first.certificate, first.key)
    (tmp_path / "ca.crt").write_bytes(first.certificate)
    (tmp_path / "tls.crt").write_bytes(again.issue(POD).certificate)
    openssl("verify", "-x509_strict", "-CAfile", str(tmp_path / "ca.crt"), str(tmp_path / "tls.crt"))


def test_a_certificate_is_valid_on_clocks_that_are_hours_apart_and_never_longer_than_its_authority() -> None:
    now = datetime(2030, 5, 1, tzinfo=UTC)
    authority = CertificateAuthority.create(UID, now)
    early = x509.load_pem_x509_certificate(authority.issue(POD, now).certificate)
    assert early.not_valid_before_utc <= now - timedelta(hours=12)
    late = x509.load_pem_x509_certificate(authority.issue(POD, now + timedelta(days=400)).certificate)
    assert late.not_valid_after_utc == authority.not_after
    assert authority.not_after - now > timedelta(days=365)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https://example.org/",
        f"crosscloud://{UID}/attempt/1",
        f"crosscloud://{UID}/attempt/01/replica/0/stage/0/node/0/incarnation/1",
        f"crosscloud://{UID}/attempt/-1/replica/0/stage/0/node/0/incarnation/1",
        f"crosscloud://{UID}/attempt/1/replica/0/stage/0/node/0/incarnation/1\n",
        f"crosscloud://{UID}/attempt/1/replica/0/stage/0/node/0/incarnation/1/more",
        "crosscloud://Two.Labels/attempt/1/replica/0/stage/0/node/0/incarnation/1",
    ],
)
def test_a_name_that_is_not_exactly_ours_names_no_pod(uri: str) -> None:
    with pytest.raises(InvalidIdentity):
        PodIdentity.parse(uri)


def test_an_identity_that_could_not_be_read_back_is_refused_where_it_is_made() -> None:
    with pytest.raises(InvalidIdentity, match="DNS label"):
        PodIdentity("no/slash", 1, 0, 0, 0, 1)
    with pytest.raises(InvalidIdentity, match="999999999"):
        PodIdentity(UID, -1, 0, 0, 0, 1)


def test_the_certificate_of_an_authority_names_no_pod() -> None:
    with pytest.raises(InvalidIdentity):
        identity_of(der(CertificateAuthority.create(UID).certificate))
    with pytest.raises(InvalidIdentity):
        identity_of(b"garbage")


def test_a_damaged_or_foreign_authority_is_refused() -> None:
    one, two = CertificateAuthority.create(UID), CertificateAuthority.create(UID)
    with pytest.raises(InvalidAuthority, match="doesn't belong"):
        CertificateAuthority.load(one.certificate, two.key)
    with pytest.raises(InvalidAuthority, match="damaged"):
        CertificateAuthority.load(b"garbage", one.key)
    with pytest.raises(InvalidAuthority, match="damaged"):
        CertificateAuthority.load(one.certificate, b"")
