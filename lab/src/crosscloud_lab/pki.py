"""Certificates and keys of one cluster: one authority, elliptic keys, made once and kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from crosscloud_lab.labfile import SERVICE_RANGE
from crosscloud_lab.plan import ClusterPlan

_LIFETIME = timedelta(days=3650)
_SERVICE_ADDRESS = SERVICE_RANGE[1]  # of the Service `kubernetes`
_LOOPBACK = IPv4Address("127.0.0.1")
_API_NAMES = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
)


@dataclass(frozen=True)
class Identity:
    """What one certificate says: user name, groups, and the names and addresses it serves under."""

    file: str
    user: str
    groups: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    addresses: tuple[IPv4Address, ...] = ()


def identities(cluster: ClusterPlan) -> list[Identity]:
    """All certificates that a cluster's components and its administrator need."""
    nodes = [
        Identity(node.name, f"system:node:{node.name}", ("system:nodes",), (node.name,), (node.address,))
        for node in cluster.nodes
    ]
    return [
        Identity("api", "kube-apiserver", (), _API_NAMES, (cluster.api_address, _SERVICE_ADDRESS, _LOOPBACK)),
        Identity("api-client", "kube-apiserver-client", ("system:masters",)),
        Identity("etcd", "etcd", (), ("localhost",), (_LOOPBACK,)),
        Identity("admin", "admin", ("system:masters",)),
        Identity("controller-manager", "system:kube-controller-manager"),
        Identity("scheduler", "system:kube-scheduler"),
        Identity("proxy", "system:kube-proxy"),
        Identity("dns", "crosscloud:dns"),
        *nodes,
    ]


def ensure_pki(folder: Path, cluster: ClusterPlan) -> None:
    """Makes the cluster's keys and certificates in `folder`, all or none of them."""
    if folder.is_dir():
        return
    draft = folder.with_name(folder.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True, mode=0o700)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name(f"crosscloud-lab-{cluster.name}", ())
    ca = _authority(ca_name, ca_key)
    _write_key(draft / "ca.key", ca_key)
    _write_certificate(draft / "ca.crt", ca)
    for identity in identities(cluster):
        key = ec.generate_private_key(ec.SECP256R1())
        _write_key(draft / f"{identity.file}.key", key)
        _write_certificate(draft / f"{identity.file}.crt", _issue(identity, key, ca, ca_key))
    tokens = ec.generate_private_key(ec.SECP256R1())
    _write_key(draft / "service-accounts.key", tokens)
    public = tokens.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (draft / "service-accounts.pub").write_bytes(public)
    draft.rename(folder)


def _name(user: str, groups: Sequence[str]) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    # A little back-dated, so that a clock that steps back doesn't refuse a fresh certificate.
    start = datetime.now(UTC) - timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + _LIFETIME)
    )


def _authority(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    return (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _issue(
    identity: Identity,
    key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(_name(identity.user, identity.groups), ca.subject, key.public_key())
    alternatives: Iterable[x509.GeneralName] = [
        *(x509.DNSName(name) for name in identity.names),
        *(x509.IPAddress(address) for address in identity.addresses),
    ]
    if identity.names or identity.addresses:
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )


def _write_certificate(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
