"""What is made from configuration and chart and kept beside them; `make manifests` brings it up to date.

- `helm/headrace/values.schema.json`: its part for `config:` is the schema of the run's configuration.
- `helm/headrace/fixed-keys.yaml`: what an upgrade may not change.
- `k8s/*.yaml`: plain manifests, rendered from the presets named here.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.config import RunConfig
from headrace.records.layout import FIXED_KEYS
from scripts.kube_tools import ROOT, run_helm

CHART = ROOT / "helm" / "headrace"
FIXED = CHART / "fixed-keys.yaml"
SCHEMA = CHART / "values.schema.json"
PLAIN = ROOT / "k8s"
NAMESPACE = "headrace"
MANIFESTS = {"demo": "ci/demo-cpu.yaml", "eight-gpus": "examples/one-node-8-gpus.yaml"}
"""Name of the file and of the release in it, and the preset."""
CREDENTIALS = "run-credentials"
"""A Secret that is made beside them: a manifest that is kept in a repository holds no credentials."""
_DROPPED = ("title", "description", "default")


def schema() -> str:
    """The chart's schema with the present configuration models in it."""
    whole = json.loads(SCHEMA.read_text())
    config = RunConfig.model_json_schema()
    whole["$defs"] = _bare(config.pop("$defs"), names=True)
    for section in whole["$defs"].values():
        if "n" in section.get("properties", {}):
            section["properties"]["false"] = section["properties"][
                "n"
            ]  # Helm reads the key n as YAML 1.1: false
    whole["properties"]["config"] = _bare(config)
    data = whole["$defs"]["DataConfig"]["properties"]
    for key in ("train_files", "val_files"):  # one entry may stand alone
        data[key] = {"anyOf": [data[key], data[key]["items"]]}
    return json.dumps(whole, indent=1) + "\n"


def _bare(node: Any, names: bool = False) -> Any:
    """Without texts and defaults. `names`: the keys of `node` are names, not words of the schema language."""
    if isinstance(node, list):
        return [_bare(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {}
    for key, value in node.items():
        if not names and key in _DROPPED:
            continue
        out[key] = _bare(value, names=key == "properties" and not names)
    return out


def fixed_keys() -> str:
    """Keys that a run keeps, as the chart reads them."""
    head = (
        "# What a run that goes on keeps: the ledger and the checkpoints were made with it. An upgrade that\n"
        "# changes one is refused. Written by `make manifests`.\n"
    )
    return head + "".join(f"- {key}\n" for key in ("name", *FIXED_KEYS))


def manifest(name: str) -> str:
    """The plain manifest of one preset."""
    preset = MANIFESTS[name]
    objects = run_helm(
        "template", name, str(CHART), "--namespace", NAMESPACE, "--skip-tests",
        "--values", str(CHART / preset), "--set", f"auth.existingSecret={CREDENTIALS}",
    )  # fmt: skip
    head = (
        f"# Rendered from helm/headrace/{preset}; do not edit: `make manifests` writes it.\n"
        f"# kubectl apply -n {NAMESPACE} -f {name}.yaml, once that namespace has the Secret {CREDENTIALS} "
        "(docs/kubernetes.md).\n"
    )
    return head + objects


def main() -> None:
    SCHEMA.write_text(schema())
    FIXED.write_text(fixed_keys())
    for name in MANIFESTS:  # with the schema that has just been written
        (PLAIN / f"{name}.yaml").write_text(manifest(name))


if __name__ == "__main__":
    main()
