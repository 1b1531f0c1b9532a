"""What the chart renders, and the values that it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from crdfiles import CRDS, load_yaml
from helmchart import CHART, HelmFailed, helm, only, rendered

from crosscloud_operator.kube import rights
from crosscloud_operator.settings import read_settings

DIGEST = "sha256:" + "0" * 64


def test_helm_finds_no_fault() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_the_charts_crds_are_those_of_the_repository_byte_for_byte() -> None:
    ours = {path.name: path.read_bytes() for path in CRDS.glob("*.yaml")}
    assert {path.name: path.read_bytes() for path in (CHART / "files" / "crds").iterdir()} == ours


@pytest.mark.parametrize("keep", [True, False])
def test_the_crds_are_rendered_as_they_are_and_kept_if_asked(keep: bool) -> None:
    found = [obj for obj in rendered(f"crds.keep={str(keep).lower()}") if obj["kind"] == "CustomResourceDefinition"]
    for crd in found:
        annotations = crd["metadata"].pop("annotations", {})
        assert annotations == ({"helm.sh/resource-policy": "keep"} if keep else {})
    assert found == [load_yaml(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]


def test_crds_can_be_left_to_someone_else() -> None:
    assert not [obj for obj in rendered("crds.install=false") if obj["kind"] == "CustomResourceDefinition"]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("replicaCount=2", "replicaCount"),
        ("operator.image.name=x", "name"),
        ("operator.image.repository=", "repository"),
        ("operator.image.digest=latest", "digest"),
        ("operator.image.pullPolicy=Sometimes", "pullPolicy"),
        ("operator.logLevel=TRACE", "logLevel"),
        ("operator=null", "operator"),
        ("trainer.image=null", "image"),
        ("metrics.service=null", "service"),
        ("settings.bindTimeout=soon", "bindTimeout"),
        ("settings.bindTimeout=0", "bindTimeout"),
        ("hubIsMember.namespaces={ML}", "namespaces"),
        ("crds.install=maybe", "install"),
        ("metrics.serviceMonitor.interval=often", "interval"),
        ("fullnameOverride=" + "n" * 41, "fullnameOverride"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_its_name(setting: str, named: str) -> None:
    with pytest.raises(HelmFailed, match=named):
        rendered(setting)


def test_every_value_has_a_line_in_the_schema() -> None:
    values = load_yaml((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(value: dict[str, Any], part: dict[str, Any], path: str) -> None:
        known = part["properties"]
        assert set(value) == set(known) - {"global"}, path
        assert part["additionalProperties"] is False, path
        for name, inside in value.items():
            if isinstance(inside, dict) and "properties" in known[name]:
                compare(inside, known[name], f"{path}.{name}")

    compare(values, schema, "values")


def test_an_image_goes_by_its_digest_then_its_tag_then_the_charts_version() -> None:
    version = load_yaml((CHART / "Chart.yaml").read_text())["appVersion"]
    for settings, image in (
        ((), f"crosscloud-operator:{version}"),
        (("operator.image.tag=a",), "crosscloud-operator:a"),
        (("operator.image.tag=a", f"operator.image.digest={DIGEST}"), f"crosscloud-operator@{DIGEST}"),
    ):
        (container,) = only(rendered(*settings), "Deployment")["spec"]["template"]["spec"]["containers"]
        assert container["image"] == image


def test_the_operator_understands_the_environment_that_the_chart_gives_it() -> None:
    images = ("gateway.image.tag=g", "trainer.image.tag=t", "gateway.image.pullPolicy=Always")
    settings = ("settings.hubId=blue", "settings.bindTimeout=7", *images)
    (container,) = only(rendered(*settings), "Deployment")["spec"]["template"]["spec"]["containers"]
    environment = {item["name"]: item.get("value", "by-the-downward-api") for item in container["env"]}
    read = read_settings(environment)
    assert (read.jobs.hub, read.jobs.bind_timeout) == ("blue", 7)
    assert (read.jobs.gateway_image, read.jobs.trainer_image) == ("crosscloud-gateway:g", "crosscloud-trainer:t")
    assert (read.jobs.gateway_pull_policy, read.jobs.trainer_pull_policy) == ("Always", "IfNotPresent")
    assert read.http_port == container["ports"][0]["containerPort"]
    given = {"namespace", "identity", "http_port", "log_level"} | {"hub", "operator_namespace", "http_host"}
    known = {f"CROSSCLOUD_{name.upper()}" for name in (*given, *vars(read.jobs))} | {
        "CROSSCLOUD_POD",
        "CROSSCLOUD_HUB_ID",
    }
    assert set(environment) <= known, "a variable that the operator doesn't read"


def granted(objects: list[dict[str, Any]], *names: str) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of the roles with these endings."""
    roles = [
        obj for obj in objects if obj["kind"] in ("Role", "ClusterRole") and obj["metadata"]["name"].endswith(names)
    ]
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def needed(table: tuple[rights.Right, ...]) -> set[tuple[str, str, str]]:
    return {(right.group, resource, verb) for right in table for resource in right.resources for verb in right.verbs}


