"""Prepare a demo: a supervised warm-up on noisy demonstrations, and a cache of what it makes.

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

from headrace.demo import spell_backward

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

Progress = Callable[[int, int, float], None]
"""Called after every warm-up step with (steps done, steps in all, loss in nats a token)."""

LOCK_TIMEOUT_S = 600.0  # for another process's build of the same demo, which takes about a minute
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


@dataclass(frozen=True)
class Task:
    """A demo's task as this module needs it. A question is whatever text its functions agree on."""

    name: str
    recipe: Recipe
    sources: Callable[[], Sequence[Path]]  # the files that decide, besides this module, what is made
    pad_id: int
    split: Callable[[], tuple[Sequence[str], Sequence[str]]]  # (training questions, held-out questions)
    practice: Callable[[Sequence[str], random.Random, int], list[str]]  # a batch of about the size given
    demonstrate: Callable[[str, random.Random, Recipe], str]  # a noisy answer to a question
    answer: Callable[[str], str]  # the right answer to a question
    prompt_ids: Callable[[str], list[int]]  # of a question
    response_ids: Callable[[str], list[int]]  # of an answer, <eos> included
    write_rows: Callable[[Path, Sequence[str], str], None]  # (file, questions, name of the split)
    build_tokenizer: Callable[[], "PreTrainedTokenizerFast"]
    build_model: Callable[[int], "LlamaForCausalLM"]  # from a seed
    chosen: Callable[[Sequence[int]], Sequence[bool]] | None = None
    """Which tokens of a response the model says itself, where an environment says others; None: all."""


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


SPELL_BACKWARD = Task(
    name=spell_backward.DATA_SOURCE,
    recipe=DEFAULT_RECIPE,
    sources=lambda: (Path(spell_backward.__file__), spell_backward.word_list_path()),
    pad_id=spell_backward.PAD_ID,
    split=spell_backward.split_words,
    practice=lambda words, rng, size: rng.choices(words, k=size),
    demonstrate=demonstrate,
    answer=lambda word: word[::-1],
    prompt_ids=spell_backward.prompt_ids,
    response_ids=spell_backward.response_ids,
    write_rows=spell_backward.write_rows,
    build_tokenizer=spell_backward.build_tokenizer,
    build_model=spell_backward.build_model,
)


def prepare(
    cache_dir: Path,
    seed: int,
    progress: Progress | None = None,
    recipe: Recipe | None = None,
    task: Task = SPELL_BACKWARD,
) -> DemoAssets:
    """The demo for `seed`, from the cache under `cache_dir` or built now (up to a minute, one thread).

    Without a `recipe` it is the task's own.

    Raises TimeoutError when another process holds the build for longer than `LOCK_TIMEOUT_S`, and
    FileNotFoundError when the word list's package is not installed.
    """
    recipe = recipe or task.recipe
    folder = _folder(cache_dir, seed, recipe, task)
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():  # another process may have built it while this one waited
                building = folder.with_name(folder.name + ".building")
                shutil.rmtree(building, ignore_errors=True)
                building.mkdir()
                _build(_assets(building), seed, recipe, progress, task)
                os.rename(building, folder)
    return _assets(folder)


def is_cached(cache_dir: Path, seed: int, recipe: Recipe | None = None, task: Task = SPELL_BACKWARD) -> bool:
    """Whether `prepare` with these arguments would find the demo rather than build it."""
    return _folder(cache_dir, seed, recipe or task.recipe, task).is_dir()


def held_out_exact_match(assets: DemoAssets) -> float:
    """The share of held-out questions the warmed-up model gets right, greedy, measured when built; 0 to 1."""
    report = json.loads(_report_file(assets).read_text(encoding="utf-8"))
    return float(report["held_out_exact_match"])


def _assets(folder: Path) -> DemoAssets:
    return DemoAssets(folder / "model", folder / "train.jsonl", folder / "val.jsonl")


def _report_file(assets: DemoAssets) -> Path:
    return assets.model_dir.parent / "warmup.json"


