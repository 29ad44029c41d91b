"""Numbers of values become text as they were written: Helm reads floats, and prints large ones as 1e+10."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.config import loading
from tests.deploy.helm import charts, pitfalls
from tests.deploy.helm.objects import Object, of_kind, pods

LARGE = 34359738368
COMPONENTS = ("rollouter", "trainer", "queue", "coordinator", "redis")


def environment(objects: list[Object], component: str) -> dict[str, str]:
    (pod,) = [p for p in pods(objects) if p.component == component and p.owner["kind"] != "Pod"]
    (main,) = [c for c in pod.containers if c["name"] == component]
    return {v["name"]: v["value"] for v in main["env"] if "value" in v}


def test_variables() -> None:
    values = {"SIZE": LARGE, "SHARE": 0.5, "FLAG": True, "WORD": "8e6"}
    expected = {"SIZE": str(LARGE), "SHARE": "0.5", "FLAG": "true", "WORD": "8e6"}
    objects = charts.rendered(sets=tuple(f"{c}.extraEnv={json.dumps(values)}" for c in COMPONENTS))
    for component in COMPONENTS:
        found = environment(objects, component)
        assert {name: found[name] for name in values} == expected, component


@pytest.mark.parametrize("component", ["rollouter", "trainer"])
def test_variables_of_rdma(component: str) -> None:
    found = environment(
        charts.rendered(sets=("rdma.enabled=true", f"rdma.env.NCCL_BUFFSIZE={LARGE}")), component
    )
    assert found["NCCL_BUFFSIZE"] == str(LARGE)


def test_redis_limit() -> None:
    """Valkey takes no exponent: it would end at its start."""
    text = charts.text(sets=(f"config.redis.max_memory_bytes={LARGE}",))
    assert re.findall(r"^ *maxmemory (\S+)$", text, re.MULTILINE) == [str(LARGE)]


def test_the_run_gets_its_numbers(tmp_path: Path) -> None:
    """However Helm writes them into the file."""
    sizes = (
        "config.redis.max_memory_bytes=10000000000",
        'config.rollout.engine={"kv_cache_memory_bytes":34359738368}',
        "config.actor.optim.lr=1e-6",
    )
    (found,) = [o for o in charts.rendered(sets=sizes) if "config.yaml" in o.get("data", {})]
    (tmp_path / "config.yaml").write_text(found["data"]["config.yaml"])
    config = loading.load(tmp_path / "config.yaml")
    assert config.redis.max_memory_bytes == 10_000_000_000
    assert config.rollout.engine.kv_cache_memory_bytes == LARGE
    assert config.actor.optim.lr == 1e-6


def test_a_revision_of_digits_is_text() -> None:
    sets = ('model={"source":"hf","hf":{"repo":"org/one","revision":"12345678"}}',)
    inits = [c for pod in pods(charts.rendered(sets=sets)) for c in pod.spec.get("initContainers", [])]
    assert inits
    assert all(isinstance(word, str) for c in inits for word in c.get("command", [])), inits[0]["command"]


WORDS = ("on", "true", "null", "y")


@pytest.mark.parametrize("release", WORDS)
def test_words_that_yaml_takes_for_others_are_text(release: str) -> None:
    """And digits: a namespace, a claim, a class, a path within a volume may be called so."""
    sets = (
        'model.pvc={"claimName":"2024","subPath":"7"}',
        'trainer.priorityClassName="1e3"',
        'trainer.schedulerName="true"',
        'trainer.extraEnv={"NO":"1","Y":"2"}',
        "kubernetes.enabled=true",
    )
    objects = charts.rendered(release=release, sets=sets)
    (trainer,) = [pod for pod in pods(objects) if pod.component == "trainer"]
    assert trainer.labels["app.kubernetes.io/instance"] == release
    assert (trainer.spec["priorityClassName"], trainer.spec["schedulerName"]) == ("1e3", "true")
    (model,) = [v for v in trainer.spec["volumes"] if v["name"] == "model"]
    assert model["persistentVolumeClaim"]["claimName"] == "2024"
    (mount,) = [m for m in trainer.spec["containers"][0]["volumeMounts"] if m["name"] == "model"]
    assert mount["subPath"] == "7"
    assert {"NO", "Y"} <= {v["name"] for v in trainer.spec["containers"][0]["env"]}
    assert [problem for check in pitfalls.CHECKS for problem in check(objects)] == []


def test_nothing_has_an_exponent() -> None:
    """In the whole of the objects, texts included; quantities may."""
    objects = charts.rendered("ci/everything.yaml", sets=(f'trainer.extraEnv={{"SIZE":{LARGE}}}',))
    texts = json.dumps([o for o in objects if not of_kind([o], "PrometheusRule")])
    assert re.findall(r'"-?\d(?:\.\d+)?e\+\d+"', texts) == []
