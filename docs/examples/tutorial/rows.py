"""Writes the tutorial's rows: one word a prompt, and the same word as the ground truth."""

import json
import random
import string
from pathlib import Path

HERE = Path(__file__).parent
# What the demo's model was warmed up on.
QUESTION = "Spell this word backward (example: sun -> nus): {word}\n"


def row(word: str, index: int) -> dict:
    return {
        "prompt": QUESTION.format(word=word),
        "data_source": "echo",
        "reward_model": {"style": "rule", "ground_truth": word},
        "extra_info": {"index": index},
    }


def main() -> None:
    rng = random.Random(0)
    words = {"".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 6))) for _ in range(1000)}
    rows = [json.dumps(row(word, index)) for index, word in enumerate(sorted(words))]
    rng.shuffle(rows)
    (HERE / "train.jsonl").write_text("\n".join(rows[100:]) + "\n")
    (HERE / "val.jsonl").write_text("\n".join(rows[:100]) + "\n")


if __name__ == "__main__":
    main()
