"""A queue service as a process, with its run's files and the other services' part in the ledger."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis
import yaml

from headrace.ledger import LedgerError, SyncLedger, adopt, ops
from headrace.ledger.replies import Taken, Verdict
from headrace.local.valkey_server import ValkeyServer
from tests.waiting import until

TOKEN = "a-token"
ROWS = 7
HELD_OUT = 3


def write_tokenizer(folder: Path) -> None:
    """A model folder with nothing but a tokenizer: one token per letter, a BOS in front, a chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "<s>", "</s>", *map(chr, range(32, 127))]
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(letters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer.save_pretrained(folder)


def row(index: int) -> dict[str, Any]:
    """Every other prompt is a chat."""
    text = f"row {index}"
    prompt: Any = text if index % 2 == 0 else [{"role": "user", "content": text}]
    return {
        "prompt": prompt,
        "data_source": f"source{index % 2}",
        "reward_model": {"ground_truth": str(index)},
        "extra_info": {"index": index},
    }


def templated(index: int) -> str:
    return f"row {index}" if index % 2 == 0 else f"[user]row {index}[assistant]"


@dataclass
class Queue:
    """A run's files, and its service as a process."""

    folder: Path
    server: ValkeyServer
    model_dir: Path
    settings: dict[str, Any] = field(default_factory=dict)
    url: str | None = None
    process: subprocess.Popen[bytes] | None = None
    http: httpx.Client = field(default_factory=httpx.Client)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.log_file = (
            self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        )  # there may be two on one run
        self.log_file.touch()
        self.write_rows("train", ROWS)
        self.write_rows("val", HELD_OUT)
        config: dict[str, Any] = {
            "name": self.folder.name,
            "seed": 5,
            "model": {"path": str(self.model_dir)},
            "data": {
                "train_files": [str(self.folder / "train.jsonl")],
                "val_files": [str(self.folder / "val.jsonl")],
                "max_prompt_length": 40,
                "max_response_length": 8,
                "max_ahead": 6,
            },
            "rollout": {"n": 2, "total_rollout_steps": 1000},
            "actor": {"ppo_mini_batch_size": 4},
            "async_training": {"staleness_threshold": 63},
            "ledger": {"lease_s": 3, "max_retries": 0},
            "redis": {"connect_timeout_s": 5},
            "custom_reward_function": {"path": "headrace.demo.reward"},
        }
        for section, values in self.settings.items():
            config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
        (self.folder / "run.yaml").write_text(yaml.safe_dump(config))
        self.ledger = SyncLedger(redis.Redis.from_url(self.server.url), self.folder.name)

    def write_rows(self, name: str, count: int) -> None:
        lines = "".join(json.dumps(row(i)) + "\n" for i in range(count))
        (self.folder / f"{name}.jsonl").write_text(lines)

    def start(self) -> None:
        """Start the process; returns at once."""
        env = {
            **os.environ,
            "HEADRACE_REDIS_URL": self.url or self.server.url,
            "HEADRACE_RUN_DIR": str(self.folder),
            "HEADRACE_TOKEN": TOKEN,
        }
        command = [sys.executable, "-m", "headrace_queue", "--config", str(self.folder / "run.yaml")]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def up(self) -> Queue:
        """Start, and return once the service is ready."""
        self.start()
        assert self.process is not None
        port = until(self._port, f"the service to listen; its log: {self.log_file}")
        self.http.close()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)
        until(lambda: self.http.get("/readyz").status_code == 200, "the service to be ready")
        return self

    def _port(self) -> int | None:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        events = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return next((event["port"] for event in events if event["event"] == "listening"), None)

    def log(self) -> str:
        return self.log_file.read_text()

    def end(self, number: signal.Signals, timeout_s: float = 10.0) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def exit_code(self) -> int:
        """Start, and wait for the end."""
        self.start()
        assert self.process is not None
        return self.process.wait(90)

    def stats(self) -> dict[str, Any]:
        answer = self.http.get("/stats")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def commit(self, members: list[str], validate: bool = False) -> int:
        """What coordinator and trainer do until `members` have the next version."""
        ledger, stats = self.ledger, self.ledger.run(ops.stats())
        if stats.lineage == 0:
            lineage = ledger.run(ops.open_lineage(0)).lineage
            adopt(ledger, lineage, {})
        term, round_, version = ledger.run(ops.open_term()), stats.round + 1, stats.version + 1
        assert ledger.run(ops.hold(term.term, round_, term.lineage)) is Verdict.OK
        commit = ops.commit(term.term, round_, term.lineage, version, "digest", members, validate, False)
        assert ledger.run(commit).status == "ok"
        return version

    @contextlib.contextmanager
    def beating(self, owner: str) -> Iterator[None]:
        """The owner lives: it beats all the time, also while the server is away."""
        over = threading.Event()

        def beat() -> None:
            with redis.Redis.from_url(self.server.url) as client:
                ledger, count = SyncLedger(client, self.folder.name, retry_s=0.0), 0
                while not over.wait(0.1):
                    count += 1
                    with contextlib.suppress(LedgerError):
                        ledger.run(ops.beat(owner, count))

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def take(self, owner: str, version: int, count: int) -> list[Taken]:
        """Exactly `count` samples."""
        got: list[Taken] = []

        def enough() -> bool:
            got.extend(self.ledger.run(ops.take(owner, version, count - len(got))).items)
            return len(got) == count

        until(enough, f"{owner} to get {count} samples")
        return got

    def close(self) -> None:
        self.http.close()
        self.ledger.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
