"""What `deploy/` ships is valid, hardened, and asks for commands, flags, paths and variables that exist.

Each tool that is not installed is named by the test that is skipped for it. Alert rules are judged in test_alert_rules.py."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml

from holdfast.api.cli.main import app
from holdfast.api.http.auth import OPEN_PATHS
from holdfast.coordinator.confined import MEMORY_BYTES_MIN, MEMORY_SHARE
from tests.harness.installed import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "holdfast.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
COMPOSE = DEPLOY / "docker" / "compose.yml"
MANIFESTS = DEPLOY / "kubernetes"
CHART = DEPLOY / "helm" / "holdfast"
TOKEN = {"token": {"value": "a-token-of-some-length"}}
VALUES: dict[str, dict[str, Any]] = {
    "default": TOKEN,
    "bucket": {
        "token": {"existingSecret": "mine"},
        "state": {"url": "s3://bucket/holdfast"},
        "env": [{"name": "AWS_DEFAULT_REGION", "value": "eu-central-1"}],
        "envFrom": [{"secretRef": {"name": "aws"}}],
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"}},
    },
    "everything": {
        **TOKEN,
        "replicas": 3,
        "tls": {"existingSecret": "tls"},
        "webhooks": {"existingSecret": "hooks"},
        "imagePullSecrets": [{"name": "registry"}],
        "state": {"volume": {"existingClaim": "", "storageClassName": "nfs", "size": "1Ti"}},
        "networkPolicy": {"extraFrom": [{"podSelector": {}}], "extraEgress": [{"to": [{"podSelector": {}}]}]},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "service": {"annotations": {"a": "b"}},
    },
    "monitored": {**TOKEN, "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "least": {**TOKEN, "networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
}


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


@cache
def manifests() -> tuple[dict[str, Any], ...]:
    files = sorted(MANIFESTS.glob("*.yml"))
    return tuple(each for file in files for each in documents(file.read_text()) if each["kind"] != "Kustomization")


def rendered(name: str) -> list[dict[str, Any]]:
    reason = "helm-python-sdk is not installed: what the chart's templates come to is not known"
    helm = pytest.importorskip("helm_python", reason=reason)
    found = helm.Chart.load(str(CHART)).render(VALUES[name], name="prod", namespace="streams")
    return [document for text in found.values() for document in documents(text)]


def serve_options() -> set[str]:
    command: Any = typer.main.get_command(app)
    return {option for parameter in command.commands["serve"].params for option in parameter.opts}


def check_arguments(arguments: list[str]) -> None:
    assert arguments[0] == "serve"
    assert {word for word in arguments if word.startswith("--")} <= serve_options()
    assert "--ha" in arguments


def tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_containers_have_room_for_a_drill_beside_the_coordinator() -> None:
    """And all shipped files the same, whose size the documentation has."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())["resources"]
    (container,) = next(each for each in manifests() if each["kind"] == "StatefulSet")["spec"]["template"]["spec"]["containers"]
    limits = {values["limits"]["memory"], container["resources"]["limits"]["memory"]}
    limits |= {each["mem_limit"].replace("g", "Gi") for each in yaml.safe_load(COMPOSE.read_text())["services"].values()}
    (limit,) = limits
    left_bytes = (int(limit.removesuffix("Gi")) << 30) - (512 << 20)  # `size` in docs/deployment.md
    assert left_bytes // MEMORY_SHARE >= 2 * MEMORY_BYTES_MIN
    assert f"| {limit.replace('Gi', ' GiB')}, in the shipped files |" in (ROOT / "docs" / "deployment.md").read_text()


# ---------------------------------------------------------------------------------------------------------------- systemd