def test_the_chart_grants_what_the_operators_code_uses_and_nothing_else() -> None:
    objects = rendered("hubIsMember.enabled=true", "hubIsMember.namespaces={ml}")
    assert granted(objects, "-hub", "-storage") == needed(rights.HUB_RIGHTS)
    assert granted(objects, "-own") == needed(rights.HUB_NAMESPACE_RIGHTS)
    assert granted(objects, "-member-view") == needed(rights.MEMBER_VIEW_RIGHTS)
    assert granted(objects, "-member-run") == needed(rights.MEMBER_RUN_RIGHTS)


def test_who_may_edit_or_view_a_namespace_may_do_so_with_its_jobs_and_no_more() -> None:
    objects = rendered()
    read = ["get", "list", "watch"]
    write = ["create", "update", "patch", "delete", "deletecollection"]
    for ending, into, verbs in (("-edit", ("admin", "edit"), [*read, *write]), ("-view", ("view",), read)):
        role = only(objects, "ClusterRole", ending)
        (rule,) = role["rules"]
        assert rule == {"apiGroups": ["crosscloud.dev"], "resources": ["crosscloudtrainingjobs"], "verbs": verbs}
        aggregated = {key: value for key, value in role["metadata"]["labels"].items() if "aggregate-to" in key}
        assert aggregated == {f"rbac.authorization.k8s.io/aggregate-to-{name}": "true" for name in into}
    roles = {obj["metadata"]["name"] for obj in rendered("rbac.aggregate=false") if obj["kind"] == "ClusterRole"}
    assert not [name for name in roles if name.endswith(("-edit", "-view"))]


def test_secrets_can_be_limited_to_the_namespaces_of_jobs() -> None:
    objects = rendered("rbac.storageNamespaces={ml,vision}")
    found = {
        (obj["kind"], obj["metadata"].get("namespace")) for obj in objects if "-storage" in obj["metadata"]["name"]
    }
    assert found == {("ClusterRole", None), ("RoleBinding", "ml"), ("RoleBinding", "vision")}


def test_what_needs_the_prometheus_operator_is_off_until_asked_for() -> None:
    kinds = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert not kinds & {obj["kind"] for obj in rendered()}
    switches = [f"metrics.{name}.enabled=true" for name in ("serviceMonitor", "podMonitor", "prometheusRule")]
    objects = rendered(*switches)
    assert kinds <= {obj["kind"] for obj in objects}
    assert only(objects, "PrometheusRule")["spec"] == load_yaml((CHART / "files" / "rules.yaml").read_text())


def test_the_dashboards_config_map_has_grafanas_label_and_the_dashboard() -> None:
    found = only(rendered(), "ConfigMap", "-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    (text,) = found["data"].values()
    assert json.loads(text) == json.loads((CHART / "files" / "dashboard.json").read_text())


@pytest.mark.parametrize("release", ["x", "crosscloud", "r" * 53])
def test_names_stay_within_what_kubernetes_takes(release: str) -> None:
    for obj in rendered(release=release):
        labels = obj["metadata"].get("labels", {})
        assert len(obj["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in labels.values())
