"""The long-tail task: most answers are a few tokens long, a few are over ten times as long.

Asynchronous training pays where responses differ in length: a batch that waits for its longest answer leaves
the engines empty meanwhile. This task exists to measure that. It asks for a word spelt backward a number of
times, each time after a counter, from the number asked for down to A:

    spin*A -> Anips        spin*C -> CnipsBnipsAnips

What this module guarantees:

- Of the answers the 99th percentile is at least 8 times as long as the median, among the training questions
  and among the held-out ones. What the warmed-up model samples at temperature 1 has that tail too.
- The questions, and which of them are held out, depend on the installed word list alone. A held-out word is
  in no training question, whatever its number.
- A prompt is 8 tokens: the prefix, four letters, TIMES, the number, the end. A response is one token a
  character and then <eos>, at most `LONGEST_RESPONSE` in all where it is right.

Why the counters: without them the model has to know by position alone when 48 letters are enough. A model of
this size does not learn that in a minute, scores 0 on long answers, and RL, which then is paid for the short
ones only, unlearns the long ones: the tail is gone within 50 updates. A counter makes each next token depend
on a few near ones, so that a long answer is within reach of the warm-up and stays in use.

The reward is exact match, that of `headrace.demo.reward`. A share of correct leading tokens was tried, and
learns neither faster nor further; with exact match the training reward and the held-out score are one scale.

torch, transformers and tokenizers are imported where they are used, as in `spell_backward`.
"""

import hashlib
import json
import random
import string
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.demo import spell_backward
from headrace.demo.spell_backward import BOS, EOS, PAD, PROMPT_END, UNK
from headrace.demo.warmup import Recipe, Task

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

DATA_SOURCE = "long_tail"
ABILITY = "spelling"

PREFIX = "Spell this word backward, counting down (example: suns*B -> BsnusAsnus): "
TIMES = "*"
COUNTERS = string.ascii_uppercase[:15]  # A is 1, O is 15

LETTERS = 4
SHARES = {1: 0.60, 2: 0.22, 3: 0.09, 4: 0.05, 11: 0.008, 12: 0.008, 13: 0.008, 14: 0.008, 15: 0.008}
"""How often each number is asked for. The gap keeps the tail a tail: 4 % of the questions."""
LONG = 11  # the least number that is in the tail
LONGEST_RESPONSE = max(SHARES) * (1 + LETTERS) + 1

HELD_OUT_QUESTIONS = 200
SPLIT_SEED = 20240229  # of the numbers and the held-out split, the same for every run

# A token's id is its place here; 48 in all.
TOKENS = (PAD, BOS, EOS, UNK, PROMPT_END, *string.ascii_lowercase, PREFIX, TIMES, *COUNTERS)
TOKEN_IDS = {token: index for index, token in enumerate(TOKENS)}
PAD_ID, BOS_ID, EOS_ID = TOKEN_IDS[PAD], TOKEN_IDS[BOS], TOKEN_IDS[EOS]

MAX_POSITIONS = 88  # tokens, prompt and response together; the longest right exchange takes 84

LONG_BATCHES = 0.3  # share of the warm-up's batches that practise the tail; half as large, as they are longer

RECIPE = Recipe(
    steps=500,
    batch_size=32,
    learning_rate=3e-3,
    right_share=0.4,
    copied_share=0.3,
    max_new_tokens=LONGEST_RESPONSE,
)


def ask(word: str, number: int) -> str:
    """The question for `word`, what stands in the prompt between prefix and end."""
    return f"{word}{TIMES}{COUNTERS[number - 1]}"


def word_and_number(question: str) -> tuple[str, int]:
    """The parts of a question."""
    word, _, counter = question.partition(TIMES)
    return word, COUNTERS.index(counter) + 1


def counted_down(text: str, number: int) -> str:
    """`text` so many times, each time after its counter."""
    return "".join(counter + text for counter in reversed(COUNTERS[:number]))


