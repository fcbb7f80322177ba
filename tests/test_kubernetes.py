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
BASE, NEURON, SECURED, RANKS, SPLIT = (
    rendered(FOLDER / "base"),
    rendered(FOLDER / "neuron"),
    rendered(FOLDER / "base", FOLDER / "secured"),
    rendered(FOLDER / "ranks"),
    rendered(FOLDER / "split"),
)
VARIANTS = {"base": BASE, "neuron": NEURON, "secured": SECURED, "ranks": RANKS, "split": SPLIT}
WORKERS = {"base": ["worker"], "ranks": ["east", "west"], "split": ["prefill", "decode"]}
UPPER_NAMES = {setting.name.upper() for setting in fields(Config)}
POD_INDEX, POD_ADDRESS = "metadata.labels['apps.kubernetes.io/pod-index']", "10.0.0.7"
TRANSFER_PORT = 50053


def of_kind(resources: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in resources if each["kind"] in kinds}


def pods(resources: list[Manifest]) -> dict[str, Manifest]:
    """The pod of each workload, by the workload's name; every one of our processes is some of them."""
    found = {name: each["spec"]["template"] for name, each in of_kind(resources, "Deployment", "StatefulSet").items()}
    assert {*map(process_of, found.values())} == {*PROCESSES}
    return found


def process_of(pod: Manifest) -> str:
    (process,) = container(pod)["args"]
    return str(process)


def container(pod: Manifest) -> Manifest:
    (only,) = pod["spec"]["containers"]
    return only


