"""Certificates of a job: one certificate authority per job, one certificate per pod and incarnation.

The operator and the local launcher issue them; the link checks them. A certificate names its pod twice: by the DNS
names that peers and gateways dial, and by a URI that says job, attempt, replica, stage, node and incarnation.

Needs only `cryptography`, so that the operator can import it without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Clocks of clusters may differ by hours where time servers are blocked; a certificate must be valid on all at once.
CLOCK_SKEW = timedelta(days=1)
# Longer than any job runs: nothing renews certificates during an incarnation.
AUTHORITY_LIFETIME = timedelta(days=5 * 365)

SCHEME = "crosscloud"
_JOB_UID = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_NUMBER = r"(0|[1-9][0-9]{0,8})"
_URI = re.compile(
    rf"{SCHEME}://({_JOB_UID})/attempt/{_NUMBER}/replica/{_NUMBER}/stage/{_NUMBER}/node/{_NUMBER}/incarnation/{_NUMBER}"
)


class InvalidIdentity(ValueError):
    """A certificate or URI that names no pod of a job."""


class InvalidAuthority(ValueError):
    """PEM text that holds no certificate authority: damaged, of another kind, or its key is that of another one."""


@dataclass(frozen=True)
class PodIdentity:
    """The pod that a certificate belongs to."""

    job_uid: str
    attempt: int
    replica: int
    stage: int
    node: int
    incarnation: int

    def __post_init__(self) -> None:
        if not _URI.fullmatch(self.uri):
            raise InvalidIdentity(
                f"found {self.uri}; the job's uid must be one lower-case DNS label, all numbers 0 to 999999999"
            )

    @property
    def uri(self) -> str:
        return (
            f"{SCHEME}://{self.job_uid}/attempt/{self.attempt}/replica/{self.replica}"
            f"/stage/{self.stage}/node/{self.node}/incarnation/{self.incarnation}"
        )

    @property
    def server_name(self) -> str:
        """The pod's TLS name; its ranks answer to `rank_server_name` of it."""
        pod = f"r{self.replica}-s{self.stage}-n{self.node}-i{self.incarnation}"
        return f"{pod}.a{self.attempt}.{self.job_uid}.{SCHEME}"

    @staticmethod
    def parse(uri: str) -> PodIdentity:
        """Inverse of `uri`. Raises InvalidIdentity."""
        match = _URI.fullmatch(uri)
        if not match:
            raise InvalidIdentity(
                f"found {uri!r:.120}; must be {SCHEME}://UID/attempt/A/replica/R/stage/S/node/N/incarnation/I"
            )
        uid, *numbers = match.groups()
        attempt, replica, stage, node, incarnation = (int(number) for number in numbers)
        return PodIdentity(uid, attempt, replica, stage, node, incarnation)


def rank_server_name(server_name: str, local_rank: int) -> str:
    """TLS name of the rank with this local number in the pod: what a gateway tells connections apart by."""
    return f"k{local_rank}.{server_name}"


def identity_of(certificate_der: bytes) -> PodIdentity:
    """The pod that a verified certificate names. Raises InvalidIdentity unless there is exactly one."""
    try:
        certificate = x509.load_der_x509_certificate(certificate_der)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as fault:
        raise InvalidIdentity(f"the certificate has no readable alternative names ({fault})") from fault
    uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(f"{SCHEME}://")]
    if len(uris) != 1:
        raise InvalidIdentity(f"found {len(uris)} {SCHEME}:// names in the certificate; must be exactly one")
    return PodIdentity.parse(uris[0])


@dataclass(frozen=True)
class PodCertificate:
    """What a pod mounts as tls.crt and tls.key, in PEM."""

    certificate: bytes
    key: bytes


class CertificateAuthority:
    """The certificate authority of one job. Its key stays where the certificates are issued."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @staticmethod
    def create(job_uid: str, now: datetime | None = None) -> CertificateAuthority:
        """A new certificate authority for the job. `now` must be aware of its time zone."""
        now = now or datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"{job_uid[:40]} authority")
        certificate = (
            _builder(name, name, key.public_key(), now - CLOCK_SKEW, now + AUTHORITY_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return CertificateAuthority(certificate, key)

    @staticmethod
    def load(certificate: bytes, key: bytes) -> CertificateAuthority:
        """The certificate authority from the PEM texts that `certificate` and `key` gave. Raises InvalidAuthority."""
        try:
            loaded = x509.load_pem_x509_certificate(certificate)
            private = serialization.load_pem_private_key(key, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as fault:
            raise InvalidAuthority(f"the authority's certificate or key is damaged ({fault})") from fault
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != loaded.public_key():
            raise InvalidAuthority("the authority's key doesn't belong to its certificate")
        return CertificateAuthority(loaded, private)

    @property
    def certificate(self) -> bytes:
        """PEM of the certificate: ca.crt of every pod."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key(self) -> bytes:
        """PEM of the private key."""
        return _key_pem(self._key)

    @property
    def not_after(self) -> datetime:
        return self._certificate.not_valid_after_utc

    def issue(self, identity: PodIdentity, now: datetime | None = None) -> PodCertificate:
        """A certificate with a key of its own for this pod, valid as long as the issuer itself."""
        now = now or datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(
            f"r{identity.replica}-s{identity.stage}-n{identity.node}-i{identity.incarnation}.a{identity.attempt}"
        )
        names = x509.SubjectAlternativeName(
            [
                x509.DNSName(identity.server_name),
                x509.DNSName(f"*.{identity.server_name}"),
                x509.UniformResourceIdentifier(identity.uri),
            ]
        )
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        not_before = max(now - CLOCK_SKEW, self._certificate.not_valid_before_utc)
        certificate = (
            _builder(subject, self._certificate.subject, key.public_key(), not_before, self.not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(names, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(issuer_key, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return PodCertificate(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
