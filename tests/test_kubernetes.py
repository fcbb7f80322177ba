"""The manifests of deploy/kubernetes: that Kubernetes knows every field, and that they say what our processes do."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any

import kubernetes_validate
import pytest
from kustomize import Manifest, rendered

from blockplane.client.health import PROCESSES
from blockplane.protos.config import Config, load_config

FOLDER = Path(__file__).parents[1] / "deploy" / "kubernetes"
BASE, NEURON, SECURED = (
    rendered(FOLDER / "base"),
    rendered(FOLDER / "neuron"),
    rendered(FOLDER / "base", FOLDER / "secured"),
)
VARIANTS = {"base": BASE, "neuron": NEURON, "secured": SECURED}
UPPER_NAMES = {setting.name.upper() for setting in fields(Config)}


def of_kind(resources: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in resources if each["kind"] in kinds}


def pods(resources: list[Manifest]) -> dict[str, Manifest]:
    """The pod of each of our processes, by the process's name."""
    workloads = of_kind(resources, "Deployment", "StatefulSet")
    assert {*workloads} == {*PROCESSES}
    return {name: workload["spec"]["template"] for name, workload in workloads.items()}


def container(pod: Manifest) -> Manifest:
    (only,) = pod["spec"]["containers"]
    return only


def environment(resources: list[Manifest], name: str) -> dict[str, str]:
    """What the process is given, as Kubernetes puts it together."""
    its = container(pods(resources)[name])
    assert its["envFrom"] == [{"configMapRef": {"name": "blockplane"}}]
    shared = of_kind(resources, "ConfigMap")["blockplane"]["data"]
    return shared | {each["name"]: each["value"] for each in its["env"]}


def configs(resources: list[Manifest]) -> dict[str, Config]:
    return {name: load_config({}, environment(resources, name)) for name in PROCESSES}


def ports(pod: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(pod)["ports"]}


