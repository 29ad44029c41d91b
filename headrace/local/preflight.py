"""Checks before anything starts. Each yields its problems as `where: what; what to do` lines."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from headrace import demo
from headrace.config import redis_url
from headrace.config.run import RunConfig
from headrace.connections.redis_client import VOLATILE, connect
from headrace.data.dataset import read_held_out, read_train
from headrace.data.rows import DataError, DataRow
from headrace.data.tokenizer import template_problem
from headrace.local import environment_probe, plugin_probe, reward_probe, scratch, trackers
from headrace.local.data_progress import print_progress
from headrace.local.valkey_server import ValkeyError, server_binary
from headrace.models.files import eos_token_ids, unsupported
from headrace.service import cores

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Findings:
    problems: list[str]
    """Errors: the run cannot start."""
    warnings: list[str]
    """Settings that work but are probably unintended."""


def examine(config: RunConfig) -> Findings:
    """Run all checks. Unresolved `demo:` names are only checked as names."""
    # First, and alone if it fails: the checks below import data sources and trackers into this process.
    if outside := list(plugin_probe.problems(config)):
        return Findings(outside, [])
    rows: dict[str, list[DataRow]] = {}
    warnings: list[str] = []
    problems = [
        *_demo_names(config),
        *_data(config, rows, warnings),
        *_model(config),
        *reward_probe.problems(config),
        *environment_probe.problems(config),
        *_redis(config),
        *_ports(config),
        *_cores(config),
        *trackers.problems(config),
    ]
    places = [why for why in (scratch.elsewhere(), scratch.exposed()) if why is not None]
    return Findings(problems, [*warnings, *_overlap(rows), *trackers.warnings(config), *places])


def _cores(config: RunConfig) -> Iterator[str]:
    for key, cpus in (("trainer.cpus", config.trainer.cpus), ("rollout.cpus", config.rollout.cpus)):
        if (problem := cores.problem(cpus)) is not None:
            yield f"{key}: {problem}"


def _overlap(rows: Mapping[str, Sequence[DataRow]]) -> Iterator[str]:
    train, held_out = ([row.prompt for row in rows.get(key, ())] for key in ("train_files", "val_files"))
    both = len(set(train) & set(held_out))
    if both:
        yield (
            f"data.val_files: {both} of {len(held_out)} held-out prompts are training prompts too: the "
            "validation score will tell how well they are remembered; take them out of one of the two"
        )


def _demo_names(config: RunConfig) -> Iterator[str]:
    named = {"model.path": [config.model.path]}
    for key, section in (("ref.path", config.ref), ("critic.path", config.critic)):
        named[key] = [section.path] if section.path is not None else []
    named |= {"data.train_files": config.data.train_paths, "data.val_files": config.data.val_files}
    for key, values in named.items():
        for value in values:
            if demo.is_demo_uri(value) and value not in demo.KNOWN_URIS:
                yield f"{key}: {value!r} is no demo asset; known are {', '.join(demo.KNOWN_URIS)}"
    known = [value for values in named.values() for value in values if value in demo.KNOWN_URIS]
    tasks = sorted({demo.task_of(value).name for value in known})
    if len(tasks) > 1:
        yield (
            f"{', '.join(key for key, values in named.items() if set(values) & set(known))}: "
            f"parts of different demos, {' and '.join(tasks)}, whose tokens differ; take all from one"
        )


def _data(config: RunConfig, read: dict[str, list[DataRow]], warnings: list[str]) -> Iterator[str]:
    """Store readable rows in `read`, by key, and report skipped rows in `warnings`.

    Token lengths are not checked here: loading the tokenizer's library takes longer than all other checks.
    The queue service checks them with the same code before it issues anything.
    """
    data = config.data
    named = {"train_files": (data.train_paths, read_train), "val_files": (data.val_files, read_held_out)}
    for key, (entries, reader) in named.items():
        if any(map(demo.is_demo_uri, entries)):
            continue  # checked as a name; the demo writes well-formed files
        try:
            found = reader(data, print_progress())
        except DataError as error:
            yield from (f"data.{key}: {line}" for line in str(error).splitlines())
            continue
        read[key] = found.rows
        if found.skipped.total:
            left_out, first = found.skipped.total, "; ".join(map(str, found.skipped.kept[:3]))
            warnings.append(
                f"data.{key}: {left_out} of {len(found.rows) + left_out} rows are left out "
                f"(data.skip_invalid): {first}"
            )
    rows = [row for key in named for row in read.get(key, ())]
    if (problem := template_problem(rows, config)) is not None:
        yield problem


def _model(config: RunConfig) -> Iterator[str]:
    used: dict[str, str | None] = {"model.path": config.model.path}
    if config.uses_reference:
        used["ref.path"] = config.ref.path
    if config.critic.enable:
        used["critic.path"] = config.critic.path
    for key, named in used.items():
        if named is not None and not demo.is_demo_uri(named):
            yield from _model_directory(config, key, Path(named))


def _model_directory(config: RunConfig, key: str, path: Path) -> Iterator[str]:
    where = f"{key}: {path}"
    if not path.is_dir():
        yield f"{where}: no such directory; give a Hugging Face model directory on this machine"
        return
    try:
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        settings = None
        yield f"{where}: no config.json; give a directory that save_pretrained wrote"
    except (OSError, ValueError) as error:
        settings = None
        yield f"{where}/config.json: not readable as JSON: {error}; download the model again"
    if key == "model.path" and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        yield f"{where}: no tokenizer; copy tokenizer.json and tokenizer_config.json into it"
    yield from _weights(key, path)
    if isinstance(settings, dict):
        if (why := unsupported(settings)) is not None:
            yield f"{where}: {why}"
        yield from _lengths(config, settings)
        if key == "model.path":
            yield from _end_tokens(path)
        else:
            yield from _vocabulary(config, key, settings)


def _end_tokens(path: Path) -> Iterator[str]:
    try:
        eos_token_ids(path)
    except ValueError as error:
        yield f"model.path: {error}"


def _vocabulary(config: RunConfig, key: str, settings: dict[str, Any]) -> Iterator[str]:
    """A model that scores the policy's tokens must have the same vocabulary."""
    policy = Path(config.model.path) / "config.json"
    try:
        wanted = json.loads(policy.read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError):
        return  # reported already, or a demo that is not prepared yet
    found = settings.get("vocab_size")
    if isinstance(wanted, int) and isinstance(found, int) and wanted != found:
        yield f"{key}: has a vocabulary of {found} tokens, the policy one of {wanted}: give one with the same"


