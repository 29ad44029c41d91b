"""`python -m tests.deploy.docker.check`: a short run of the demo with each service from its own image's lock.

There is no image in it: each lock is installed into a clean environment of its own (about 5 GB under
.cache/images, made anew), and the local runner starts every service from there. As in an image for CPU,
no compiler is on PATH, neither for pip nor for the run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from headrace.cli.main import main as headrace
from headrace.local import services
from tests import no_compiler
from tests.deploy.docker.dockerfiles import ROOT, SERVICES
from tests.deploy.docker.environments import PACKAGES, build_context, import_late, install

ENVIRONMENTS = ROOT / ".cache" / "images"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.docker.check", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="use the environments that are there")
    args = parser.parse_args()
    if not args.keep:
        shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        machine = no_compiler.environment(Path(folder) / "machine", ("git", "du"))
        with mock.patch.dict(os.environ, machine, clear=True):
            check(Path(folder) / "context")


def check(folder: Path) -> None:
    """`folder`: for the build context. Ends the process with the run's exit code."""
    pythons: dict[str, Path] = {}
    context = build_context(folder)
    for service in SERVICES:
        where = ENVIRONMENTS / service
        print(f"images: {service}", flush=True)
        found = where / "bin" / "python"
        pythons[PACKAGES[service]] = found if found.exists() else install(service, where, context)
        import_late(service, found)
    for package, python in pythons.items():
        size = subprocess.run(["du", "-sm", python.parents[1]], capture_output=True, text=True, check=True)
        print(f"images: {package}: {size.stdout.split()[0]} MB", flush=True)
    own = services._module

    def from_its_image(layout: Any, name: str, package: str, *rest: Any, **options: Any) -> Any:
        with mock.patch.object(sys, "executable", str(pythons[package])):
            return own(layout, name, package, *rest, **options)

    os.environ.pop("PYTHONPATH", None)
    os.chdir(ROOT)
    with mock.patch.object(services, "_module", from_its_image):
        headrace(
            [
                *("run", "configs/demo.yaml", "name=images", "rollout.total_rollout_steps=256"),
                *("trainer.resume=never", f"runs_dir={ENVIRONMENTS}/runs"),
                "services.start_timeout_s=900",  # nothing there is compiled to bytecode
            ]
        )


if __name__ == "__main__":
    main()
