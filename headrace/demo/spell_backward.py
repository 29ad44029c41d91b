"""The spell-backward task: its words, prompts, data rows, tokenizer and model.

What this module guarantees:

- The words, and which of them are held out, depend on nothing but the installed word list: not on the seed of
  a run, not on the order of the list.
- A held-out word is in no training row. Warm-up and RL both read `split_words()[0]`.
- A prompt is `PREFIX + word + PROMPT_END`, and the tokenizer makes of it 1 + len(word) + 1 tokens. Without
  the end token the model could not tell the word's last letter from the answer's first.
- A response is one token a letter and then <eos>; decoding it without special tokens gives the bare letters.

torch, transformers and tokenizers are imported where they are used, so that reading the words stays cheap.
"""

import hashlib
import importlib.util
import json
import re
import string
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

DATA_SOURCE = "spell_backward"
ABILITY = "spelling"

# reasoning-gym's wording, trailing space included.
PREFIX = "Spell this word backward (example: sun -> nus): "
PROMPT_END = "\n"

MIN_LETTERS = 3
MAX_LETTERS = 6
HELD_OUT_WORDS = 200
SPLIT_SEED = 20240229  # of the held-out split; the same for every run, so that scores compare across seeds

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
# A token's id is its place here: 32 in all, so that the vocabulary needs no padding.
TOKENS = (PAD, BOS, EOS, UNK, PROMPT_END, *string.ascii_lowercase, PREFIX)
TOKEN_IDS = {token: index for index, token in enumerate(TOKENS)}
PAD_ID, BOS_ID, EOS_ID = TOKEN_IDS[PAD], TOKEN_IDS[BOS], TOKEN_IDS[EOS]

MAX_POSITIONS = 64  # tokens, prompt and response together; the longest exchange here takes 15

_WORD = re.compile(rf"[a-z]{{{MIN_LETTERS},{MAX_LETTERS}}}")


def word_list_path() -> Path:
    """reasoning-gym's word list, found without importing the package (its import needs compiled extras).

    Raises FileNotFoundError when the package is not installed or no longer ships the list.
    """
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the demo takes its words from the package reasoning_gym, which is not installed; "
            "install it with: pip install --no-deps reasoning_gym"
        )
    path = Path(spec.origin).parent / "data" / "words3to10.txt"
    if not path.is_file():
        raise FileNotFoundError(f"the installed reasoning_gym has no {path}; install version 0.1.25")
    return path


@cache
def words() -> tuple[str, ...]:
    """Every word of the task: lower case, a to z only, 3 to 6 letters, each once, sorted."""
    lines = word_list_path().read_text(encoding="utf-8").lower().split()
    return tuple(sorted({word for word in lines if _WORD.fullmatch(word)}))


def _split_key(word: str) -> bytes:
    return hashlib.sha256(f"{SPLIT_SEED}:{word}".encode()).digest()


@cache
def split_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(training words, held-out words); each in a fixed mixed order, so that a reader need not shuffle.

    The order is that of a hash of the word: the same on every Python version, and a word list that gains a
    few words moves few of the others across the split.
    """
    mixed = sorted(words(), key=_split_key)
    return tuple(mixed[HELD_OUT_WORDS:]), tuple(mixed[:HELD_OUT_WORDS])


def prompt_text(word: str) -> str:
    """The prompt that asks for `word` spelt backward."""
    return f"{PREFIX}{word}{PROMPT_END}"


def prompt_ids(word: str) -> list[int]:
    """`prompt_text(word)` as token ids, without a tokenizer; a test holds the two equal."""
    return [TOKEN_IDS[PREFIX], *(TOKEN_IDS[letter] for letter in word), TOKEN_IDS[PROMPT_END]]


def response_ids(answer: str) -> list[int]:
    """The token ids of a response that says `answer` and ends."""
    return [*(TOKEN_IDS[letter] for letter in answer), EOS_ID]


def data_row(word: str, split: str, index: int) -> dict[str, Any]:
    """One row in verl's format; `index` counts from 0 within the split."""
    return {
        "prompt": prompt_text(word),
        "data_source": DATA_SOURCE,
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": word[::-1]},
        "extra_info": {"split": split, "index": index, "word": word},
    }


def write_rows(path: Path, words_of_split: Iterable[str], split: str) -> None:
    """Write one row a word to `path`, as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for index, word in enumerate(words_of_split):
            file.write(json.dumps(data_row(word, split, index)) + "\n")


def build_tokenizer(
    token_ids: Mapping[str, int] = TOKEN_IDS, prefix: str = PREFIX, max_positions: int = MAX_POSITIONS
) -> "PreTrainedTokenizerFast":
    """A fast Hugging Face tokenizer: the prefix is one token, every other character its own.

    No <bos> is added: the prefix already marks the start, and text -> ids is then the same with and without
    `add_special_tokens`. The prefix is an added token but not a special one: a response that emits it must
    not have it hidden by `skip_special_tokens` and then pass as right.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(token_ids), unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(prefix, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_positions,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(
    seed: int,
    vocabulary: int = len(TOKENS),
    max_positions: int = MAX_POSITIONS,
    hidden: int = 128,
    layers: int = 4,
) -> "LlamaForCausalLM":
    """The freshly initialised model: a Llama, float32, embeddings untied; 0.8 M parameters by default.

    The weights depend on `seed` alone; the caller's random state is left as it was.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    return model.float()
