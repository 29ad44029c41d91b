"""Generate the files derived from configuration and chart; `make manifests` runs this.

- `helm/headrace/values.schema.json`: its part for `config:` is the schema of the run's configuration.
- `helm/headrace/lifetimes.yaml`: what an upgrade may not change, and what rolls no pod.
- `k8s/*.yaml`: plain manifests, rendered from the presets named here.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.config import lifetime
from headrace.config.run import RunConfig
from scripts.kube_tools import ROOT, run_helm

CHART = ROOT / "helm" / "headrace"
LIFETIMES = CHART / "lifetimes.yaml"
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


def lifetimes() -> str:
    """The keys of each lifetime that matters to an upgrade, as the chart reads them."""
    about = {
        "run": "Kept by a run that goes on: its ledger and checkpoints were made with it. An upgrade with\n"
        "# another value is refused.",
        "live": "Followed while the run is on: a change replaces no pod.",
        "initial": "Owned by `kubectl scale` or KEDA once the run is on: a change replaces no pod either.",
    }
    out = "# From the fields of the configuration, by `make manifests`.\n"
    for name, text in about.items():
        out += f"# {text}\n{name}:\n" + "".join(f"- {key}\n" for key in lifetime.keys(name))
    return out


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
    LIFETIMES.write_text(lifetimes())
    for name in MANIFESTS:
        (PLAIN / f"{name}.yaml").write_text(manifest(name))


if __name__ == "__main__":
    main()