def probes(pod: Manifest) -> dict[str, Manifest]:
    return {key: value for key, value in container(pod).items() if key.endswith("Probe")}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def selects(selector: dict[str, str], pod: Manifest) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def selected(resources: list[Manifest], selector: dict[str, str]) -> list[str]:
    return [name for name, pod in pods(resources).items() if selects(selector, pod)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_knows_every_field(variant: str) -> None:
    for resource in VARIANTS[variant]:
        kubernetes_validate.validate(resource, "1.37", strict=True)
    if variant == "base":
        broken = {**BASE[0], "datum": {}}
        with pytest.raises(kubernetes_validate.ValidationError, match="datum"):
            kubernetes_validate.validate(broken, "1.37", strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_exists_and_has_a_value_that_it_takes(variant: str) -> None:
    for name in PROCESSES:
        given = environment(VARIANTS[variant], name)
        assert {key.removeprefix("BLOCKPLANE_") for key in given if key != "HOME"} <= UPPER_NAMES
    configs(VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
def test_ports_are_those_at_which_the_processes_listen(variant: str) -> None:
    resources = VARIANTS[variant]
    config, services = configs(resources), of_kind(resources, "Service")
    listening = {"engine": config["engine"].engine_address, "frontend": config["frontend"].address}
    for name, pod in pods(resources).items():
        assert ports(pod)["metrics"] == port_of(config[name].metrics_address)
        assert ports(pod).get("grpc") == (port_of(listening[name]) if name in listening else None)
    for name, address in listening.items():
        (port,) = services[name]["spec"]["ports"]
        assert (port["port"], port["targetPort"]) == (port_of(address), "grpc")
        assert selected(resources, services[name]["spec"]["selector"]) == [name]
    for dialler in ("frontend", "worker"):
        assert config[dialler].engine_address == f"engine:{port_of(listening['engine'])}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_a_port_that_is_there_in_a_way_that_it_answers(variant: str) -> None:
    for name, pod in pods(VARIANTS[variant]).items():
        assert {*probes(pod)} == {"startupProbe", "readinessProbe", "livenessProbe"}
        for probe in probes(pod).values():
            if "exec" in probe:
                assert probe["exec"]["command"] == ["python3", "-m", "blockplane.client.health", name]
                continue
            (kind,) = probe.keys() & {"grpc", "tcpSocket", "httpGet"}
            asked = probe[kind]["port"]
            assert asked in {*ports(pod)} if isinstance(asked, str) else asked == ports(pod)["grpc"]
            # Kubernetes' gRPC speaks plaintext, and its HTTP shows no certificate.
            assert kind == "tcpSocket" or variant != "secured"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pod_has_more_time_to_end_than_its_process_takes_to_drain(variant: str) -> None:
    for name, pod in pods(VARIANTS[variant]).items():
        hook = container(pod).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert hook[0] == "sleep"
        drain_seconds = configs(VARIANTS[variant])[name].drain_seconds
        assert pod["spec"]["terminationGracePeriodSeconds"] >= int(hook[1]) + drain_seconds + 10


@pytest.mark.parametrize("variant", VARIANTS)
def test_processes_have_no_privilege_and_write_only_where_something_is_mounted(variant: str) -> None:
    for name, pod in pods(VARIANTS[variant]).items():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        its = container(pod)
        assert its["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert its["args"] == [name]
        assert {"cpu", "memory"} <= its["resources"]["requests"].keys()
        given, config = environment(VARIANTS[variant], name), configs(VARIANTS[variant])[name]
        writable = {mount["mountPath"] for mount in its["volumeMounts"] if not mount.get("readOnly")}
        written = [given["HOME"], config.compile_cache, str(PurePath(config.journal).parent) if config.journal else ""]
        assert {*filter(None, written)} <= writable
        read = [config.tls_certificate, config.tls_key, config.tls_ca, config.tls_client_ca, config.tokens]
        mounted = {mount["mountPath"] for mount in its["volumeMounts"] if mount.get("readOnly")}
        assert {str(PurePath(path).parent) for path in read if path} <= mounted


def connections(policies: dict[str, Manifest], way: str, peer: str) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Whose policy it is, whom that lets through by labels of pods in any way, and to which port."""
    for name, policy in policies.items():
        for rule in policy["spec"].get(way, ()):
            for each in rule[peer]:
                for port in rule["ports"]:
                    yield name, each, port["port"]


def test_clients_reach_frontends_and_these_and_workers_the_engine_and_nobody_anything_else() -> None:
    policies = of_kind(BASE, "NetworkPolicy")
    for name, policy in policies.items():
        assert selected(BASE, policy["spec"]["podSelector"]["matchLabels"]) == [name]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert {*policies} == {*PROCESSES}
    let_in = {
        (*([] if "podSelector" not in peer else selected(BASE, peer["podSelector"]["matchLabels"])), name, port)
        for name, peer, port in connections(policies, "ingress", "from")
    }
    monitored = {(name, 50052) for name in PROCESSES}
    assert let_in == {("frontend", "engine", 50050), ("worker", "engine", 50050), ("frontend", 50051), *monitored}
    let_out = {
        (name, *selected(BASE, peer["podSelector"]["matchLabels"]), port) if "podSelector" in peer else (name, port)
        for name, peer, port in connections(policies, "egress", "to")
    }
    assert let_out == {("frontend", "engine", 50050), ("worker", "engine", 50050), ("frontend", 53), ("worker", 53)}


def test_a_drained_node_leaves_a_frontend_and_a_worker() -> None:
    workloads = of_kind(BASE, "Deployment")
    for name, budget in of_kind(BASE, "PodDisruptionBudget").items():
        assert selected(BASE, budget["spec"]["selector"]["matchLabels"]) == [name]
        assert workloads.pop(name)["spec"]["replicas"] > budget["spec"]["maxUnavailable"]
    assert not workloads
    (engine,) = of_kind(BASE, "StatefulSet").values()
    assert engine["spec"]["replicas"] == 1


def test_neuron_workers_ask_for_cores() -> None:
    resources = container(pods(NEURON)["worker"])["resources"]
    assert resources["limits"]["aws.amazon.com/neuroncore"] == resources["requests"]["aws.amazon.com/neuroncore"] == "1"
    assert configs(NEURON)["worker"].device == "neuron"
