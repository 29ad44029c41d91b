"""The calculator task: say what two numbers make, with a tool that can calculate and a model that cannot.

    47*83 -> <calc>47*83</calc>  (the environment: <result>3901</result>)  <answer>3901

What this module guarantees:

- The questions, and which of them are held out, are the same for every run; a held-out question is in no
  training row.
- The warmed-up model mostly guesses an answer at once, or makes a result up, and is then wrong, but often
  enough calls the tool and repeats its result. Greedy it mostly guesses: the held-out score starts low, and
  what RL has to find out is that the tool pays.
- Each turn ends with <eos>. Tags are added tokens, not special ones, so that the environment, which reads
  text, sees them.

torch, transformers and tokenizers are imported where they are used, as in `spell_backward`.
"""

import hashlib
import itertools
import json
import random
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.demo import spell_backward
from headrace.demo.spell_backward import BOS, EOS, PAD, PROMPT_END, UNK
from headrace.demo.warmup import Recipe, Task

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

DATA_SOURCE = "calculator"
ABILITY = "arithmetic"

PREFIX = "Calculate: "
CALL, CALL_END, RESULT, RESULT_END, ANSWER = "<calc>", "</calc>", "<result>", "</result>", "<answer>"
TAGS = (CALL, CALL_END, RESULT, RESULT_END, ANSWER)
SIGNS = "*+-"

HELD_OUT_QUESTIONS = 200
SPLIT_SEED = 20240229

# A token's id is its place here.
TOKENS = (PAD, BOS, EOS, UNK, PROMPT_END, *string.digits, *SIGNS, PREFIX, *TAGS)
TOKEN_IDS = {token: index for index, token in enumerate(TOKENS)}
PAD_ID, BOS_ID, EOS_ID = TOKEN_IDS[PAD], TOKEN_IDS[BOS], TOKEN_IDS[EOS]

MAX_POSITIONS = 64  # the longest right exchange takes 28

RECIPE = Recipe(
    steps=250,
    batch_size=64,
    learning_rate=2e-3,
    right_share=0.40,
    copied_share=0.55,  # guesses
    max_new_tokens=24,
)

_PIECE = re.compile("|".join(map(re.escape, (EOS, *TAGS))) + "|.")


def result(question: str) -> int:
    """What the two numbers make."""
    left, sign, right = question[:2], question[2], question[3:]
    values = {"*": int(left) * int(right), "+": int(left) + int(right), "-": int(left) - int(right)}
    return values[sign]


def transcript(call: str, said: str) -> str:
    """Both turns, and what the environment says between them."""
    return f"{CALL}{call}{CALL_END}{EOS}{RESULT}{result(call)}{RESULT_END}{ANSWER}{said}"


def answer(question: str) -> str:
    """The right transcript."""
    return transcript(question, str(result(question)))


def demonstrate(question: str, rng: random.Random, recipe: Recipe = RECIPE) -> str:
    """One noisy demonstration: the right transcript, or a guess, or a result that the model makes up."""
    draw = rng.random()
    if draw < recipe.right_share:
        return answer(question)
    guess = "".join(rng.choice(string.digits) for _ in str(result(question)))
    if draw < recipe.right_share + recipe.copied_share:
        return f"{ANSWER}{guess}"
    return f"{RESULT}{guess}{RESULT_END}{ANSWER}{guess}"


@cache
def split_questions() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(training questions, held-out questions); each in a fixed mixed order."""
    asked = [f"{left}{sign}{right}" for left in range(10, 100) for sign in SIGNS for right in range(10, 100)]
    mixed = sorted(asked, key=lambda q: hashlib.sha256(f"{DATA_SOURCE}:{SPLIT_SEED}:{q}".encode()).digest())
    return tuple(mixed[HELD_OUT_QUESTIONS:]), tuple(mixed[:HELD_OUT_QUESTIONS])


def prompt_text(question: str) -> str:
    """The prompt that asks `question`."""
    return f"{PREFIX}{question}{PROMPT_END}"


def prompt_ids(question: str) -> list[int]:
    """`prompt_text(question)` as token ids, without a tokenizer; a test holds the two equal."""
    return [TOKEN_IDS[PREFIX], *(TOKEN_IDS[character] for character in question), TOKEN_IDS[PROMPT_END]]


def response_ids(text: str) -> list[int]:
    """The token ids of a response that says `text` and ends."""
    return [*(TOKEN_IDS[piece] for piece in _PIECE.findall(text)), EOS_ID]


def chosen(ids: Sequence[int]) -> list[bool]:
    """All are the model's but the result and its tags, where they follow the end of a turn."""
    out, inside = [], False
    for before, token in itertools.pairwise([None, *ids]):
        inside = inside or (before == EOS_ID and token == TOKEN_IDS[RESULT])
        out.append(not inside)
        inside = inside and token != TOKEN_IDS[RESULT_END]
    return out


def data_row(question: str, split: str, index: int) -> dict[str, Any]:
    """One row in verl's format; `index` counts from 0 within the split."""
    return {
        "prompt": prompt_text(question),
        "data_source": DATA_SOURCE,
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": str(result(question))},
        "extra_info": {"split": split, "index": index, "question": question},
    }


def write_rows(path: Path, questions: Iterable[str], split: str) -> None:
    """Write one row a question to `path`, as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for index, question in enumerate(questions):
            file.write(json.dumps(data_row(question, split, index)) + "\n")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> float:
    """1 where the last turn is the answer's tag and the right number, and has ended; else 0."""
    if extra_info["finish_reason"] != "stop":
        return 0.0
    return float(extra_info["last_turn"] == f"{ANSWER}{ground_truth}")


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Over this task's tokens."""
    from tokenizers import AddedToken

    tokenizer = spell_backward.build_tokenizer(TOKEN_IDS, PREFIX, MAX_POSITIONS)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def build_model(seed: int) -> "LlamaForCausalLM":
    """A Llama of 0.1 M parameters: two layers are enough to repeat what stands a few tokens before."""
    return spell_backward.build_model(seed, len(TOKENS), MAX_POSITIONS, hidden=64, layers=2)


CALCULATOR = Task(
    name=DATA_SOURCE,
    recipe=RECIPE,
    sources=lambda: (Path(__file__), Path(spell_backward.__file__)),
    pad_id=PAD_ID,
    split=split_questions,
    practice=lambda questions, rng, size: rng.choices(questions, k=size),
    demonstrate=demonstrate,
    answer=answer,
    prompt_ids=prompt_ids,
    response_ids=response_ids,
    write_rows=write_rows,
    build_tokenizer=build_tokenizer,
    build_model=build_model,
    chosen=chosen,
)
