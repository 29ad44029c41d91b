"""Where the product reads pickles, or has them read: nowhere but on this list; docs/security.md explains it.

A pickle is code of whoever has made it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CODE = [*(ROOT / "headrace").rglob("*.py"), *(ROOT / "services").rglob("*.py")]

MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "copyreg"),
    *("multiprocessing", "concurrent.futures.process", "torch.multiprocessing", "torch.distributed.rpc"),
    *("torch.distributed.checkpoint", "torch.utils.data", "ray"),
}
"""Importing one is to be explained."""
CALLS = {
    *(
        "torch.load",
        "torch.save",
        "hub.load",
        "read_pickle",
        "to_pickle",
        "ProcessPoolExecutor",
        "DataLoader",
    ),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "collective_rpc", "send_pyobj", "recv_pyobj"),
    *("unsafe_load", "full_load", "load_dataset"),
}
"""Last parts of the names of functions that pickle or unpickle."""
ARGUMENTS = {"allow_pickle": True, "weights_only": False, "use_safetensors": False}

ALLOWED = {
    (
        "headrace_trainer/checkpoints/checkpoint.py",
        "torch.distributed.checkpoint",
    ): "state dictionaries, no files",
    ("headrace_trainer/checkpoints/export.py", "torch.distributed.checkpoint"): "with --trust-pickle alone",
    (
        "headrace_trainer/checkpoints/shards.py",
        "torch.distributed.checkpoint",
    ): "safetensors, without a process group",
    ("headrace_rollouter/vllm_plugin.py", "multiprocessing"): "asks for the parent's process id",
    (
        "headrace_rollouter/inference/engine.py",
        "collective_rpc",
    ): "a method by its name, which returns text and a number",
}


def found_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (n for alias in names if (n := _module(alias.name)))
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    name = f"{module}.{alias.name}"
                    if listed := _module(name) or _module(module):
                        yield listed
                    yield from _calls(name)
            case ast.Attribute() | ast.Name():
                yield from _calls(ast.unparse(node))
            case ast.keyword(arg=str(key), value=ast.Constant(value=value)) if (
                key in ARGUMENTS and value is ARGUMENTS[key]
            ):
                yield f"{key}={value}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr="load")) if not any(
                k.arg == "Loader" for k in node.keywords
            ):
                yield "yaml.load"


def _calls(name: str) -> Iterator[str]:
    yield from (call for call in CALLS if f".{name}".endswith(f".{call}"))


def _module(name: str) -> str | None:
    """The listed one that `name` is or lies in."""
    return next((m for m in sorted(MODULES) if name == m or name.startswith(f"{m}.")), None)


def test_pickles_are_where_the_list_says() -> None:
    assert len(CODE) > 100
    unknown = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in CODE
        for name in sorted(set(found_in(path.read_text())))
        if not any(str(path).endswith(f"/{file}") and name == what for file, what in ALLOWED)
    ]
    assert not unknown, "pickles are code of whoever has made them: use JSON or protobuf instead"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("def f():\n    from multiprocessing import Pipe", "multiprocessing"),
        ("import multiprocessing.connection as c", "multiprocessing"),
        ("from torch.distributed import checkpoint", "torch.distributed.checkpoint"),
        ("import torch.distributed.checkpoint as dcp", "torch.distributed.checkpoint"),
        ("torch.load(path)", "torch.load"),
        ("read = torch.load", "torch.load"),
        ("from torch import load", "torch.load"),
        ("dist.gather_object(1)", "gather_object"),
        ("from concurrent.futures import ProcessPoolExecutor", "ProcessPoolExecutor"),
        ("np.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("x(weights_only=False)", "weights_only=False"),
        ("yaml.load(text)", "yaml.load"),
        ("yaml.unsafe_load(text)", "unsafe_load"),
        ("json.loads(text); np.load(path); yaml.load(text, Loader=Safe); asyncio.gather(x)", None),
        ("from torch.distributed.elastic.multiprocessing import SignalException", None),
    ],
)
def test_it_finds_them(source: str, name: str | None) -> None:
    assert set(found_in(source)) == ({name} if name else set())