def test_the_unit_is_hardened_and_asks_for_flags_that_exist() -> None:
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    service = dict(parser["Service"])
    check_arguments(service["ExecStart"].split()[1:])
    assert service["User"] not in ("", "root")
    on = ("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "ProtectKernelModules", "RestrictNamespaces", "LockPersonality")
    assert [name for name in on if service[name] != "yes"] == []
    assert (service["ProtectSystem"], service["CapabilityBoundingSet"], service["Restart"]) == ("strict", "", "always")


def test_drills_may_lower_their_priority_under_the_unit() -> None:
    """Of several filters the first decides what is forbidden otherwise, and each further one adds to it or takes from it."""
    name = "SystemCallFilter="
    filters = [line.removeprefix(name) for line in UNIT.read_text().splitlines() if line.startswith(name)]
    forbidden = [index for index, each in enumerate(filters) if each.startswith("~") and "@resources" in each]
    assert not filters[0].startswith("~")
    assert filters.index("setpriority") > max(forbidden)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    executable = tmp_path / "holdfast"
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    unit = tmp_path / "holdfast.service"
    unit.write_text(UNIT.read_text().replace("/opt/holdfast/bin/holdfast", str(executable)))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False)
    told = [line for line in done.stderr.splitlines() if "holdfast" in line]
    assert (done.returncode, told) == (0, []), done.stderr
    unit.write_text(unit.read_text().replace("ProtectSystem=strict", "ProtectSystem=sometimes"))
    broken = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False)
    assert "sometimes" in broken.stderr, "the tool sees a wrong line"


def test_systemd_finds_it_little_exposed() -> None:
    command = [tool("systemd-analyze"), "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-500:]


# ------------------------------------------------------------------------------------------------------------- containers


def test_the_image_runs_as_nobody_special_and_what_exists() -> None:
    text = DOCKERFILE.read_text()
    users = re.findall(r"^USER (.*)$", text, re.MULTILINE)
    assert users == ["10001:10001"]
    found = re.search(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    check_arguments(yaml.safe_load(found[1]))
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    assert [name for line in copied for name in line.split() if not (ROOT / name).exists()] == []
    assert not re.search(r"^ADD |curl|wget|chmod 777", text, re.MULTILINE)


def test_hadolint_takes_the_dockerfile(tmp_path: Path) -> None:
    hadolint = tool("hadolint")
    done = subprocess.run([hadolint, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text("FROM python\nRUN cd /x && sudo pip install y\n")
    assert subprocess.run([hadolint, str(broken)], capture_output=True, timeout=60, check=False).returncode != 0


def test_compose_is_hardened() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert len(services) == 2
    for service in services.values():
        assert (service["read_only"], service["cap_drop"], service["user"]) == (True, ["ALL"], "10001:10001")
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "network_mode", "pid"} & set(service)
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DOCKERFILE


# ------------------------------------------------------------------------------------------------------------- Kubernetes


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in found if document["kind"] == kind]


def check_hardened(found: list[dict[str, Any]]) -> None:
    """What is asked of every way to run it on Kubernetes."""
    (stateful,) = of_kind(found, "StatefulSet")
    assert stateful["spec"]["replicas"] >= 2
    pod = stateful["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert (context["privileged"], context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, False, True)
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]
    check_arguments(container["args"])
    check_probes(container)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    assert not [each for each in container["env"] if "TOKEN" in each["name"] and not str(each["value"]).startswith("/")]


def check_probes(container: dict[str, Any]) -> None:
    ports = {port["name"] for port in container["ports"]}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[name]["httpGet"]
        assert asked["path"] in OPEN_PATHS
        assert (asked["scheme"], asked["port"] in ports) == ("HTTPS", True)


def check_together(found: list[dict[str, Any]]) -> None:
    """Selectors find the pods, and names lead somewhere."""
    (stateful,) = of_kind(found, "StatefulSet")
    labels = stateful["spec"]["template"]["metadata"]["labels"].items()
    services = of_kind(found, "Service")
    assert stateful["spec"]["serviceName"] in {service["metadata"]["name"] for service in services}
    selectors = [stateful["spec"]["selector"]["matchLabels"], *(service["spec"]["selector"] for service in services)]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in of_kind(found, "NetworkPolicy")]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in of_kind(found, "PodDisruptionBudget")]
    assert all(selector.items() <= labels for selector in selectors)
    accounts = {account["metadata"]["name"] for account in of_kind(found, "ServiceAccount")}
    assert stateful["spec"]["template"]["spec"]["serviceAccountName"] in accounts