def environment(resources: list[Manifest], name: str, ordinal: int = 0) -> dict[str, str]:
    """What the process is given, as Kubernetes puts it together; `ordinal`: of a StatefulSet's pod."""
    its = container(pods(resources)[name])
    assert its["envFrom"] == [{"configMapRef": {"name": "blockplane"}}]
    shared = of_kind(resources, "ConfigMap")["blockplane"]["data"]
    of_pod = {POD_INDEX: str(ordinal), "status.podIP": POD_ADDRESS}
    return shared | {
        each["name"]: of_pod[each["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in each else each["value"]
        for each in its["env"]
    }


def configs(resources: list[Manifest]) -> dict[str, Config]:
    return {name: load_config({}, environment(resources, name)) for name in pods(resources)}


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
    for name in pods(VARIANTS[variant]):
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
        transfer_address = config[name].transfer_address
        assert ports(pod).get("transfer") == (port_of(transfer_address) if transfer_address else None)
    for name, address in listening.items():
        (port,) = services[name]["spec"]["ports"]
        assert (port["port"], port["targetPort"]) == (port_of(address), "grpc")
        assert selected(resources, services[name]["spec"]["selector"]) == [name]
    for dialler in {*config} - {"engine"}:
        assert config[dialler].engine_address == f"engine:{port_of(listening['engine'])}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_a_port_that_is_there_in_a_way_that_it_answers(variant: str) -> None:
    for pod in pods(VARIANTS[variant]).values():
        assert {*probes(pod)} == {"startupProbe", "readinessProbe", "livenessProbe"}
        for probe in probes(pod).values():
            if "exec" in probe:
                assert probe["exec"]["command"] == ["python3", "-m", "blockplane.client.health", process_of(pod)]
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
        assert {"cpu", "memory"} <= its["resources"]["requests"].keys()
        given, config = environment(VARIANTS[variant], name), configs(VARIANTS[variant])[name]
        writable = {mount["mountPath"] for mount in its["volumeMounts"] if not mount.get("readOnly")}
        written = [given["HOME"], config.compile_cache, str(PurePath(config.journal).parent) if config.journal else ""]
        assert {*filter(None, written)} <= writable
        read = [config.tls_certificate, config.tls_key, config.tls_ca, config.tls_client_ca, config.tokens]
        mounted = {mount["mountPath"] for mount in its["volumeMounts"] if mount.get("readOnly")}
        assert {str(PurePath(path).parent) for path in read if path} <= mounted


ANY_PORT = 0
BLOCKS_ARE_READ = {("decode", "prefill", TRANSFER_PORT)}
RANKS_MEET = {(group, group, ANY_PORT) for group in WORKERS["ranks"]}
BESIDE: dict[str, tuple[set[Any], set[Any]]] = {
    "base": (set(), set()),
    "ranks": (RANKS_MEET, RANKS_MEET),
    "split": (BLOCKS_ARE_READ, BLOCKS_ARE_READ),
}
"""What may come in and go out beside what all systems need."""


@pytest.mark.parametrize("variant", WORKERS)
def test_clients_reach_frontends_and_these_and_workers_the_engine_and_nobody_anything_but_what_it_needs(
    variant: str,
) -> None:
    resources, workers = VARIANTS[variant], WORKERS[variant]
    policies = of_kind(resources, "NetworkPolicy")
    first = {name: policies[name]["spec"] for name in PROCESSES}
    for name, spec in first.items():
        chosen = selected(resources, spec["podSelector"]["matchLabels"])
        assert chosen == (workers if name == "worker" else [name])
        assert spec["policyTypes"] == ["Ingress", "Egress"]
    let_in, let_out = reached(resources, policies)
    monitored = {(name, 50052) for name in pods(resources)}
    to_engine = {(name, "engine", 50050) for name in ("frontend", *workers)}
    beside_in, beside_out = BESIDE[variant]
    assert let_in == {*to_engine, ("frontend", 50051), *monitored, *beside_in}
    assert let_out == {*to_engine, *((name, 53) for name in ("frontend", *workers)), *beside_out}


def reached(resources: list[Manifest], policies: dict[str, Manifest]) -> tuple[set[Any], set[Any]]:
    """Who is let in by whom, and who is let out to whom: (from, to, port), without who is no pod of ours."""
    let_in, let_out = set[Any](), set[Any]()
    for policy in policies.values():
        for name in selected(resources, policy["spec"]["podSelector"]["matchLabels"]):
            for peer, port in connections(policy, "ingress", "from"):
                let_in |= {(*our, name, port) for our in named(resources, peer)}
            for peer, port in connections(policy, "egress", "to"):
                let_out |= {(name, *our, port) for our in named(resources, peer)}
    return let_in, let_out


def named(resources: list[Manifest], peer: dict[str, Any]) -> list[tuple[str, ...]]:
    """The pods of ours that a policy speaks of; one empty name where it speaks of others."""
    ours = selected(resources, peer["podSelector"]["matchLabels"]) if "podSelector" in peer else []
    return [(name,) for name in ours] or [()]


def connections(policy: Manifest, way: str, peer: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Whom a policy lets through by labels of pods in any way, and to which port."""
    for rule in policy["spec"].get(way, ()):
        for each in rule[peer]:
            for port in rule.get("ports", [{"port": ANY_PORT}]):
                yield each, port["port"]


@pytest.mark.parametrize("variant", WORKERS)
def test_a_drained_node_leaves_a_frontend_and_a_worker(variant: str) -> None:
    resources = VARIANTS[variant]
    workloads, left = of_kind(resources, "Deployment", "StatefulSet"), {*pods(resources)}
    for budget in of_kind(resources, "PodDisruptionBudget").values():
        names = selected(resources, budget["spec"]["selector"]["matchLabels"])
        assert sum(workloads[name]["spec"]["replicas"] for name in names) > budget["spec"]["maxUnavailable"]
        left -= {*names}
    assert left == {"engine"}
    assert workloads["engine"]["spec"]["replicas"] == 1


@pytest.mark.parametrize("name", WORKERS["ranks"])
def test_a_group_has_a_pod_for_each_rank_that_its_ordinal_is(name: str) -> None:
    group = of_kind(RANKS, "StatefulSet")[name]["spec"]
    config = configs(RANKS)
    assert group["replicas"] == config["engine"].tensor_parallel_size
    assert group["podManagementPolicy"] == "Parallel", "none is ready before all are there"
    for ordinal in range(group["replicas"]):
        its = load_config({}, environment(RANKS, name, ordinal))
        assert (its.group, its.rank, its.rendezvous_host) == (name, ordinal, POD_ADDRESS)
    service = of_kind(RANKS, "Service")[group["serviceName"]]["spec"]
    assert selected(RANKS, service["selector"]) == [name]
    assert service["clusterIP"] == "None"


def test_groups_differ_in_their_names_alone() -> None:
    east, west = ((FOLDER / "ranks" / f"{name}.yaml").read_text() for name in WORKERS["ranks"])
    assert east.replace("east", "west") == west


def test_one_computes_prompts_and_two_go_on_with_them() -> None:
    config, workloads = configs(SPLIT), of_kind(SPLIT, "Deployment")
    assert {name: (config[name].role, workloads[name]["spec"]["replicas"]) for name in WORKERS["split"]} == {
        "prefill": ("prefill", 1),
        "decode": ("decode", 2),
    }
    assert config["prefill"].transfer_address, "others can read its blocks"


def test_neuron_workers_ask_for_cores() -> None:
    resources = container(pods(NEURON)["worker"])["resources"]
    assert resources["limits"]["aws.amazon.com/neuroncore"] == resources["requests"]["aws.amazon.com/neuroncore"] == "1"
    assert configs(NEURON)["worker"].device == "neuron"
