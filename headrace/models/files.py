"""Reads the files of a Hugging Face model directory without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LARGEST_HEADER = 100_000_000
"""Bytes; what safetensors itself accepts."""


def read_settings(model_dir: Path) -> Mapping[str, Any]:
    """The object in config.json. Raises ValueError."""
    return _object(model_dir / "config.json")


def _object(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not readable as JSON: {error}; download the model again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: holds no JSON object; download the model again")
    return found


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model."""
    inner = settings.get("text_config")
    return inner if isinstance(inner, Mapping) else settings


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of the model: the single file, else those of the index, else all. The directory
    may also hold files of an earlier save. Raises ValueError."""
    if (one := model_dir / "model.safetensors").exists():
        return [one]
    if (index := model_dir / "model.safetensors.index.json").exists():
        names = _object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{index}: names no files; download the model again")
        files = [model_dir / Path(str(name)).name for name in sorted(set(names.values()))]
        if missing := [file.name for file in files if not file.exists()]:
            raise ValueError(f"{index}: {missing[0]} is not there; download the model again")
        return files
    return sorted(model_dir.glob("*.safetensors"))


def tensor_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the safetensors files of a directory (headers only).

    Raises ValueError when a file cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(model_dir):
        try:
            with file.open("rb") as handle:
                size = int.from_bytes(handle.read(8), "little")
                if not 0 < size < _LARGEST_HEADER:
                    raise ValueError("it has no header")
                header = json.loads(handle.read(size))
                shapes |= {n: tuple(t["shape"]) for n, t in header.items() if n != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file}: not readable as safetensors ({error}); download the model again"
            ) from error
    return shapes


def eos_token_ids(model_dir: Path) -> list[int]:
    """Every token that ends a response: generation_config.json first, else config.json. Raises ValueError."""
    for name in ("generation_config.json", "config.json"):
        file = model_dir / name
        if file.exists():
            settings = _object(file)
            found = settings.get("eos_token_id", text_settings(settings).get("eos_token_id"))
            if found is not None:
                return _token_ids(file, found)
    raise ValueError(
        f"{model_dir}: neither generation_config.json nor config.json names an eos_token_id; add it to "
        "generation_config.json"
    )


def vocabulary_size(model_dir: Path) -> int:
    """Number of token ids of the model; its tokenizer may have fewer. Raises ValueError."""
    found = text_settings(read_settings(model_dir)).get("vocab_size")
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(
            f"{model_dir / 'config.json'}: vocab_size is {found!r}: make it the number of rows of the "
            "model's embedding"
        )
    return found


def _token_ids(file: Path, found: Any) -> list[int]:
    ids = found if isinstance(found, list) else [found]
    if not ids or any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in ids):
        raise ValueError(
            f"{file}: eos_token_id is {found!r}: make it the number of the token that ends an answer, or a "
            "list of several"
        )
    return ids


def unsupported(settings: Mapping[str, Any]) -> str | None:
    """Why a model cannot be trained here, and what to do, from its config.json alone; None if there is no
    known obstacle."""
    kind = settings.get("model_type", "unknown")
    if settings.get("is_encoder_decoder"):
        return f"{kind} is an encoder-decoder model; give a decoder-only causal language model"
    if "vision_config" in settings or "audio_config" in settings:
        return (
            f"{kind} takes images or sound beside text, which the trainer does not; give the text model of "
            "the same family"
        )
    method = settings.get("quantization_config")
    if method is not None:
        name = method.get("quant_method", "") if isinstance(method, Mapping) else ""
        return (
            f"its weights are quantised ({name or 'quantization_config'}), and cannot be trained; give the "
            "model in bfloat16 or float32"
        )
    named, code = settings.get("architectures"), settings.get("auto_map")
    if isinstance(code, Mapping) and "AutoModelForCausalLM" in code:
        return None  # the directory has its own model class
    if isinstance(named, list) and named and not any(_generates(str(name)) for name in named):
        return (
            f"{', '.join(map(str, named))} is no causal language model; give one whose architecture ends in "
            "ForCausalLM"
        )
    return None


def _generates(architecture: str) -> bool:
    return architecture.endswith(("ForCausalLM", "LMHeadModel"))