def _weights(key: str, path: Path) -> Iterator[str]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            yield f"{key}: {index}: not readable; download the model again"
            return
        missing = sorted(s for s in shards if not (path / s).is_file())
        if missing:
            yield f"{key}: {path}: {', '.join(missing)} missing; download the model again"
    elif not any(path.glob("*.safetensors")):
        yield (
            f"{key}: {path}: no *.safetensors weights; save the model with "
            "save_pretrained(..., safe_serialization=True)"
        )


def _lengths(config: RunConfig, settings: dict[str, Any]) -> Iterator[str]:
    text = settings.get("text_config")
    limit = settings.get("max_position_embeddings")
    if limit is None and isinstance(text, dict):
        limit = text.get("max_position_embeddings")
    if not isinstance(limit, int):
        return
    length = config.data.max_prompt_length + config.data.max_response_length
    if length > limit:
        yield (
            f"data.max_prompt_length + data.max_response_length = {length}, but the model takes {limit} "
            "positions (max_position_embeddings); shorten them"
        )
    if config.model.max_model_len is not None and config.model.max_model_len > limit:
        yield (
            f"model.max_model_len: {config.model.max_model_len} is more than the model's {limit} positions "
            "(max_position_embeddings); lower it"
        )


def _redis(config: RunConfig) -> Iterator[str]:
    if config.redis.url is None:
        try:
            server_binary()
        except ValkeyError as error:
            yield f"redis.url: not set, and {error}"
        return
    yield from external_redis_problems(
        config.redis.url, config.redis.connect_timeout_s, config.redis.allow_volatile
    )


def external_redis_problems(url: str, timeout_s: float, allow_volatile: bool = False) -> Iterator[str]:
    """Check that the server answers, accepts our credentials and is durable. Never shows the password."""
    try:
        address = redis_url.parse(url)
    except ValueError as error:
        yield f"redis.url: {error}"
        return
    shown = redis_url.masked(url)
    try:
        with connect(url, timeout_s) as client:
            info = client.info()
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
        if address.password is None:
            yield f"redis.url: {shown}: the server asks for a password; give it in HEADRACE_REDIS_PASSWORD"
        else:
            yield (
                f"redis.url: {shown}: the server refuses this user or password; correct it in "
                "HEADRACE_REDIS_PASSWORD or the URL"
            )
        return
    except redis.ResponseError as error:
        if "NOAUTH" in str(error) or "Authentication required" in str(error):
            yield f"redis.url: {shown}: the server asks for a password; give it in HEADRACE_REDIS_PASSWORD"
        else:
            yield f"redis.url: {shown}: the server answers with an error: {error}"
        return
    except (redis.ConnectionError, redis.TimeoutError, OSError, ValueError) as error:
        reason = str(error).replace(url, shown)
        if address.password:
            reason = reason.replace(address.password, redis_url.MASK)
        yield (
            f"redis.url: {shown}: no answer from {address.where} within {timeout_s:g} s ({reason}); "
            "start the server, correct the URL, or leave redis.url out to use the bundled one"
        )
        return
    policy = info.get("maxmemory_policy")
    if policy not in (None, "noeviction"):
        yield (
            f"redis.url: {shown}: maxmemory-policy is {policy}, so samples could be evicted; "
            "set it to noeviction on the server"
        )
    if info.get("aof_enabled") == 0 and not allow_volatile:
        yield f"redis.url: {shown}: {VOLATILE}"


def _ports(config: RunConfig) -> Iterator[str]:
    services = config.services
    wanted = {"queue_port": services.queue_port, "coordinator_port": services.coordinator_port}
    if services.queue_port and services.queue_port == services.coordinator_port:
        yield f"services.queue_port and services.coordinator_port are both {services.queue_port}; change one"
        return
    for key, port in wanted.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((services.host, port))
            except OSError as error:
                if not port:
                    yield f"services.host: {services.host}: {os.strerror(error.errno or 0)}; use 127.0.0.1"
                    return
                yield (
                    f"services.{key}: port {port} on {services.host}: {os.strerror(error.errno or 0)}; "
                    "choose another, or 0 for a free one"
                )
