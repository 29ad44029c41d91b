"""Each check, shown a manifest that is broken in the way that it is there for: it has to say so."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy.helm import charts, pitfalls
from tests.deploy.helm.objects import Object, Pod, of_kind, pods
from tests.deploy.helm.pod_security import violations

Break = Callable[[list[Object]], None]


def get(objects: list[Object], kind: str, what: str) -> Object:
    (found,) = [o for o in of_kind(objects, kind) if o["metadata"]["name"] == f"demo-{what}"]
    return found


def deployment(what: str, change: Callable[[Object], Any]) -> Break:
    return lambda objects: change(get(objects, "Deployment", what)["spec"])


def pod(what: str, change: Callable[[dict[str, Any]], Any]) -> Break:
    return deployment(what, lambda spec: change(spec["template"]["spec"]))


def container(what: str, change: Callable[[dict[str, Any]], Any]) -> Break:
    return pod(what, lambda spec: change(spec["containers"][0]))


def thing(kind: str, what: str, change: Callable[[Object], Any]) -> Break:
    return lambda objects: change(get(objects, kind, what))


def redis(change: Callable[[dict[str, Any]], Any]) -> Break:
    return thing("StatefulSet", "redis", lambda o: change(o["spec"]["template"]["spec"]))


def without(kind: str, what: str) -> Break:
    return lambda objects: objects.remove(get(objects, kind, what))


BROKEN: list[tuple[pitfalls.Check, Break, str]] = [
    (
        pitfalls.names,
        thing("StatefulSet", "redis", lambda o: o["metadata"].update(name="r" * 53)),
        "at most 52",
    ),
    (
        pitfalls.names,
        thing("Service", "queue", lambda o: o["metadata"].update(name="1-queue")),
        "no name for a Service",
    ),
    (pitfalls.names, thing("Service", "queue", lambda o: o["metadata"].update(name="vllm")), "VLLM_PORT"),
    (
        pitfalls.names,
        thing("Secret", "auth", lambda o: o["metadata"]["labels"].update(a="b" * 64)),
        "cannot be",
    ),
    (pitfalls.names, lambda objects: objects.append(get(objects, "Service", "queue")), "there 2 times"),
    (
        pitfalls.selectors_of_workloads,
        deployment(
            "queue", lambda s: s["template"]["metadata"]["labels"].update({"app.kubernetes.io/name": "x"})
        ),
        "takes no pod",
    ),
    (
        pitfalls.selectors_of_workloads,
        deployment("queue", lambda s: s["selector"]["matchLabels"].pop("app.kubernetes.io/component")),
        "its selector takes [",
    ),
    (pitfalls.selectors_of_workloads, deployment("queue", lambda s: s.update(selector={})), "every pod"),
    (
        pitfalls.selectors_of_others,
        thing(
            "Service", "coordinator", lambda o: o["spec"]["selector"].update({"app.kubernetes.io/name": "x"})
        ),
        "Service demo-coordinator: its selector takes no pod",
    ),
    (
        pitfalls.selectors_of_others,
        thing("PodDisruptionBudget", "trainer", lambda o: o["spec"]["selector"]["matchLabels"].update(a="b")),
        "PodDisruptionBudget demo-trainer",
    ),
    (
        pitfalls.selectors_of_others,
        thing("NetworkPolicy", "queue", lambda o: o["spec"]["podSelector"]["matchLabels"].update(a="b")),
        "NetworkPolicy demo-queue",
    ),
    (
        pitfalls.selectors_of_others,
        thing("PodMonitor", "trainer", lambda o: o["spec"]["podMetricsEndpoints"][0].update(port="http")),
        "no port http",
    ),
    (
        pitfalls.selectors_of_others,
        thing("Service", "queue", lambda o: o["spec"]["ports"][0].update(targetPort=8001)),
        "no port 8001",
    ),
    (
        pitfalls.peers_of_policies,
        thing(
            "NetworkPolicy",
            "queue",
            lambda o: o["spec"]["egress"][0]["to"][0]["podSelector"]["matchLabels"].update(a="b"),
        ),
        "is no pod",
    ),
    (
        pitfalls.peers_of_policies,
        thing("NetworkPolicy", "queue", lambda o: o["spec"]["egress"][0].update(to=[])),
        "egress of everybody",
    ),
    (pitfalls.duplicates, container("queue", lambda c: c["env"].append(c["env"][0])), "2 times"),
    (
        pitfalls.duplicates,
        pod("queue", lambda s: s["volumes"].append(s["volumes"][0])),
        "volume scratch 2 times",
    ),
    (
        pitfalls.duplicates,
        container("queue", lambda c: c["volumeMounts"].append(c["volumeMounts"][0])),
        "/scratch",
    ),
    (
        pitfalls.duplicates,
        container("coordinator", lambda c: c["ports"][1].update(containerPort=50051)),
        "50051",
    ),
    (
        pitfalls.ports,
        container("queue", lambda c: c["ports"][0].update(name="headrace-queue-http")),
        "no port name",
    ),
    (
        pitfalls.ports,
        container("rollouter", lambda c: c["livenessProbe"]["httpGet"].update(port=1)),
        "it has not",
    ),
    (
        pitfalls.ports,
        container("coordinator", lambda c: c["readinessProbe"]["grpc"].update(port="grpc")),
        "number",
    ),
    (pitfalls.mounts, pod("trainer", lambda s: s["volumes"].pop()), "which is no volume"),
    (pitfalls.mounts, container("trainer", lambda c: c["volumeMounts"].pop()), "is mounted nowhere"),
    (
        pitfalls.mounts,
        container("trainer", lambda c: c["volumeMounts"][2].update(mountPath="/etc/headrace")),
        "cannot be made inside /etc/headrace",
    ),
    (pitfalls.references, without("ConfigMap", "files"), "no ConfigMap demo-files"),
    (pitfalls.references, without("Secret", "auth"), "no Secret demo-auth"),
    (pitfalls.references, without("ServiceAccount", "workers"), "no ServiceAccount demo-workers"),
    (pitfalls.references, without("PersistentVolumeClaim", "checkpoints"), "no PersistentVolumeClaim"),
    (pitfalls.references, without("Service", "coordinator"), "no Service demo-coordinator"),
    (pitfalls.references, without("Role", "coordinator"), "no Role demo-coordinator"),
    (pitfalls.references, without("ServiceAccount", "coordinator"), "no ServiceAccount demo-coordinator"),
    (pitfalls.variables, container("rollouter", lambda c: c["args"].append("--x=$(NOWHERE)")), "$(NOWHERE)"),
    (
        pitfalls.quantities,
        container("queue", lambda c: c["resources"]["limits"].update(memory="8 GB")),
        "'8 GB'",
    ),
    (
        pitfalls.quantities,
        container("queue", lambda c: c["resources"]["limits"].update(memory="1Gi")),
        "requests more",
    ),
    (pitfalls.quantities, container("queue", lambda c: c.pop("resources")), "nothing of its memory"),
    (
        pitfalls.quantities,
        pod("queue", lambda s: s["volumes"][0]["emptyDir"].update(sizeLimit="big")),
        "size 'big'",
    ),
    (pitfalls.writable_home, container("trainer", lambda c: c["volumeMounts"].pop(0)), "cannot be written"),
    (
        pitfalls.grace,
        pod("rollouter", lambda s: s.update(terminationGracePeriodSeconds=60)),
        "killed after 60 s",
    ),
    (pitfalls.grace, pod("trainer", lambda s: s.pop("terminationGracePeriodSeconds")), "killed after 30 s"),
    (
        pitfalls.last_words,
        container("trainer", lambda c: c.pop("terminationMessagePolicy")),
        "does not say why",
    ),
    (
        pitfalls.grace,
        redis(lambda s: s.update(terminationGracePeriodSeconds=120)),
        "while others may save for 120 s",
    ),
    (pitfalls.grace, redis(lambda s: s["containers"][0].pop("lifecycle")), "does not wait 120 s"),
    (pitfalls.rolling, deployment("rollouter", lambda s: s.pop("strategy")), "more than there is room for"),
    (pitfalls.autoscaled, deployment("rollouter", lambda s: s.update(replicas=3)), "both set its replicas"),
    (pitfalls.autoscaled, without("Deployment", "rollouter"), "no Deployment demo-rollouter"),
    (pitfalls.service_links, pod("rollouter", lambda s: s.pop("enableServiceLinks")), "gets a variable"),
    (
        pitfalls.configuration_is_live,
        container("queue", lambda c: c["volumeMounts"][2].update(subPath="config.yaml")),
        "by subPath",
    ),
    (pitfalls.tokens, pod("queue", lambda s: s.update(automountServiceAccountToken=True)), "no use for"),
    (
        pitfalls.tokens,
        pod(
            "queue",
            lambda s: (
                s.update(serviceAccountName="other", automountServiceAccountToken=None)
                or s.pop("automountServiceAccountToken")
            ),
        ),
        "no use for",
    ),
    (pitfalls.tokens, pod("coordinator", lambda s: s.update(automountServiceAccountToken=False)), "no token"),
    (pitfalls.roles, thing("Role", "coordinator", lambda o: o["rules"][0].update(verbs=["*"])), "everything"),
    (
        pitfalls.roles,
        thing("Role", "coordinator", lambda o: o["rules"][0]["resources"].append("secrets")),
        "may touch",
    ),
    (
        pitfalls.roles,
        thing("Role", "coordinator", lambda o: o["rules"][2].pop("resourceNames")),
        "all deployments",
    ),
    (
        pitfalls.roles,
        thing("Role", "coordinator", lambda o: o.update(kind="ClusterRole")),
        "outside its namespace",
    ),
    (
        pitfalls.secrets,
        lambda objects: get(objects, "ConfigMap", "files")["data"].update(
            x=base64.b64decode(get(objects, "Secret", "auth")["data"]["token"]).decode()
        ),
        "holds a credential",
    ),
    (
        pitfalls.secrets,
        thing("ConfigMap", "files", lambda o: o["data"].update(x="redis://:hunter2@host:6379/0")),
        "URL with a password",
    ),
    (
        pitfalls.secrets,
        container("queue", lambda c: c["env"].append({"name": "HF_TOKEN", "value": "x"})),
        "written out",
    ),
    (
        pitfalls.secrets,
        container("queue", lambda c: c["args"].append("--p=$(HEADRACE_TOKEN)")),
        "in its arguments",
    ),
]


@pytest.mark.parametrize(("check", "break_it", "message"), BROKEN, ids=lambda v: getattr(v, "__name__", None))
def test_each_check_can_fail(check: pitfalls.Check, break_it: Break, message: str) -> None:
    objects = charts.rendered("ci/keda.yaml")
    assert list(check(objects)) == []
    break_it(objects)
    problems = list(check(objects))
    assert any(message in problem for problem in problems), problems


GROUPS: list[tuple[pitfalls.Check, Break, str]] = [
    (
        pitfalls.names,
        thing("LeaderWorkerSet", "trainer", lambda o: o["metadata"].update(name="t" * 51)),
        "51 characters, at most 50",
    ),
    (
        pitfalls.names,
        thing("LeaderWorkerSet", "trainer", lambda o: o["metadata"].update(name="1-trainer")),
        "no name for the Service",
    ),
    (
        pitfalls.names,
        thing("LeaderWorkerSet", "trainer", lambda o: o["metadata"].update(name="demo-queue")),
        "Service demo-queue: there 2 times",
    ),
    (
        pitfalls.names,
        thing("StatefulSet", "redis", lambda o: o["metadata"].update(name="demo-trainer-0")),
        "StatefulSet demo-trainer-0: there 2 times",
    ),
    (
        pitfalls.rolling,
        thing("LeaderWorkerSet", "trainer", lambda o: o["spec"].pop("rolloutStrategy")),
        "a group more than there is room for",
    ),
    (
        pitfalls.roles,
        thing("Role", "coordinator", lambda o: o["rules"][3].pop("resourceNames")),
        "all leaderworkersets",
    ),
]


@pytest.mark.parametrize(("check", "break_it", "message"), GROUPS)
def test_a_leader_worker_set_is_checked(check: pitfalls.Check, break_it: Break, message: str) -> None:
    objects = charts.rendered("ci/leader-worker-set.yaml")
    break_it(objects)
    problems = list(check(objects))
    assert any(message in problem for problem in problems), problems


def test_no_check_is_left_out() -> None:
    assert {check for check, _, _ in BROKEN} == set(pitfalls.CHECKS)


def in_pod(**changes: Any) -> Callable[[Pod], None]:
    return lambda found: found.spec.update(changes)


def in_container(**changes: Any) -> Callable[[Pod], None]:
    return lambda found: found.spec["containers"][0]["securityContext"].update(changes)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (in_pod(hostNetwork=True), "hostNetwork"),
        (in_pod(hostPID=True), "hostPID"),
        (in_pod(hostIPC=True), "hostIPC"),
        (
            lambda p: p.spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
            "volume x is a hostPath",
        ),
        (lambda p: p.spec["securityContext"].update(sysctls=[{"name": "kernel.msgmax"}]), "kernel.msgmax"),
        (lambda p: p.spec["securityContext"].pop("runAsNonRoot"), "may run as root"),
        (lambda p: p.spec["securityContext"].update(runAsUser=0), "runs as root"),
        (lambda p: p.spec["securityContext"].pop("seccompProfile"), "seccomp profile None"),
        (in_container(privileged=True), "is privileged"),
        (in_container(allowPrivilegeEscalation=True), "privilege escalation"),
        (in_container(capabilities={"drop": ["NET_RAW"]}), "keeps capabilities"),
        (in_container(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}), "adds the capability SYS_ADMIN"),
        (in_container(seccompProfile={"type": "Unconfined"}), "seccomp profile Unconfined"),
        (in_container(procMount="Unmasked"), "all of /proc"),
        (lambda p: p.spec["containers"][0]["ports"][0].update(hostPort=80), "a port of the node"),
    ],
)
def test_each_rule_of_pod_security_can_fail(break_it: Callable[[Pod], Any], message: str) -> None:
    (found,) = [p for p in pods(charts.rendered()) if p.component == "queue"]
    assert list(violations(found)) == []
    break_it(found)
    assert any(message in problem for problem in violations(found)), list(violations(found))


def test_a_model_on_a_folder_of_the_nodes_is_not_restricted() -> None:
    """As values.yaml says: it needs a namespace that admits it."""
    sets = ('model={"source":"hostPath","hostPath":{"path":"/models"}}',)
    found = [problem for pod in pods(charts.rendered(sets=sets)) for problem in violations(pod)]
    assert found == [
        f"Deployment demo-{c}: volume model is a hostPath" for c in ("queue", "rollouter", "trainer")
    ]