def check_valid(found: list[dict[str, Any]]) -> None:
    for document in found:
        if document["apiVersion"] != "monitoring.coreos.com/v1":  # of Prometheus' operator, whose schemas are elsewhere
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_manifests_are_hardened_and_belong_together() -> None:
    check_hardened(list(manifests()))
    check_together(list(manifests()))
    kinds = {document["kind"] for document in manifests()}
    assert {"NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "Service", "StatefulSet"} <= kinds
    listed = yaml.safe_load((MANIFESTS / "kustomization.yml").read_text())["resources"]
    assert sorted(listed) == sorted(file.name for file in MANIFESTS.glob("*.yml") if file.name != "kustomization.yml")


def test_the_manifests_are_valid() -> None:
    check_valid(list(manifests()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("securityContext", "runAsNonRoot"), False),
        (("containers", 0, "securityContext", "readOnlyRootFilesystem"), False),
        (("containers", 0, "securityContext", "privileged"), True),
        (("containers", 0, "livenessProbe", "httpGet", "path"), "/nowhere"),
        (("containers", 0, "args"), ["serve", "--ha", "--no-such-flag"]),
    ],
)
def test_a_manifest_that_is_softened_is_seen(path: tuple[Any, ...], value: Any) -> None:
    found = [document for file in sorted(MANIFESTS.glob("*.yml")) for document in documents(file.read_text())]
    (stateful,) = of_kind(found, "StatefulSet")
    at = stateful["spec"]["template"]["spec"]
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(AssertionError):
        check_hardened(found)


# ------------------------------------------------------------------------------------------------------------------- Helm


def test_values_fit_their_schema_and_wrong_ones_do_not() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(defaults, schema)
    for values in VALUES.values():
        jsonschema.validate(values, schema)
    for wrong in ({"replicas": 0}, {"state": {"url": "/data"}}, {"token": {"value": "short"}}, {"colour": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_patterns_are_ones_that_helm_reads() -> None:
    """Its regular expressions repeat a thing a thousand times at most."""
    counts = re.findall(r"\{\d*,?(\d+)\}", (CHART / "values.schema.json").read_text())
    assert counts
    assert max(map(int, counts)) <= 1_000


def value_paths(text: str) -> Iterator[tuple[str, ...]]:
    for path in re.findall(r"\.Values((?:\.\w+)+)", text):
        yield tuple(path.split(".")[1:])


def test_templates_ask_for_values_that_there_are() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    asked = {path for file in (CHART / "templates").iterdir() for path in value_paths(file.read_text())}
    assert len(asked) > 15
    for path in sorted(asked):
        at = defaults
        for name in path:
            assert name in at, path
            at = at[name]


def test_the_chart_and_the_manifests_run_the_same() -> None:
    """Arguments and probes, by text: the chart's templates are no YAML."""
    template = (CHART / "templates" / "statefulset.yaml").read_text()
    (stateful,) = of_kind(list(manifests()), "StatefulSet")
    arguments = re.search(r"args: (\[.*\])", template)
    assert arguments is not None
    assert yaml.safe_load(arguments[1]) == stateful["spec"]["template"]["spec"]["containers"][0]["args"]
    probes = re.findall(r"httpGet: (\{.*\})", template)
    assert [yaml.safe_load(probe)["path"] for probe in probes] == ["/healthz", "/healthz", "/readyz"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert chart["appVersion"] == version[1]


def test_helm_finds_nothing_to_complain_of_and_asks_for_a_token() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: the chart is not linted")
    assert helm.lint(str(CHART), TOKEN, strict=True)["errors"] == []
    with pytest.raises(helm.HelmRenderError, match=r"token\.existingSecret"):
        helm.Chart.load(str(CHART)).render({})


@pytest.mark.parametrize("name", VALUES)
def test_what_the_chart_comes_to(name: str) -> None:
    found = rendered(name)
    check_hardened(found)
    check_together(found)
    check_valid(found)
    kinds = {document["kind"] for document in found}
    assert ("PersistentVolumeClaim" in kinds) == (name != "bucket")
    assert ("NetworkPolicy" in kinds) == (name != "least")
    assert ("Secret" in kinds) == (name != "bucket")
