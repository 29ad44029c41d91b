"""Every key of values.yaml arrives where it says: a table of a component's keys, then the chart's own.

All keys of all components are set in one rendering, each component with values of its own, so that none can
take another's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.deploy.helm import charts, pitfalls
from tests.deploy.helm.objects import Object, Pod, of_kind, pods

COMPONENTS = ("rollouter", "trainer", "queue", "coordinator", "redis")


def owner(pod: Pod) -> Object:
    """The metadata of its workload."""
    found: Object = pod.owner["metadata"]
    return found


def main(pod: Pod) -> dict[str, Any]:
    (found,) = [c for c in pod.spec["containers"] if c["name"] == pod.component]
    return found  # type: ignore[no-any-return]


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container.get("env", [])}


def volumes(pod: Pod) -> dict[str, Any]:
    return {v["name"]: v for v in pod.spec.get("volumes", [])}


def pod_annotations(pod: Pod) -> dict[str, str]:
    found: dict[str, str] = pod.owner["spec"]["template"]["metadata"]["annotations"]
    return found


SECRET = {"valueFrom": {"secretKeyRef": {"name": "judge", "key": "token"}}}
SELECTED = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]}

OPTIONS: dict[str, tuple[Callable[[str], Any], Callable[[Pod, str], bool]]] = {
    # A key of every component: its value, by the component's name, and whether a pod has it.
    "image": (
        lambda c: {"repository": f"mine/{c}", "tag": "t9"},
        lambda p, c: main(p)["image"] == f"mine/{c}:t9",
    ),
    "resources": (
        lambda c: {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi", "example/x": 3}},
        lambda p, c: (
            main(p)["resources"]["limits"]["example/x"] == 3
            and main(p)["resources"]["requests"] == {"cpu": "1", "memory": "1Gi"}
        ),
    ),
    "extraEnv": (
        lambda c: {"MINE": c, "HOME": f"/home/{c}", "JUDGE": SECRET},
        lambda p, c: (
            variables(main(p)).items() >= {"MINE": c, "HOME": f"/home/{c}"}.items()
            and variables(main(p))["JUDGE"] == SECRET["valueFrom"]
        ),
    ),
    "envFrom": (
        lambda c: [{"configMapRef": {"name": f"{c}-proxies"}}],
        lambda p, c: main(p)["envFrom"] == [{"configMapRef": {"name": f"{c}-proxies"}}],
    ),
    "extraVolumes": (
        lambda c: [{"name": "mine", "configMap": {"name": c}}],
        lambda p, c: volumes(p)["mine"]["configMap"] == {"name": c},
    ),
    "extraVolumeMounts": (
        lambda c: [{"name": "mine", "mountPath": f"/{c}", "readOnly": True}],
        lambda p, c: {"name": "mine", "mountPath": f"/{c}", "readOnly": True} in main(p)["volumeMounts"],
    ),
    "annotations": (lambda c: {"of": c}, lambda p, c: owner(p)["annotations"]["of"] == c),
    "podLabels": (lambda c: {"of": c}, lambda p, c: p.labels["of"] == c),
    "podAnnotations": (lambda c: {"of": c}, lambda p, c: pod_annotations(p)["of"] == c),
    "nodeSelector": (lambda c: {"pool": c}, lambda p, c: p.spec["nodeSelector"] == {"pool": c}),
    "tolerations": (
        lambda c: [{"key": c, "operator": "Exists"}],
        lambda p, c: p.spec["tolerations"] == [{"key": c, "operator": "Exists"}],
    ),
    "affinity": (
        lambda c: {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": SELECTED}},
        lambda p, c: "nodeAffinity" in p.spec["affinity"],
    ),
    "topologySpreadConstraints": (
        lambda c: [{"maxSkew": 1, "topologyKey": c, "whenUnsatisfiable": "DoNotSchedule"}],
        lambda p, c: p.spec["topologySpreadConstraints"][0]["topologyKey"] == c,
    ),
    # Names that YAML would read as something else.
    "priorityClassName": (lambda c: "123", lambda p, c: p.spec["priorityClassName"] == "123"),
    "runtimeClassName": (lambda c: "1e3", lambda p, c: p.spec["runtimeClassName"] == "1e3"),
    "schedulerName": (lambda c: "true", lambda p, c: p.spec["schedulerName"] == "true"),
    "terminationGracePeriodSeconds": (
        lambda c: 400 - 20 * len(c),
        lambda p, c: p.spec["terminationGracePeriodSeconds"] == 400 - 20 * len(c),
    ),
}
OF_SOME: dict[str, tuple[Callable[[str], Any], Callable[[Pod, str], bool], tuple[str, ...]]] = {
    "scratchSize": (
        lambda c: f"{len(c)}Gi",
        lambda p, c: (
            {volumes(p)[name]["emptyDir"]["sizeLimit"] for name in ("scratch", "tmp")} == {f"{len(c)}Gi"}
        ),
        ("rollouter", "trainer", "queue", "coordinator"),
    ),
    "shmSize": (
        lambda c: f"{len(c)}Gi",
        lambda p, c: (
            volumes(p)["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{len(c)}Gi"}
            and {"name": "shm", "mountPath": "/dev/shm"} in main(p)["volumeMounts"]
        ),
        ("rollouter", "trainer"),
    ),
    "startupProbe": (
        lambda c: {"failureThreshold": 500 + len(c)},
        lambda p, c: main(p)["startupProbe"]["failureThreshold"] == 500 + len(c),
        ("rollouter", "queue", "coordinator", "redis"),
    ),
}


def everything_set() -> list[Object]:
    sets = [f"{c}.{key}={json.dumps(value(c))}" for key, (value, _) in OPTIONS.items() for c in COMPONENTS]
    sets += [f"{c}.{key}={json.dumps(value(c))}" for key, (value, _, of) in OF_SOME.items() for c in of]
    return charts.rendered(sets=tuple(sets))


def pod_of(component: str, objects: list[Object]) -> Pod:
    (found,) = [p for p in pods(objects) if p.component == component]
    return found


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("key", OPTIONS)
def test_a_components_key_is_in_its_pods(key: str, component: str) -> None:
    _, arrives = OPTIONS[key]
    assert arrives(pod_of(component, everything_set()), component)


@pytest.mark.parametrize(("key", "component"), [(key, c) for key, (_, _, of) in OF_SOME.items() for c in of])
def test_a_key_of_some_components_is_in_their_pods(key: str, component: str) -> None:
    assert OF_SOME[key][1](pod_of(component, everything_set()), component)


def test_values_of_all_components_have_the_same_keys() -> None:
    """What the table above says of one, values.yaml says of each."""
    values = yaml.safe_load((charts.CHART / "values.yaml").read_text())
    for component in COMPONENTS:
        own = {key for key, (_, _, of) in OF_SOME.items() if component in of}
        assert {*OPTIONS, *own, "pdb"} <= set(values[component]), component


@pytest.mark.parametrize("component", COMPONENTS)
def test_disruption_budgets(component: str) -> None:
    """Of every component, and a pod that is not healthy never holds up a drain."""

    def budget(value: str) -> dict[str, Any] | None:
        objects = charts.rendered(sets=(f"{component}.pdb={value}",))
        found = [
            o["spec"]
            for o in of_kind(objects, "PodDisruptionBudget")
            if o["metadata"]["name"] == f"demo-{component}"
        ]
        return found[0] if found else None

    assert (set_to := budget('{"maxUnavailable":"33%"}'))
    assert set_to["maxUnavailable"] == "33%"
    assert set_to["selector"]["matchLabels"]["app.kubernetes.io/component"] == component
    assert set_to["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    strict = budget('{"minAvailable":1,"maxUnavailable":null,"unhealthyPodEvictionPolicy":"IfHealthyBudget"}')
    assert strict
    assert (strict["minAvailable"], strict["unhealthyPodEvictionPolicy"]) == (1, "IfHealthyBudget")
    assert "maxUnavailable" not in strict
    assert budget('{"maxUnavailable":null,"unhealthyPodEvictionPolicy":"AlwaysAllow"}') is None


# -- of all components --------------------------------------------------------------------------------


def test_images_are_pulled_as_told() -> None:
    objects = charts.rendered(
        "ci/demo-cpu.yaml", sets=('image.pullPolicy="Always"', 'imagePullSecrets=[{"name":"x"}]')
    )
    assert {c["imagePullPolicy"] for pod in pods(objects) for c in pod.containers} == {"Always"}
    assert [
        pod.component for pod in pods(objects) if pod.spec.get("imagePullSecrets") != [{"name": "x"}]
    ] == []


def test_the_registry_is_that_of_our_images() -> None:
    """What `make images` pushes. Valkey's is its repository's, in full."""
    valkey = 'redis.image.repository="mirror.example/valkey"'
    objects = charts.rendered(sets=('image={"registry":"r.example/team/","tag":"t"}', valkey))
    images = {pod.component: main(pod)["image"] for pod in pods(objects)}
    assert images.pop("redis") == "mirror.example/valkey:9.1.2"
    test = "coordinator"  # whose image it uses
    assert images == {c: f"r.example/team/headrace/{test if c == 'test' else c}:t" for c in images}


def test_the_pods_are_those_of_the_security_context() -> None:
    objects = charts.rendered(sets=("podSecurityContext.runAsUser=4321",))
    users = {pod.component: pod.spec["securityContext"]["runAsUser"] for pod in pods(objects)}
    assert users.pop("redis") == 999, "Valkey's image has its own"
    assert set(users.values()) == {4321}


def test_the_test_pod_goes_where_the_coordinator_goes() -> None:
    """And has what that has to reach Redis: certificates, proxies."""
    test, coordinator = (pod_of(c, everything_set()) for c in ("test", "coordinator"))
    for key in (
        "nodeSelector",
        "tolerations",
        "affinity",
        "priorityClassName",
        "runtimeClassName",
        "schedulerName",
    ):
        assert test.spec[key] == coordinator.spec[key], key
    assert main(test)["envFrom"] == main(coordinator)["envFrom"]
    assert variables(main(test))["MINE"] == "coordinator"
    assert {"name": "mine", "mountPath": "/coordinator", "readOnly": True} in main(test)["volumeMounts"]
    assert volumes(test)["mine"] == volumes(coordinator)["mine"]


def test_further_objects_are_templates_as_maps_and_as_text() -> None:
    thing = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-map"}}
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-text'}"
    objects = charts.rendered(sets=(f"extraObjects={json.dumps([thing, text])}",))
    assert {"demo-map", "demo-text"} <= {o["metadata"]["name"] for o in objects}


# -- model, data, checkpoints -------------------------------------------------------------------------

HUB = ('model.source="hf"', 'model.hf.repo="org/model"')


def download(component: str, *sets: str) -> dict[str, Any]:
    (made,) = pod_of(component, charts.rendered(sets=(*HUB, *sets))).spec["initContainers"]
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("component", ["rollouter", "trainer", "queue"])
def test_the_model_is_downloaded_as_told(component: str) -> None:
    """With the component's own variables: a proxy, a mirror, the authority that signed its certificate."""
    own = {
        f"{component}.extraEnv": {"HTTPS_PROXY": "http://proxy:3128", "HF_HUB_OFFLINE": "1"},
        f"{component}.envFrom": [{"configMapRef": {"name": "mirror"}}],
        f"{component}.extraVolumes": [{"name": "authority", "configMap": {"name": "authority"}}],
        f"{component}.extraVolumeMounts": [{"name": "authority", "mountPath": "/authority"}],
        "model.hf.revision": "v2",
        "model.hf.existingSecret": "hub",
        "model.hf.tokenKey": "read",
        "model.hf.resources": {"limits": {"memory": "9Gi"}},
    }
    made = download(component, *(f"{key}={json.dumps(value)}" for key, value in own.items()))
    assert made["command"][-3:] == ["org/model", "v2", "/model"]
    seen = variables(made)
    assert seen["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "read"}}
    assert seen["HTTPS_PROXY"] == "http://proxy:3128"
    assert seen["HF_HUB_OFFLINE"] == "0", "the download is what the rest needs no hub for"
    assert made["envFrom"] == [{"configMapRef": {"name": "mirror"}}]
    assert {"name": "authority", "mountPath": "/authority"} in made["volumeMounts"]
    assert made["resources"]["limits"]["memory"] == "9Gi"
    assert "HF_TOKEN" not in variables(download(component))


SOURCES = {
    "pvc": {"source": "pvc", "pvc": {"claimName": "123", "subPath": "1"}},
    "hf": {"source": "hf", "hf": {"repo": "org/model", "sizeLimit": "7Gi"}},
    "hostPath": {"source": "hostPath", "hostPath": {"path": "/models/one"}},
}
VOLUMES: dict[str, dict[str, Any]] = {
    "pvc": {"persistentVolumeClaim": {"claimName": "123", "readOnly": True}},
    "hf": {"emptyDir": {"sizeLimit": "7Gi"}},
    "hostPath": {"hostPath": {"path": "/models/one", "type": "Directory"}},
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_model_is_where_it_is_said_and_read_only(source: str) -> None:
    objects = charts.rendered(
        sets=(
            f"model={json.dumps({**SOURCES[source], 'mountPath': '/weights'})}",
            'config.model.path="/weights"',
        )
    )
    for component in ("rollouter", "trainer", "queue"):
        pod = pod_of(component, objects)
        assert volumes(pod)["model"] == {"name": "model", **VOLUMES[source]}
        (mount,) = [m for m in main(pod)["volumeMounts"] if m["name"] == "model"]
        sub = {"subPath": "1"} if source == "pvc" else {}
        assert mount == {"name": "model", "mountPath": "/weights", "readOnly": True, **sub}


def test_volumes_are_those_of_the_values() -> None:
    objects = charts.rendered(
        sets=(
            'data={"claimName":"456","mountPath":"/rows"}',
            'config.data.train_files=["/rows/a.parquet"]',
            'checkpoints={"size":"5Gi","storageClassName":"1","accessModes":["ReadWriteMany"]}',
            'redis.persistence={"size":"6Gi","storageClassName":"2"}',
        )
    )
    queue = pod_of("queue", objects)
    assert volumes(queue)["data"]["persistentVolumeClaim"] == {"claimName": "456", "readOnly": True}
    assert {"name": "data", "mountPath": "/rows", "readOnly": True} in main(queue)["volumeMounts"]
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "1",
        "resources": {"requests": {"storage": "5Gi"}},
    }
    (template,) = pod_of("redis", objects).owner["spec"]["volumeClaimTemplates"]
    assert template["spec"]["storageClassName"] == "2"
    assert template["spec"]["resources"] == {"requests": {"storage": "6Gi"}}
    others = charts.rendered(sets=('checkpoints.existingClaim="789"',))
    assert of_kind(others, "PersistentVolumeClaim") == []
    assert volumes(pod_of("trainer", others))["runs"]["persistentVolumeClaim"] == {"claimName": "789"}


# -- credentials, network, cluster --------------------------------------------------------------------


def test_tls_on_both_sides() -> None:
    """Every pod shows the Secret's certificate, and takes those of its authority alone."""
    objects = charts.rendered("ci/tls.yaml")
    for pod in pods(objects):
        secret = volumes(pod)["tls"]["secret"]
        assert secret == {"secretName": "headrace-tls", "defaultMode": 0o440}, pod.name
        assert {"name": "tls", "mountPath": "/etc/headrace/tls", "readOnly": True} in main(pod)[
            "volumeMounts"
        ]
        if pod.component != "redis":
            seen = variables(main(pod))
            files = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}
            assert {name: seen[f"HEADRACE_TLS_{name}"] for name in files} == {
                name: f"/etc/headrace/tls/{file}" for name, file in files.items()
            }
            assert seen["HEADRACE_REDIS_URL"] == "rediss://demo-redis:6379/0"
    (settings,) = [o for o in of_kind(objects, "ConfigMap") if o["metadata"]["name"] == "demo-redis"]
    assert settings["data"]["valkey.conf"].splitlines()[:6] == [
        "port 0",
        "tls-port 6379",
        "tls-cert-file /etc/headrace/tls/tls.crt",
        "tls-key-file /etc/headrace/tls/tls.key",
        "tls-ca-cert-file /etc/headrace/tls/ca.crt",
        "tls-auth-clients yes",
    ]


