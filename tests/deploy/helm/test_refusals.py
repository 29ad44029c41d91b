"""What cannot work is refused before anything is installed, and the message says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.config.run import RunConfig
from headrace.config.staleness import MODE_PARAMETERS
from scripts.kube_tools import HelmFailed, run_helm
from scripts.manifests import SCHEMA, schema
from tests.deploy.helm import charts
from tests.deploy.helm.pitfalls import run_config

DEMO = 'config={"model":{"path":"demo:spell_backward"},"trainer":{"device":"cpu"}}'

REFUSED = [
    (('config.mode="colocated_sync"',), "config.sync.transport: colocated_sync puts a trainer's rank"),
    (
        ('config.mode="colocated_sync"', 'config.sync.transport="gloo"', "config.rollout.replicas=7"),
        "and 2 x 0.9 for engines, which leaves the trainer no tenth of it; lower it, e.g. to 0.2",
    ),
    (
        (DEMO, 'config.mode="colocated_sync"', 'config.async_training={"staleness_threshold":0.5}'),
        "config.async_training.staleness_threshold: mode colocated_sync means 0, found 0.5; leave",
    ),
    ((DEMO, 'config.mode="colocated_sync"'), "config.mode: colocated_sync without GPUs"),
    (
        (DEMO, 'config.mode="one_step_off"', 'config.async_training={"trigger_parameter_sync_step":4}'),
        "config.async_training.trigger_parameter_sync_step: mode one_step_off means 1, found 4",
    ),
    (('config.redis={"url":"redis://h"}',), "config.redis.url: give redis.external.url"),
    (("config.trainer.cpus=[0]",), "set trainer.resources"),
    (("config.rollout.cpus=[0]",), "set rollouter.resources"),
    (("config.trainer.n_gpus_per_node=16",), "16 GPUs do not fit into one node of gpusPerNode 8"),
    (
        ('config.rollout.engine={"tensor_parallel_size":16}',),
        "config.rollout.engine.tensor_parallel_size: 16 GPUs",
    ),
    (
        ('config.data.train_files=["demo:spell_backward/train"]',),
        "set config.model.path to demo:<the same name>",
    ),
    ((DEMO, 'config.data.train_files=["demo:long_tail/train"]'), "several demos (spell_backward, long_tail)"),
    (('config.model.path="demo:spell_backward"',), "the demo is made for CPUs"),
    (('config.model.path="/elsewhere"',), "/elsewhere is not below model.mountPath /model"),
    (('model.pvc.claimName=""',), "model.pvc.claimName: name the volume claim"),
    (('model.source="hf"',), "model.hf.repo: name the repository"),
    (('model={"source":"hf","hf":{"repo":"a/b"}}', 'config.model.path="/model/b"'), "it is model.mountPath"),
    (('model.source="hostPath"',), "model.hostPath.path"),
    (('files={"a b":""}',), "a b is no file name"),
    (('files={"..data":""}',), "..data is no file name"),
    (('model.mountPath="/"', 'config.model.path="/m"'), "model.mountPath: / would hide /scratch"),
    (
        ('model.mountPath="/etc/headrace/model/"', 'config.model.path="/etc/headrace/model/"'),
        "would hide /scratch",
    ),
    (
        ('data.mountPath="/tmp/"', 'config.data.train_files=["/tmp/a"]'),
        "data.mountPath: /tmp/ would hide /tmp",
    ),
    (('data.mountPath="/model/data"',), "lie in one another"),
    (
        ('trainer.extraVolumes=[{"name":"runs","emptyDir":{}}]',),
        "trainer.extraVolumes: the pod has runs already",
    ),
    (
        ('queue.extraVolumeMounts=[{"name":"scratch","mountPath":"/data/"}]',),
        "queue.extraVolumeMounts: the pod has /data already",
    ),
    (('rollouter.extraEnv={"POD_NAME":"one"}',), "rollouter.extraEnv.POD_NAME: the chart sets it"),
    (('trainer.extraEnv={"HEADRACE_RUN_DIR":"/runs/x"}',), "trainer.extraEnv.HEADRACE_RUN_DIR: the chart"),
    (('config.kubernetes={"enable":true}',), "config.kubernetes.enable: set kubernetes.enabled instead"),
    (
        ("kubernetes.enabled=true", 'config.kubernetes={"trainer_deployment":"x"}'),
        "config.kubernetes.trainer_deployment: the chart sets it",
    ),
    (('networkPolicy.ephemeralPorts={"from":2,"to":1}',), "ephemeralPorts: from is above to"),
    (('config.custom_reward_function.path="/etc/headrace/files/mine.py"',), "files has no mine.py; add it"),
    (
        ('config.reward={"sources":{"sum":{"kind":"function","path":"/etc/headrace/files/sum.py"}}}',),
        "config.reward.sources.sum.path: files has no sum.py; add it",
    ),
    (
        ('config.environment={"name":"Game","path":"/etc/headrace/files/game.py"}',),
        "config.environment.path: files has no game.py; add it",
    ),
    (
        ('config.data.chat_template="/etc/headrace/files/chat.jinja"',),
        "config.data.chat_template: files has no chat.jinja; add it",
    ),
    (("config.trainer.nnodes=2",), "the ranks of 2 nodes write to one volume; use [ReadWriteMany]"),
    (
        ("autoscaling.enabled=true", "rollouter.replicas=3", "kubernetes.enabled=true"),
        "the autoscaler sets it",
    ),
    (('autoscaling={"enabled":true,"minReplicas":9}', "kubernetes.enabled=true"), "is above"),
    (("autoscaling.enabled=true",), "set kubernetes.enabled, or a query of your own"),
    (
        ("autoscaling.enabled=true", 'kubernetes={"enabled":true,"scaleToZeroOnCompletion":true}'),
        "would bring the rollouters back",
    ),
    (
        ("rollouter.terminationGracePeriodSeconds=60",),
        "rollouter.terminationGracePeriodSeconds: 60 would kill it",
    ),
    (
        ('config.services={"stop_timeout_s":300}', "trainer.terminationGracePeriodSeconds=200"),
        "set more than 300",
    ),
    (
        ("redis.terminationGracePeriodSeconds=60",),
        "redis.terminationGracePeriodSeconds: 60 would end it before those that save",
    ),
    (
        ("trainer.terminationGracePeriodSeconds=600", "redis.terminationGracePeriodSeconds=300"),
        "set at least 630, or leave it out",
    ),
    (('queue.extraEnv={"HF_TOKEN":"abc"}',), "queue.extraEnv.HF_TOKEN: a secret does not belong into values"),
    (
        ('trainer.extraEnv={"AWS_SECRET_ACCESS_KEY":"pw"}',),
        "trainer.extraEnv.AWS_SECRET_ACCESS_KEY: a secret",
    ),
    (('coordinator.extraEnv={"OPENAI_KEY":"pw"}',), "coordinator.extraEnv.OPENAI_KEY: a secret"),
    (('redis.extraEnv={"db_pass":"/pw"}',), "redis.extraEnv.db_pass: a secret"),
    (('rollouter.extraEnv={"PIN_AUTH":1234}',), "rollouter.extraEnv.PIN_AUTH: a secret"),
    (('queue.extraEnv={"HTTPS_PROXY":"http://u:pw@proxy:3128"}',), "queue.extraEnv.HTTPS_PROXY: a secret"),
    (
        ('config.reward={"sources":{"j":{"kind":"http","url":"https://u:pw@judge/"}}}',),
        "config: holds a URL with a password",
    ),
    (("rollouter.pdb.minAvailable=1",), "give minAvailable or maxUnavailable, not both"),
    ((DEMO, "rdma.enabled=true"), "rdma.enabled: there is nothing to speed up on CPUs"),
    (("tls.enabled=true",), "tls.existingSecret: name the Secret"),
    (('redis.external.url="redis://:pw@h/0"',), "leave the password out"),
    (('redis.external.url="redis://h/0?password=pw"',), "leave the password out"),
    (('redis.external.url="http://h"',), "write redis://host:6379/0"),
    (('redis.image.tag=""',), "redis.image.tag: name a version, or a digest"),
    (("podSecurityContext.runAsUser=0",), "podSecurityContext.runAsUser: 0 is root"),
    (('redis.external.url="redis:///0"',), "write redis://host:6379/0"),
    (('redis.external.url="redis://h/0 #x"',), "write redis://host:6379/0"),
]


@pytest.mark.parametrize(("sets", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_values_that_cannot_work(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(HelmFailed) as refused:
        charts.text(sets=sets)
    assert message in str(refused.value)
    assert "pw" not in str(refused.value).replace("password", "")


@pytest.mark.parametrize("mode", MODE_PARAMETERS)
def test_modes_are_taken(mode: str, tmp_path: Path) -> None:
    """On GPUs, and on cores, where colocated sync means nothing on several machines; what a mode stands
    for may be said, and what the chart takes the run takes."""
    gpus = (
        'config.sync.transport="gloo"',
        "config.rollout.engine.gpu_memory_utilization=0.4",
        "config.rollout.replicas=6",
    )
    given = f"config.async_training={json.dumps(MODE_PARAMETERS[mode])}"
    for preset, sets in (("ci/demo-cpu.yaml", ()), (charts.DEFAULTS, gpus)):
        if mode == "colocated_sync" and not sets:
            continue
        objects = charts.rendered(preset, sets=(f'config.mode="{mode}"', given, *sets))
        config = RunConfig.model_validate(run_config(objects))
        assert str(config.derived_mode) == mode
        assert (config.gpu_sharing is not None) == (mode == "colocated_sync" and bool(sets))


def test_volumes_of_ones_own_are_taken() -> None:
    """Where the pod has none: the queue service has no /dev/shm of the chart's, the coordinator no model."""
    sets = (
        'queue.extraVolumes=[{"name":"shm","emptyDir":{"medium":"Memory"}}]',
        'queue.extraVolumeMounts=[{"name":"shm","mountPath":"/dev/shm"}]',
        'coordinator.extraVolumeMounts=[{"name":"scratch","mountPath":"/model","subPath":"x"}]',
    )
    assert charts.text(sets=sets)


