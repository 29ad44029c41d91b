"""Prepare the demo: a supervised warm-up on noisy demonstrations, and a cache of what it makes.

What this module guarantees:

- The model it makes has seen how the task looks but often answers wrong, so that RL has something to learn
  and, because it is right often enough, something to learn from.
- The same seed gives bitwise the same weights on the same machine: one thread, and generators of its own.
- A folder in the cache is complete. It is built under another name and renamed when done; whatever a killed
  build left is removed by the next one. Processes that ask for the same demo at once build it once.
- Finding the demo in the cache imports no torch.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.demo import spell_backward as task

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

Progress = Callable[[int, int, float], None]
"""Called after every warm-up step with (steps done, steps in all, loss in nats a token)."""

LOCK_TIMEOUT_S = 600.0  # for another process's build of the same demo, which takes about 40 seconds
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Recipe:
    """The warm-up's constants.

    The shares are of right and of copied demonstrations, 0 to 1; the remaining ones are cut short.
    """

    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 2e-3
    right_share: float = 0.4
    copied_share: float = 0.3
    max_new_tokens: int = 12  # an answer that has not ended by then is wrong


@dataclass(frozen=True)
class DemoAssets:
    """Where a prepared demo's files are."""

    model_dir: Path
    train_file: Path
    val_file: Path


DEFAULT_RECIPE = Recipe()


def prepare(
    cache_dir: Path, seed: int, progress: Progress | None = None, recipe: Recipe = DEFAULT_RECIPE
) -> DemoAssets:
    """The demo for `seed`, from the cache under `cache_dir` or built now (about 40 seconds, one thread).

    Raises TimeoutError when another process holds the build for longer than `LOCK_TIMEOUT_S`, and
    FileNotFoundError when the word list's package is not installed.
    """
    folder = _folder(cache_dir, seed, recipe)
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():  # another process may have built it while this one waited
                building = folder.with_name(folder.name + ".building")
                shutil.rmtree(building, ignore_errors=True)
                building.mkdir()
                _build(_assets(building), seed, recipe, progress)
                os.rename(building, folder)
    return _assets(folder)


def is_cached(cache_dir: Path, seed: int, recipe: Recipe = DEFAULT_RECIPE) -> bool:
    """Whether `prepare` with these arguments would find the demo rather than build it."""
    return _folder(cache_dir, seed, recipe).is_dir()


def held_out_exact_match(assets: DemoAssets) -> float:
    """The share of held-out words the warmed-up model spells right, greedy, measured when built; 0 to 1."""
    report = json.loads(_report_file(assets).read_text(encoding="utf-8"))
    return float(report["held_out_exact_match"])


def _assets(folder: Path) -> DemoAssets:
    return DemoAssets(folder / "model", folder / "train.jsonl", folder / "val.jsonl")


def _report_file(assets: DemoAssets) -> Path:
    return assets.model_dir.parent / "warmup.json"


def _folder(cache_dir: Path, seed: int, recipe: Recipe) -> Path:
    """The cache folder; its name hashes all that the files depend on, so that a changed recipe is a miss."""
    digest = hashlib.sha256()
    inputs = {
        "seed": seed,
        "recipe": dataclasses.asdict(recipe),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    digest.update(json.dumps(inputs, sort_keys=True).encode())
    for source in (Path(__file__), Path(task.__file__), task.word_list_path()):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return cache_dir.resolve() / f"{task.DATA_SOURCE}-seed{seed}-{digest.hexdigest()[:16]}"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the file lock at `path`; the system releases it should this process die."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s to build the demo; "
                        "end that process, or choose another cache folder"
                    ) from None
                time.sleep(0.1)
        yield


def _build(assets: DemoAssets, seed: int, recipe: Recipe, progress: Progress | None) -> None:
    """Write every file of the demo."""
    train_words, held_out = task.split_words()
    task.write_rows(assets.train_file, train_words, "train")
    task.write_rows(assets.val_file, held_out, "val")
    with _one_thread():
        model = task.build_model(seed)
        warm_up(model, train_words, seed, recipe, progress)
        score = exact_match(model, held_out, recipe.max_new_tokens)
    model.save_pretrained(assets.model_dir)
    task.build_tokenizer().save_pretrained(assets.model_dir)
    report = {"seed": seed, "recipe": dataclasses.asdict(recipe), "held_out_exact_match": score}
    _report_file(assets).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: the order of its sums, and so the weights' last bits, depend on the number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def demonstrate(word: str, rng: random.Random, recipe: Recipe = DEFAULT_RECIPE) -> str:
    """One noisy demonstration for `word`: its reverse, or the word copied, or its reverse cut short.

    A cut keeps at least one letter and loses at least one.
    """
    draw = rng.random()
    if draw < recipe.right_share:
        return word[::-1]
    if draw < recipe.right_share + recipe.copied_share:
        return word
    return word[::-1][: rng.randrange(1, len(word))]


def collate(pairs: Sequence[tuple[str, str]]) -> tuple["torch.Tensor", "torch.Tensor"]:
    """(word, answer) pairs as token ids and labels, both int64 [batch, longest], padded on the right.

    Labels stand at their own token's place (the model shifts them) and cover the answer and its <eos> only.
    Padding on the right needs no mask: under causal attention no labelled position sees it.
    """
    import torch

    prompts = [task.prompt_ids(word) for word, _ in pairs]
    answers = [task.response_ids(answer) for _, answer in pairs]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(pairs), longest), task.PAD_ID)
    labels = torch.full((len(pairs), longest), IGNORED_LABEL)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def warm_up(
    model: "LlamaForCausalLM",
    words: Sequence[str],
    seed: int,
    recipe: Recipe,
    progress: Progress | None = None,
) -> None:
    """Train `model` in place on noisy demonstrations for `words`, cross-entropy a response token."""
    import torch

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    model.train()
    for step in range(1, recipe.steps + 1):
        batch = rng.choices(words, k=recipe.batch_size)
        ids, labels = collate([(word, demonstrate(word, rng, recipe)) for word in batch])
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if progress is not None:
            progress(step, recipe.steps, loss.item())
    model.eval()


def exact_match(model: "LlamaForCausalLM", words: Sequence[str], max_new_tokens: int) -> float:
    """The share of `words` that greedy decoding spells backward and ends with <eos>, in 0 to 1.

    Words of one length are decoded together, so that no batch needs padding.
    """
    right = 0
    for length in sorted({len(word) for word in words}):
        group = [word for word in words if len(word) == length]
        responses = _greedy([task.prompt_ids(word) for word in group], model, max_new_tokens)
        for word, response in zip(group, responses, strict=True):
            expected = task.response_ids(word[::-1])
            right += response[: len(expected)] == expected  # what follows <eos> is not part of the response
    return right / len(words)


def _greedy(prompts: list[list[int]], model: "LlamaForCausalLM", max_new_tokens: int) -> list[list[int]]:
    """`max_new_tokens` most likely tokens for each prompt (all of one length), read on past <eos>."""
    import torch

    ids = torch.tensor(prompts)  # [batch, prompt length]
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]  # [batch, vocabulary]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    responses: list[list[int]] = ids[:, len(prompts[0]) :].tolist()
    return responses
