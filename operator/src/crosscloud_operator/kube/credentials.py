"""A member's credentials: from MemberCluster and Secret to an Access, and what a token says of its own life. Pure.

Renewal: managed clusters cap the life of tokens, so the member's account may ask for tokens for itself; at half its
life a token is replaced (kube/member.py does it), and the Secret is where it is kept and where anyone may rotate it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography import x509

from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.api import Obj
from crosscloud_operator.kube.kubeconfig import KubeconfigRefused, vet

SECRET_KEY = "kubeconfig"  # noqa: S105 - the key in the Secret


class Unusable(Exception):
    """Why a member's credentials can't be used: `reason` for the condition, the message for a person."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Life:
    """What credentials say of themselves. Times in seconds since 1970; `account` as (namespace, name)."""

    issued: float | None = None
    expires: float | None = None
    account: tuple[str, str] | None = None

    @property
    def renew_at(self) -> float | None:
        """When to ask for a new token; None where that can't be or needn't be."""
        if self.account is None or self.issued is None or self.expires is None:
            return None
        return self.issued + (self.expires - self.issued) / 2


def secret_name(member: Obj) -> str | None:
    """The Secret that a MemberCluster names; None for a hub that is its own member."""
    access = (member.get("spec") or {}).get("access") or {}
    named = (access.get("kubeconfigSecret") or {}).get("name")
    return str(named) if named else None


def access_of(secret: Obj | None, name: str, namespace: str) -> Access:
    """The access that a Secret holds. Raises Unusable."""
    where = f"Secret {namespace}/{name}"
    if secret is None:
        raise Unusable("SecretMissing", f"{where}: not found; `crosscloud member add` makes it")
    data = secret.get("data") or {}
    if SECRET_KEY not in data:
        keys = ", ".join(sorted(data)) or "none"
        raise Unusable("SecretKeyMissing", f"{where}: data.{SECRET_KEY}: missing; it has the keys: {keys[:200]}")
    try:
        text = base64.b64decode(data[SECRET_KEY], validate=True)
    except (binascii.Error, ValueError, TypeError) as fault:
        raise Unusable("KubeconfigRefused", f"{where}: data.{SECRET_KEY}: must be base64") from fault
    try:
        return vet(text)
    except KubeconfigRefused as fault:
        raise Unusable("KubeconfigRefused", f"{where}: data.{SECRET_KEY}: {fault}") from fault


def life_of(access: Access) -> Life:
    """Issue, expiry and account of a service-account token, or the expiry of a client certificate."""
    if access.token is not None:
        return _life_of_token(access.token)
    if access.certificate is not None:
        certificate = x509.load_pem_x509_certificate(access.certificate.encode())
        return Life(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())
    return Life()


def _life_of_token(token: str) -> Life:
    """The claims of a JWT. Nothing is verified: they only tell when to renew; the server judges the token."""
    try:
        body = token.split(".")[1]
        claims: Any = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (IndexError, ValueError, RecursionError):
        return Life()
    if not isinstance(claims, Mapping):
        return Life()
    return Life(_number(claims.get("iat")), _number(claims.get("exp")), _account(claims.get("sub")))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < 2**40 else None


def _account(subject: Any) -> tuple[str, str] | None:
    parts = subject.split(":") if isinstance(subject, str) else []
    return (parts[2], parts[3]) if len(parts) == 4 and parts[:2] == ["system", "serviceaccount"] else None