def answer(question: str) -> str:
    """The right answer."""
    word, number = word_and_number(question)
    return counted_down(word[::-1], number)


def demonstrate(question: str, rng: random.Random, recipe: Recipe = RECIPE) -> str:
    """One noisy demonstration: the answer, or the same with the word forward, or the answer cut short.

    A cut keeps at least one character and loses at least one.
    """
    draw = rng.random()
    if draw < recipe.right_share:
        return answer(question)
    if draw < recipe.right_share + recipe.copied_share:
        return counted_down(*word_and_number(question))
    right = answer(question)
    return right[: rng.randrange(1, len(right))]


def practice(questions: Sequence[str], rng: random.Random, size: int) -> list[str]:
    """A warm-up batch: `size` short questions, or, `LONG_BATCHES` of the time, half as many long ones.

    Short and long ones apart, because a batch is padded to its longest row. Long ones more often than they
    are asked for, because the high counters occur in no other.
    """
    long = rng.random() < LONG_BATCHES
    pool = [question for question in questions if (word_and_number(question)[1] >= LONG) == long]
    return rng.choices(pool, k=size // 2 if long else size)


def _digest(word: str) -> bytes:
    return hashlib.sha256(f"{DATA_SOURCE}:{SPLIT_SEED}:{word}".encode()).digest()


def _number(word: str) -> int:
    """The number that `word` is asked for with: drawn from `SHARES` by a hash of the word."""
    left = int.from_bytes(_digest(word)[-8:], "big") / 2**64
    for number, share in SHARES.items():
        if left < share:
            return number
        left -= share
    return max(SHARES)


@cache
def split_questions() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(training questions, held-out questions), one a word; each in a fixed mixed order."""
    words = [word for word in spell_backward.words() if len(word) == LETTERS]
    mixed = [ask(word, _number(word)) for word in sorted(words, key=_digest)]
    return tuple(mixed[HELD_OUT_QUESTIONS:]), tuple(mixed[:HELD_OUT_QUESTIONS])


def prompt_text(question: str) -> str:
    """The prompt that asks `question`."""
    return f"{PREFIX}{question}{PROMPT_END}"


def prompt_ids(question: str) -> list[int]:
    """`prompt_text(question)` as token ids, without a tokenizer; a test holds the two equal."""
    return [TOKEN_IDS[PREFIX], *(TOKEN_IDS[character] for character in question), TOKEN_IDS[PROMPT_END]]


def response_ids(text: str) -> list[int]:
    """The token ids of a response that says `text` and ends."""
    return [*(TOKEN_IDS[character] for character in text), EOS_ID]


def data_row(question: str, split: str, index: int) -> dict[str, Any]:
    """One row in verl's format; `index` counts from 0 within the split."""
    word, number = word_and_number(question)
    return {
        "prompt": prompt_text(question),
        "data_source": DATA_SOURCE,
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": answer(question)},
        "extra_info": {"split": split, "index": index, "word": word, "number": number},
    }


def write_rows(path: Path, questions: Iterable[str], split: str) -> None:
    """Write one row a question to `path`, as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for index, question in enumerate(questions):
            file.write(json.dumps(data_row(question, split, index)) + "\n")


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Over this task's tokens."""
    return spell_backward.build_tokenizer(TOKEN_IDS, PREFIX, MAX_POSITIONS)


def build_model(seed: int) -> "LlamaForCausalLM":
    """The same Llama with this task's vocabulary and positions."""
    return spell_backward.build_model(seed, len(TOKENS), MAX_POSITIONS)


LONG_TAIL = Task(
    name=DATA_SOURCE,
    recipe=RECIPE,
    sources=lambda: (Path(__file__), Path(spell_backward.__file__), spell_backward.word_list_path()),
    pad_id=PAD_ID,
    split=split_questions,
    practice=practice,
    demonstrate=demonstrate,
    answer=answer,
    prompt_ids=prompt_ids,
    response_ids=response_ids,
    write_rows=write_rows,
    build_tokenizer=build_tokenizer,
    build_model=build_model,
)
