"""The calculator task: questions and rows, tokens of both turns, demonstrations, reward.

Warm-ups here take 5 steps; what the demo learns is measured in `tests/engine/demo/test_calculator.py`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.demo import calculator as task
from headrace.demo import warmup
from headrace.demo.calculator import CALCULATOR, compute_score
from headrace.demo.spell_backward import EOS, PROMPT_END
from headrace.demo.warmup import DemoAssets, Recipe, prepare
from headrace.environments.calculator import Calculator, calculate
from headrace.environments.host import EnvironmentHost
from headrace.environments.protocol import Observation, Task, Turn

SHORT = Recipe(steps=5, batch_size=8)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> DemoAssets:
    return prepare(tmp_path_factory.mktemp("demo"), 0, recipe=SHORT, task=CALCULATOR)


def test_questions_are_split_for_good() -> None:
    train, held_out = task.split_questions()
    assert len(held_out) == len(set(held_out)) == 200
    assert len(train) + 200 == len(set(train + held_out)) == 90 * 90 * 3
    assert held_out[:3] == ("97-55", "40-19", "28-41"), "scores of different versions must compare"


def test_rows_are_in_verl_format(assets: DemoAssets) -> None:
    rows: list[dict[str, Any]] = [json.loads(line) for line in assets.val_file.read_text().splitlines()]
    assert len(rows) == 200
    for index, row in enumerate(rows):
        question = row["extra_info"]["question"]
        assert row == {
            "prompt": f"Calculate: {question}\n",
            "data_source": "calculator",
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": calculate(question)},
            "extra_info": {"split": "val", "index": index, "question": question},
        }


def test_saved_tokenizer_agrees_with_the_id_functions(assets: DemoAssets) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.model_dir)
    assert len(tokenizer) == len(task.TOKENS)
    for question in random.Random(0).sample(task.split_questions()[0], 100):
        assert tokenizer.encode(task.prompt_text(question)) == task.prompt_ids(question)
        right = task.answer(question)
        assert tokenizer.encode(right) == task.response_ids(right)[:-1]
        shown = tokenizer.decode(task.response_ids(right), skip_special_tokens=True)
        assert shown == right.replace(EOS, ""), "the environment must see the tags"


def test_everything_fits_into_the_demos_limits() -> None:
    longest = max(len(task.response_ids(task.answer(q))) for q in sum(task.split_questions(), ()))
    assert longest <= RESPONSE
    assert {len(task.prompt_ids(q)) for q in task.split_questions()[1]} == {7}
    assert RESPONSE + 8 <= task.MAX_POSITIONS


RESPONSE = 32


async def test_the_right_transcript_is_what_the_environment_and_the_model_say_together() -> None:
    host = EnvironmentHost(Calculator, 5.0)
    for question in task.split_questions()[1][:20]:
        first, rest = task.answer(question).split(EOS)
        asked = Task("0", "", "", "", {}, 0)
        answer, _ = await host.step(Turn(asked, 1, first, (), {"tool_calls": 0, "tool_errors": 0}, False))
        assert isinstance(answer, Observation)
        ids = task.response_ids(task.answer(question))
        own = [token for token, mine in zip(ids, task.chosen(ids), strict=True) if mine]
        last = rest.removeprefix(answer.text)
        assert own == [*task.response_ids(first), *task.response_ids(last)]
        info = {"finish_reason": "stop", "last_turn": last}
        assert compute_score("", "", calculate(question), info) == 1.0


def test_demonstrations_are_noisy_in_the_recipes_shares() -> None:
    rng = random.Random(0)
    said = [task.demonstrate("12*34", rng) for _ in range(5000)]
    assert said.count(task.answer("12*34")) / 5000 == pytest.approx(0.40, abs=0.03)
    assert sum(s.startswith(task.ANSWER) for s in said) / 5000 == pytest.approx(0.55, abs=0.03)
    assert sum(s.startswith(task.RESULT) for s in said) / 5000 == pytest.approx(0.05, abs=0.02)


def test_a_result_that_the_model_makes_up_is_its_own() -> None:
    ids = task.response_ids(f"{task.RESULT}12{task.RESULT_END}{task.ANSWER}12")
    assert all(task.chosen(ids))


def test_labels_leave_out_what_the_environment_says() -> None:
    ids, labels = warmup.collate([("12*34", task.answer("12*34"))], CALCULATOR)
    hidden = [task.TOKENS[i] for i in ids[0][labels[0] < 0].tolist()]
    assert hidden == [task.PREFIX, *"12*34", PROMPT_END, task.RESULT, *"408", task.RESULT_END]


def test_the_score_is_what_greedy_turns_would_reach() -> None:
    """Overfitted on one question, the model's most likely tokens are right there and wrong elsewhere."""
    model = task.build_model(0)
    recipe = Recipe(steps=60, batch_size=4, learning_rate=4e-3, right_share=1.0, copied_share=0.0)
    warmup.warm_up(model, ["12*34"], 0, recipe, task=CALCULATOR)
    assert warmup.exact_match(model, ["12*34"], 24, CALCULATOR) == 1.0
    assert warmup.exact_match(model, ["12*34", "98-76"], 24, CALCULATOR) == 0.5
    prompt = torch.tensor([task.prompt_ids("12*34")])
    mask = torch.ones_like(prompt)
    first = model.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert first[0, 7:].tolist() == task.response_ids(f"{task.CALL}12*34{task.CALL_END}")


@pytest.mark.parametrize(
    ("last", "reason", "score"),
    [
        ("<answer>408", "stop", 1.0),
        ("<answer>408", "length", 0.0),
        ("<answer>408", "turn_limit", 0.0),
        ("<answer>409", "stop", 0.0),
        ("408", "stop", 0.0),
        ("<result>408</result><answer>408", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_reward(last: str, reason: str, score: float) -> None:
    assert compute_score("", "", "408", {"finish_reason": reason, "last_turn": last}) == score


def test_the_configuration_names_it(tmp_path: Path) -> None:
    from headrace.config.loading import load
    from headrace.local import preflight

    config = load(Path(__file__).resolve().parents[3] / "configs" / "calculator.yaml")
    assert list(preflight._demo_names(config)) == []
    assert config.data.max_response_length == RESPONSE
    assert not config.environment.is_single_turn
