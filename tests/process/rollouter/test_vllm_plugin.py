"""vLLM's processes end with the one that has started them, however that ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.waiting import until

# Of the plugin's own work nothing is needed here, and vLLM takes seconds to load.
PARENT = """
import multiprocessing, os, sys, time, types
from pathlib import Path
from headrace_rollouter.vllm_plugin import OF_ROLLOUTER

def core(up):
    factory = types.ModuleType("vllm.distributed.weight_transfer.factory")
    factory.WeightTransferEngineFactory = types.SimpleNamespace(_registry={"headrace": None})
    sys.modules[factory.__name__] = factory
    for package in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        sys.modules[package] = types.ModuleType(package)
    from headrace_rollouter.vllm_plugin import register
    register()
    register()
    Path(up).touch()
    time.sleep(600)

if __name__ == "__main__":
    os.environ[OF_ROLLOUTER] = "1"
    multiprocessing.get_context("spawn").Process(target=core, args=(sys.argv[1],)).start()
"""


def test_an_engine_core_ends_with_its_rollouter(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    up = tmp_path / "up"
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py", up])
    until(up.exists, "the engine core")
    started = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait(10)
    gone, alive = psutil.wait_procs(started, timeout=10)
    for process in alive:
        process.kill()
    assert gone
    assert not alive