def secret_files(pod: Pod) -> dict[str, tuple[str, str]]:
    """Name and key of the Secret behind each file that a variable of the main container names."""
    container = main(pod)
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "secrets"]
    assert mount["readOnly"]
    found = {}
    for source in volumes(pod)["secrets"]["projected"]["sources"]:
        for item in source["secret"]["items"]:
            path = f"{mount['mountPath']}/{item['path']}"
            for name, value in variables(container).items():
                if value == path:
                    found[name] = (source["secret"]["name"], item["key"])
    return found


@pytest.mark.parametrize("preset", charts.ALL)
def test_no_service_of_ours_gets_a_credential_as_a_variable(preset: str) -> None:
    """Whatever they start could read it: only the server, which starts nobody's code, has its password so."""
    for pod in pods(charts.rendered(preset)):
        for container in pod.containers:
            for name, value in variables(container).items():
                assert (
                    pod.component == "redis"
                    or not name.startswith("HEADRACE_")
                    or isinstance(value, str)
                    or ("secretKeyRef" not in value)
                ), f"{preset}: {pod.name}: {name}"


def test_credentials_are_those_of_the_secrets() -> None:
    ours = charts.rendered(sets=('auth.existingSecret="mine"',))
    theirs = charts.rendered("ci/external-redis.yaml")
    assert "Secret" not in {o["kind"] for o in ours}
    for component in ("rollouter", "trainer", "queue", "coordinator", "test"):
        assert secret_files(pod_of(component, ours)) == {
            "HEADRACE_TOKEN_FILE": ("mine", "token"),
            "HEADRACE_REDIS_PASSWORD_FILE": ("mine", "redis-password"),
        }
        assert secret_files(pod_of(component, theirs)) == {
            "HEADRACE_TOKEN_FILE": ("demo-auth", "token"),
            "HEADRACE_REDIS_PASSWORD_FILE": ("team-redis", "password"),
        }
        seen = variables(main(pod_of(component, theirs)))
        assert seen["HEADRACE_REDIS_URL"] == "rediss://redis.data.svc:6380/3"
    redis = variables(main(pod_of("redis", ours)))
    wanted = {"secretKeyRef": {"name": "mine", "key": "redis-password"}}
    assert (redis["HEADRACE_REDIS_PASSWORD"], redis["REDISCLI_AUTH"]) == (wanted, wanted)


