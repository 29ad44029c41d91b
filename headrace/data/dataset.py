"""Load the data of a run from its configuration.

The checks before a run, `headrace data` and the queue service all call this code, so they agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace import demo
from headrace.config.data import DataConfig
from headrace.config.run import RunConfig
from headrace.data.feed_order import FeedOrder, feed_order
from headrace.data.problems import DataError, Problems
from headrace.data.prompts import Prompts, Tokenizer, tokenize_rows
from headrace.data.rows import DataRows, Progress, read_entries
from headrace.data.tokenizer import load_tokenizer, need_template


@dataclass(frozen=True)
class DataSet:
    """Training and held-out prompts, ready to be issued."""

    train: Prompts
    held_out: Prompts
    order: FeedOrder
    """Issue order of the training prompts."""
    tokenizer: Tokenizer

    def remarks(self, data: DataConfig) -> Iterator[str]:
        """Lines about prompts that were left out or cut."""
        for key, prompts in (("train_files", self.train), ("val_files", self.held_out)):
            yield from (f"data.{key}: {line}" for line in prompts.remarks(data))


def read_train(data: DataConfig, progress: Progress | None = None) -> DataRows:
    """The training rows. Raises DataError."""
    return _read(data, data.train_paths, progress)


def read_held_out(data: DataConfig, progress: Progress | None = None) -> DataRows:
    """The validation rows; none if no file is named. Raises DataError."""
    return _read(data, data.val_files, progress) if data.val_files else DataRows([], [], Problems())


def prepare(config: RunConfig, progress: Progress | None = None) -> DataSet:
    """Read and tokenise everything that the queue service issues. Raises DataError.

    Files come first, so that their errors show before the tokenizer's library has loaded, which takes longer.
    """
    data = config.data
    train, held_out = read_train(data, progress), read_held_out(data, progress)
    tokenizer = load_tokenizer(config)
    prompts = []
    for rows in (train, held_out):
        need_template(tokenizer, rows.rows, config)
        prompts.append(
            tokenize_rows(
                tokenizer, rows.rows, data, sizes=rows.sizes, invalid=rows.skipped, progress=progress
            )
        )
    order = feed_order(prompts[0].sizes, data.train_weights, config.seed, data.shuffle)
    return DataSet(prompts[0], prompts[1], order, tokenizer)


def _read(data: DataConfig, entries: list[str], progress: Progress | None) -> DataRows:
    for name in entries:
        if demo.is_demo_uri(name):
            raise DataError(f"{name} names a part of the demo: `headrace run` prepares it; give a path here")
    return read_entries(
        entries,
        skip_invalid=data.skip_invalid,
        ground_truth_as_json=data.ground_truth_as_json,
        progress=progress,
    )
