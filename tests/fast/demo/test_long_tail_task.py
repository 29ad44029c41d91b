"""The long-tail demo: its questions and their lengths, rows, tokenizer, demonstrations, reward, names.

Warm-ups here take 3 steps, as in `test_demo_task`: what the full recipe reaches is a number to measure. The
cache, the lock and the greedy score are one code for all demos and are tested there.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from headrace import demo
from headrace.config import loading
from headrace.config.run import RunConfig
from headrace.demo import long_tail as task
from headrace.demo import spell_backward, warmup
from headrace.demo.long_tail import LONG_TAIL
from headrace.demo.reward import compute_score
from headrace.demo.warmup import SPELL_BACKWARD, DemoAssets, Recipe, Task, is_cached, prepare
from headrace.local import assets as runner_assets
from headrace.local import preflight

CONFIG = Path(__file__).parents[3] / "configs" / "long_tail.yaml"
SHORT = Recipe(steps=3, batch_size=8, max_new_tokens=8)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def assets(cache_dir: Path) -> DemoAssets:
    return prepare(cache_dir, 0, recipe=SHORT, task=LONG_TAIL)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def configuration(*overrides: str) -> RunConfig:
    return loading.load(CONFIG, overrides)


# Questions


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("spin*A", "Anips"),
        ("spin*C", "CnipsBnipsAnips"),
        ("spin*O", "".join(f"{counter}nips" for counter in "ONMLKJIHGFEDCBA")),
    ],
)
def test_an_answer_is_the_word_backward_after_every_counter(question: str, answer: str) -> None:
    assert task.answer(question) == answer
    assert task.ask(*task.word_and_number(question)) == question


@pytest.mark.parametrize("split", [0, 1], ids=["train", "held out"])
def test_the_99th_percentile_of_the_answers_is_eight_medians(split: int) -> None:
    questions = task.split_questions()[split]
    lengths = sorted(len(task.response_ids(task.answer(question))) for question in questions)
    median, high = lengths[len(lengths) // 2], lengths[int(0.99 * len(lengths))]
    assert median == 6
    assert high >= 8 * median
    assert lengths[-1] <= task.LONGEST_RESPONSE == 76


def test_numbers_are_asked_for_in_their_shares() -> None:
    numbers = [task.word_and_number(question)[1] for question in task.split_questions()[0]]
    assert sum(task.SHARES.values()) == pytest.approx(1.0)
    for number, share in task.SHARES.items():
        assert numbers.count(number) / len(numbers) == pytest.approx(share, abs=0.02)
    assert sum(number >= task.LONG for number in numbers) / len(numbers) == pytest.approx(0.04, abs=0.01)


def test_split_is_by_word_and_complete() -> None:
    train, held_out = ([task.word_and_number(q)[0] for q in part] for part in task.split_questions())
    assert len(held_out) == 200
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == [word for word in spell_backward.words() if len(word) == 4]


def test_held_out_questions_are_pinned() -> None:
    """A changed split makes scores of different versions incomparable: it must be changed knowingly."""
    assert task.split_questions()[1][:3] == ("yarb*A", "sned*B", "vare*B")


def test_rows_are_in_verl_format(assets: DemoAssets) -> None:
    for split, path, questions in zip(
        ("train", "val"), (assets.train_file, assets.val_file), task.split_questions(), strict=True
    ):
        rows = read_rows(path)
        assert len(rows) == len(questions)
        for index, (row, question) in enumerate(zip(rows, questions, strict=True)):
            word, number = task.word_and_number(question)
            prefix = "Spell this word backward, counting down (example: suns*B -> BsnusAsnus): "
            assert row == {
                "prompt": f"{prefix}{word}*{'ABCDEFGHIJKLMNO'[number - 1]}\n",
                "data_source": "long_tail",
                "ability": "spelling",
                "reward_model": {"style": "rule", "ground_truth": task.answer(question)},
                "extra_info": {"split": split, "index": index, "word": word, "number": number},
            }


# Tokenizer and model


def test_saved_tokenizer_agrees_with_the_id_functions(assets: DemoAssets) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.model_dir)
    assert len(tokenizer) == len(task.TOKENS) == 48
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    for question in random.Random(0).sample(task.split_questions()[0], 200):
        prompt, answer = task.prompt_text(question), task.answer(question)
        assert tokenizer.encode(prompt) == task.prompt_ids(question)
        assert len(task.prompt_ids(question)) == 8
        assert tokenizer.decode(task.prompt_ids(question)) == prompt
        response = [*task.response_ids(answer), task.PAD_ID]
        assert tokenizer.decode(response, skip_special_tokens=True) == answer


def test_saved_model_holds_the_longest_exchange(assets: DemoAssets) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets.model_dir)
    assert 0.80e6 < model.num_parameters() < 0.84e6
    assert model.config.vocab_size == 48
    assert model.config.max_position_embeddings >= 8 + task.LONGEST_RESPONSE
    assert model.generation_config.eos_token_id == task.EOS_ID


# Warm-up


def test_demonstrations_are_noisy_in_the_recipes_shares() -> None:
    rng = random.Random(0)
    said = [task.demonstrate("spin*B", rng) for _ in range(10_000)]
    assert said.count("BnipsAnips") / 10_000 == pytest.approx(0.4, abs=0.02)
    assert said.count("BspinAspin") / 10_000 == pytest.approx(0.3, abs=0.02)
    cuts = {"BnipsAnips"[:length] for length in range(1, 10)}
    assert set(said) == cuts | {"BnipsAnips", "BspinAspin"}


def test_a_practice_batch_is_all_short_or_all_long() -> None:
    rng = random.Random(0)
    questions = task.split_questions()[0][:1000]
    batches = [task.practice(questions, rng, 8) for _ in range(500)]
    long = [{task.word_and_number(question)[1] >= task.LONG for question in batch} for batch in batches]
    assert all(len(kinds) == 1 for kinds in long)
    assert sum(kinds == {True} for kinds in long) / 500 == pytest.approx(task.LONG_BATCHES, abs=0.08)
    sizes = {(len(batch), kinds == {True}) for batch, kinds in zip(batches, long, strict=True)}
    assert sizes == {(8, False), (4, True)}


@pytest.mark.parametrize(
    ("which", "losses"),
    [(SPELL_BACKWARD, (3.4974, 3.1805, 3.1611)), (LONG_TAIL, (3.8702, 3.68, 3.3884))],
    ids=["spell_backward", "long_tail"],
)
def test_the_warm_up_gives_the_weights_that_results_are_reported_for(
    which: Task, losses: tuple[float, ...]
) -> None:
    seen: list[float] = []
    model = which.build_model(0)
    warmup.warm_up(model, which.split()[0], 0, SHORT, lambda step, total, loss: seen.append(loss), which)
    assert seen == pytest.approx(losses, rel=1e-3)


def test_the_score_reads_answers_of_all_lengths_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = ["spin*A", "spin*C", "nuts*A", "nuts*C"]
    said = {"spin*A": "Anips", "spin*C": "CnipsBnipsAnips", "nuts*A": "AstunA", "nuts*C": "CstunBstun"}

    def greedy(prompts: list[list[int]], model: object, max_new_tokens: int) -> list[list[int]]:
        asked = ["".join(task.TOKENS[token] for token in prompt[1:-1]) for prompt in prompts]
        return [[*task.response_ids(said[question]), *[7] * 99][:max_new_tokens] for question in asked]

    monkeypatch.setattr(warmup, "_greedy", greedy)
    model = task.build_model(0)
    assert warmup.exact_match(model, questions, task.LONGEST_RESPONSE, LONG_TAIL) == 0.5
    assert warmup.exact_match(model, questions, 8, LONG_TAIL) == 0.25  # no room for the longer ones


def test_same_seed_gives_bitwise_equal_files_and_another_seed_other_weights(
    assets: DemoAssets, tmp_path: Path
) -> None:
    again = prepare(tmp_path / "again", 0, recipe=SHORT, task=LONG_TAIL)
    other = prepare(tmp_path / "other", 1, recipe=SHORT, task=LONG_TAIL)

    def weights(made: DemoAssets) -> bytes:
        return (made.model_dir / "model.safetensors").read_bytes()

    assert weights(again) == weights(assets)
    assert weights(other) != weights(assets)
    for made in (again, other):  # the questions are the same for every seed
        assert made.train_file.read_bytes() == assets.train_file.read_bytes()
        assert made.val_file.read_bytes() == assets.val_file.read_bytes()


def test_the_demos_share_a_cache_folder_and_nothing_in_it(assets: DemoAssets, cache_dir: Path) -> None:
    assert is_cached(cache_dir, 0, SHORT, LONG_TAIL)
    assert not is_cached(cache_dir, 0, SHORT, SPELL_BACKWARD)
    assert not is_cached(cache_dir, 0, task=LONG_TAIL)  # without a recipe it is the task's own
    assert assets.model_dir.parent.name.startswith("long_tail-seed0-")


# Reward


@pytest.mark.parametrize(
    ("solution", "finish_reason", "score"),
    [
        ("BnipsAnips", "stop", 1.0),
        ("BnipsAnips", "length", 0.0),
        ("BspinAspin", "stop", 0.0),
        ("BnipsAnip", "stop", 0.0),
        ("Bnips", "stop", 0.0),
        ("CnipsBnipsAnips", "stop", 0.0),
        ("nipsnips", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_reward_is_for_the_whole_answer(solution: str, finish_reason: str, score: float) -> None:
    truth = task.data_row("spin*B", "train", 0)["reward_model"]["ground_truth"]
    assert compute_score("long_tail", solution, truth, {"finish_reason": finish_reason}) == score


# Names


def test_resolve_names_the_three_assets(
    assets: DemoAssets, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(cache_dir: Path, seed: int, progress: Any, task: Task) -> DemoAssets:
        return prepare(cache_dir, seed, progress, SHORT, task)

    monkeypatch.setattr(demo, "prepare", short)
    assert demo.resolve("demo:long_tail", cache_dir, 0) == assets.model_dir
    assert demo.resolve("demo:long_tail/train", cache_dir, 0) == assets.train_file
    assert demo.resolve("demo:long_tail/val", cache_dir, 0) == assets.val_file


@pytest.mark.parametrize("uri", [uri for uri in demo.KNOWN_URIS if "long_tail" in uri])
def test_every_name_belongs_to_the_task(uri: str) -> None:
    assert demo.task_of(uri) is LONG_TAIL


def test_the_configuration_prepares_this_demo_and_holds_its_lengths() -> None:
    config = configuration()
    assert list(preflight._demo_names(config)) == []
    command = runner_assets.demo_command(config)
    assert command[command.index("--task") + 1] == "long_tail"
    assert config.data.max_prompt_length == 8
    assert config.data.max_response_length >= task.LONGEST_RESPONSE
    assert config.model.max_model_len == task.MAX_POSITIONS


def test_readiness_is_that_of_the_demo_named(
    cache_dir: Path, assets: DemoAssets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other demo's cache must not pass for this one's."""
    monkeypatch.setattr(runner_assets, "DEMO_CACHE", cache_dir)
    assert not runner_assets.demo_ready(configuration())
    folder = warmup._folder(cache_dir, 0, LONG_TAIL.recipe, LONG_TAIL)
    folder.mkdir()
    try:
        assert runner_assets.demo_ready(configuration())
        assert runner_assets.resolve(configuration()).model.path == str(folder / "model")
    finally:
        folder.rmdir()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=demo:spell_backward", "parts of different demos, long_tail and spell_backward"),
        ("model.path=demo:long_tale", "model.path: 'demo:long_tale' is no demo asset"),
    ],
)
def test_mixed_and_unknown_names_are_refused_whatever_is_cached(
    override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "is_cached", lambda *args, **options: True)
    config = configuration(override)
    assert not runner_assets.demo_ready(config)
    [problem] = preflight._demo_names(config)
    assert message in problem