def _folder(cache_dir: Path, seed: int, recipe: Recipe, task: Task) -> Path:
    """The cache folder; its name hashes all that the files depend on, so that a changed recipe is a miss."""
    digest = hashlib.sha256()
    inputs = {
        "seed": seed,
        "recipe": dataclasses.asdict(recipe),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    digest.update(json.dumps(inputs, sort_keys=True).encode())
    for source in (Path(__file__), *task.sources()):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return cache_dir.resolve() / f"{task.name}-seed{seed}-{digest.hexdigest()[:16]}"


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


def _build(assets: DemoAssets, seed: int, recipe: Recipe, progress: Progress | None, task: Task) -> None:
    """Write every file of the demo."""
    train, held_out = task.split()
    task.write_rows(assets.train_file, train, "train")
    task.write_rows(assets.val_file, held_out, "val")
    with _one_thread():
        model = task.build_model(seed)
        warm_up(model, train, seed, recipe, progress, task)
        score = exact_match(model, held_out, recipe.max_new_tokens, task)
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


def collate(
    pairs: Sequence[tuple[str, str]], task: Task = SPELL_BACKWARD
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """(question, answer) pairs as token ids and labels, both int64 [batch, longest], padded on the right.

    Labels stand at their own token's place (the model shifts them) and cover the answer and its <eos> only,
    without what an environment says.
    Padding on the right needs no mask: under causal attention no labelled position sees it.
    """
    import torch

    prompts = [task.prompt_ids(question) for question, _ in pairs]
    answers = [task.response_ids(answer) for _, answer in pairs]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(pairs), longest), task.pad_id)
    labels = torch.full((len(pairs), longest), IGNORED_LABEL)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        chosen = task.chosen(answer) if task.chosen is not None else [True] * len(answer)
        own = [token if said else IGNORED_LABEL for token, said in zip(answer, chosen, strict=True)]
        labels[row, len(prompt) : end] = torch.tensor(own)
    return ids, labels


def warm_up(
    model: "LlamaForCausalLM",
    questions: Sequence[str],
    seed: int,
    recipe: Recipe,
    progress: Progress | None = None,
    task: Task = SPELL_BACKWARD,
) -> None:
    """Train `model` in place on noisy demonstrations for `questions`, cross-entropy a response token."""
    import torch

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    model.train()
    for step in range(1, recipe.steps + 1):
        batch = task.practice(questions, rng, recipe.batch_size)
        ids, labels = collate([(each, task.demonstrate(each, rng, recipe)) for each in batch], task)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if progress is not None:
            progress(step, recipe.steps, loss.item())
    model.eval()


def exact_match(
    model: "LlamaForCausalLM", questions: Sequence[str], max_new_tokens: int, task: Task = SPELL_BACKWARD
) -> float:
    """The share of `questions` that greedy decoding answers right and ends with <eos>, in 0 to 1.

    Questions with prompts of one length and answers of one length are decoded together: no batch needs
    padding, and none is read on past the end of the right answer, where nothing can change the score.
    """
    if task.chosen is not None:
        return _agreement(model, questions, task)
    groups: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}
    for question in questions:
        prompt, expected = task.prompt_ids(question), task.response_ids(task.answer(question))
        groups.setdefault((len(prompt), len(expected)), []).append((prompt, expected))
    right = 0
    for (_, length), group in groups.items():
        responses = _greedy([prompt for prompt, _ in group], model, min(length, max_new_tokens))
        for (_, expected), response in zip(group, responses, strict=True):
            right += response[:length] == expected
    return right / len(questions)


def _agreement(model: "LlamaForCausalLM", questions: Sequence[str], task: Task) -> float:
    """The share of `questions` for which every token of the right response that the model says itself is the
    most likely one there: that greedy decoding, with an environment that answers, would say just this."""
    import torch

    ids, labels = collate([(question, task.answer(question)) for question in questions], task)
    with torch.inference_mode():
        said = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
    agrees = (said == labels[:, 1:]) | (labels[:, 1:] == IGNORED_LABEL)
    return float(agrees.all(-1).float().mean())


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
