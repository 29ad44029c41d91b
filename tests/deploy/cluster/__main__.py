"""`python -m tests.deploy.cluster`: the story on the cluster of KUBECONFIG. Variables are its options:

CONTEXT of the kubeconfig, NAMESPACE (headrace-test; made, or empty), DEVICE (cpu), VALUES (files, by commas;
on cpu the demo's), REGISTRY and TAG of the images where they are not those of the values, SAMPLES of the run,
KEEP=1 to leave everything there. Exit codes: 0 all promises were kept, 1 one was not, 2 it could not begin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.kube_tools import ROOT
from tests.deploy.cluster.judge import Broken
from tests.deploy.cluster.site import COMPONENTS, NoAnswer, Site
from tests.deploy.cluster.story import Story

DEMO = ROOT / "helm" / "headrace" / "ci" / "demo-cpu.yaml"
SAMPLES = 25_600
RELEASE = "demo"


def site_of(variables: Mapping[str, str]) -> Site:
    """The cluster that the variables describe. Raises Broken for what is missing."""
    values = [Path(name) for name in variables.get("VALUES", "").split(",") if name]
    if not values and variables.get("DEVICE", "cpu") != "cpu":
        raise Broken("name files of values for GPUs in VALUES: model and data are your cluster's")
    sets: dict[str, Any] = {"config.rollout.total_rollout_steps": int(variables.get("SAMPLES") or SAMPLES)}
    if registry := variables.get("REGISTRY", ""):
        sets |= {f"{name}.image.repository": f"{registry.rstrip('/')}/{name}" for name in COMPONENTS}
    if tag := variables.get("TAG", ""):
        sets |= {"image.tag": tag, "image.variant": ""}
    return Site(
        namespace=variables.get("NAMESPACE") or "headrace-test",
        release=RELEASE,
        values=values or [DEMO],
        sets=sets,
        context=variables.get("CONTEXT") or None,
    )


def main(variables: Mapping[str, str] = os.environ) -> int:
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"test-cluster: {time.monotonic() - began:6.0f} s  {what}", flush=True)

    try:
        site = site_of(variables)
        site.take()
    except (Broken, NoAnswer) as error:
        print(f"test-cluster: {error}", file=sys.stderr)
        return 2
    told = False
    try:
        Story(site, say).tell()
        told = True
        say("done")
    except (Broken, NoAnswer) as error:
        site.tell_what_is_there()
        print(f"test-cluster: {error}", file=sys.stderr)
    finally:
        if variables.get("KEEP") == "1":
            say(f"left in namespace {site.namespace}: {json.dumps(site.sets)}")
        else:
            told = _left(site) and told
    return 0 if told else 1


def _left(site: Site) -> bool:
    """Whether nothing stays behind; what does is told."""
    try:
        site.leave()
    except NoAnswer as error:
        print(f"test-cluster: namespace {site.namespace} is still there: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