@pytest.mark.parametrize("component", ["rollouter", "trainer"])
def test_rdma_is_given_to_both_sides(component: str) -> None:
    container = main(pod_of(component, charts.rendered("ci/rdma.yaml")))
    assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert variables(container)["NCCL_IB_HCA"] == "mlx5"
    assert variables(container)["NCCL_IB_GID_INDEX"] == "3"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_another_device_plugin() -> None:
    objects = charts.rendered(sets=('gpuResource="amd.com/gpu"',))
    limits = [main(pod_of(c, objects))["resources"]["limits"] for c in ("rollouter", "trainer")]
    assert [limit["amd.com/gpu"] for limit in limits] == [1, 6]


KUBERNETES: list[tuple[str, dict[str, Any]]] = [
    ("kubernetes.enabled=true", {"enable": True, "scale_to_zero_on_completion": False}),
    ('kubernetes={"enabled":true,"scaleToZeroOnCompletion":true}', {"scale_to_zero_on_completion": True}),
    (
        "kubernetes.enabled=true",
        {
            "namespace": "tests",
            "rollouter_deployment": "demo-rollouter",
            "trainer_deployment": "demo-trainer",
        },
    ),
]


@pytest.mark.parametrize(("value", "wanted"), KUBERNETES)
def test_what_the_coordinator_is_told_of_its_cluster(value: str, wanted: dict[str, Any]) -> None:
    found = pitfalls.run_config(charts.rendered(sets=(value,)))["kubernetes"]
    assert {key: found[key] for key in wanted} == wanted
    assert "kubernetes" not in pitfalls.run_config(charts.rendered())
    advice = pitfalls.run_config(charts.rendered("ci/keda.yaml"))["kubernetes"]["recommendation"]
    assert advice == {"min_rollouters": 2, "max_rollouters": 12}, "no more than KEDA will give"


def test_scrapes_find_the_metrics() -> None:
    """Rules and dashboards choose by `job`, which is the component."""
    objects = charts.rendered("ci/keda.yaml", sets=('monitoring.podMonitors.interval="7s"',))
    monitors = of_kind(objects, "PodMonitor")
    assert {m["metadata"]["name"] for m in monitors} == {
        f"demo-{c}" for c in ("rollouter", "trainer", "queue", "coordinator")
    }
    for monitor in monitors:
        assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/component"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["path"], endpoint["interval"]) == ("/metrics", "7s")
