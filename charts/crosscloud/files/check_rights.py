"""Asks the API server whether this pod's service account has each right that the operator uses; exits 1 if not.

The list of rights is the operator's own (crosscloud_operator.kube.rights), so it is that of the image being run.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from crosscloud_operator.kube.rights import (
    HUB_NAMESPACE_RIGHTS,
    HUB_RIGHTS,
    MEMBER_RUN_RIGHTS,
    MEMBER_VIEW_RIGHTS,
    Right,
)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
Question = tuple[Right, str, str, str]  # right, verb, resource, namespace ("" is all)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--namespace", required=True, help="the operator's own")
    parser.add_argument("--storage-namespace", action="append", default=[], help="whose Secrets it may read; none: all")
    parser.add_argument("--member", action="store_true", help="the hub is a member too")
    parser.add_argument("--member-namespace", action="append", default=[], help="where jobs may run on the hub")
    parser.add_argument("--account", type=Path, default=ACCOUNT, help="folder of the service account's files")
    arguments = parser.parse_args()
    missing = 0
    for right, verb, resource, namespace in questions(arguments):
        allowed = ask(arguments.account, right.group, verb, resource, namespace)
        where = f"in namespace {namespace}" if namespace else "in all namespaces"
        print(f"{'ok     ' if allowed else 'MISSING'} {verb} {resource} {where} ({right.why})")  # noqa: T201
        missing += not allowed
    if missing:
        print(f"{missing} right(s) missing: `helm upgrade` brings those of the chart's version", file=sys.stderr)  # noqa: T201
    return 1 if missing else 0


def questions(arguments: argparse.Namespace) -> Iterator[Question]:
    for right in HUB_RIGHTS:
        by_namespace = right.resources == ("secrets",) and arguments.storage_namespace
        yield from each(right, arguments.storage_namespace if by_namespace else [""])
    for right in HUB_NAMESPACE_RIGHTS:
        yield from each(right, [arguments.namespace])
    for right in MEMBER_VIEW_RIGHTS if arguments.member else ():
        yield from each(right, [""])
    for right in MEMBER_RUN_RIGHTS:
        yield from each(right, arguments.member_namespace)


def each(right: Right, namespaces: Sequence[str]) -> Iterator[Question]:
    for namespace in namespaces:
        for resource in right.resources:
            for verb in right.verbs:
                yield right, verb, resource, namespace


def ask(account: Path, group: str, verb: str, resource: str, namespace: str) -> bool:
    resource, _, subresource = resource.partition("/")
    attributes = {"group": group, "verb": verb, "resource": resource, "subresource": subresource}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes | {"namespace": namespace}},
    }
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(
        f"https://{host}:{port}/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {(account / 'token').read_text().strip()}",
            "Content-Type": "application/json",
        },
    )
    context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    try:
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:  # noqa: S310
            return bool(json.load(answer)["status"].get("allowed"))
    except urllib.error.URLError as fault:
        sys.exit(f"the API server at {host}:{port} didn't answer: {fault}")


if __name__ == "__main__":
    sys.exit(main())