def test_files_that_are_there_are_taken() -> None:
    paths = [
        'config.reward={"sources":{"sum":{"kind":"function","path":"/etc/headrace/files/reward.py"}}}',
        'config.environment={"name":"Game","path":"/etc/headrace/files/game.py"}',
        'config.data.chat_template="/etc/headrace/files/chat.jinja"',
    ]
    assert charts.text(sets=(*paths, 'files={"game.py":"x = 1","chat.jinja":"{{ messages }}"}'))
    others = 'config.reward={"sources":{"answer":{"kind":"math_verify"}}}'
    assert charts.text(sets=(others, 'files={"reward.py":null}')), "the example gives way to them"


def test_files_that_no_config_map_holds(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(json.dumps({"files": {"large.txt": "x" * 1_000_000}}))
    with pytest.raises(HelmFailed, match="files: more than a ConfigMap can hold"):
        run_helm("template", "demo", str(charts.CHART), "--values", str(tmp_path / "values.yaml"))


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(HelmFailed) as refused:
        charts.text(sets=("tls.enabled=true", "config.trainer.nnodes=2"))
    assert str(refused.value).count("\n  - ") == 2


def test_variables_that_are_no_secrets() -> None:
    """Switches, files of secrets, names of them; and what comes from a Secret."""
    harmless = {
        "HTTPS_PROXY": "http://user@proxy:3128",
        "HF_TOKEN_PATH": "/etc/hub/token",
        "GOOGLE_APPLICATION_CREDENTIALS": "/etc/google/key.json",
        "USE_AUTH": True,
        "NCCL_DEBUG": "INFO",
        "API_KEY": {"valueFrom": {"secretKeyRef": {"name": "judge", "key": "token"}}},
    }
    assert charts.text(sets=(f"rollouter.extraEnv={json.dumps(harmless)}",))


@pytest.mark.parametrize("release", ["1st", "a.b"])
def test_release_names_that_no_service_can_have(release: str) -> None:
    with pytest.raises(HelmFailed, match="choose another release name"):
        charts.text(release=release)


BY_SCHEMA = [
    ("config.rollout.replica=3", "'/config/rollout': additional properties 'replica' not allowed"),
    (
        'config.async_training={"staleness_threshold":-1}',
        "'/config/async_training/staleness_threshold': minimum",
    ),
    (
        'config.rollout.total_rollout_steps="many"',
        "'/config/rollout/total_rollout_steps': got string, want integer",
    ),
    ("rollouter.replica=3", "'/rollouter': additional properties 'replica' not allowed"),
    ("rollouter.replicas=-1", "'/rollouter/replicas': minimum"),
    ('model.source="s3"', "'/model/source': value must be one of"),
    ('queue.resources.limits.memory="8 GB"', "'/queue/resources/limits/memory': '8 GB' does not match"),
    ('image.tag="a b"', "'/image/tag': 'a b' does not match"),
    ('image.registry="http://registry.example"', "'/image/registry': 'http://registry.example' does not"),
    ('image.pullPolicy="always"', "'/image/pullPolicy': value must be one of"),
    ('rollouter.image.digest="latest"', "'/rollouter/image/digest': 'latest' does not match"),
    ('checkpoints.accessModes=["RWX"]', "'/checkpoints/accessModes/0': value must be one of"),
    ('rollouter.extraEnv={"A":{"secret":"x"}}', "'/rollouter/extraEnv/A'"),
    ('redis.maxmemory="lots"', "'/redis/maxmemory': 'lots' does not match"),
    ('rollouter.pdb={"maxUnavailable":"some"}', "'some' does not match"),
    ('rollouter.podLabels={"team":"not valid"}', "'/rollouter/podLabels/team': 'not valid' does not match"),
    ('networkPolicy.kubernetesApi={"cidr":"10.0.0.0/8"}', "additional properties 'cidr' not allowed"),
    ('trainer.workload="statefulSet"', "'/trainer/workload': value must be one of"),
]


@pytest.mark.parametrize(("value", "message"), BY_SCHEMA, ids=[value.split("=")[0] for value, _ in BY_SCHEMA])
def test_the_schema_names_the_wrong_key(value: str, message: str) -> None:
    with pytest.raises(HelmFailed) as refused:
        charts.text(sets=(value,))
    assert message in str(refused.value)


def test_the_schema_has_the_present_configuration() -> None:
    assert SCHEMA.read_text() == schema(), "run `make manifests`"


def test_helms_reading_of_the_key_n_is_undone() -> None:
    """Helm reads `n: 8` as YAML 1.1 does, with the key false; a value of the command line goes first."""
    assert '"false"' in json.dumps(json.loads(SCHEMA.read_text())["$defs"]["RolloutConfig"]["properties"])
    (config,) = [o for o in charts.rendered("ci/demo-cpu.yaml") if o["metadata"]["name"] == "demo-config"]
    assert '"n": 8' in config["data"]["config.yaml"]
    assert "false" not in config["data"]["config.yaml"]
    (config,) = [
        o
        for o in charts.rendered("ci/demo-cpu.yaml", sets=("config.rollout.n=4",))
        if o["metadata"]["name"] == "demo-config"
    ]
    assert '"n": 4' in config["data"]["config.yaml"]
