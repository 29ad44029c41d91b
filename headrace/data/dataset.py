"""The data of a run, from its configuration: what the checks before a run, `headrace data` and the queue
service do alike, because it is this code that all of them call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace import demo
from headrace.config.data import DataConfig
from headrace.config.run import RunConfig
from headrace.data.feed_order import FeedOrder, feed_order
from headrace.data.problems import DataError, Problems
from headrace.data.prompts import Prompts, Tokenizer, tokenize_rows
from headrace.data.rows import Progress, Rows, read_entries
from headrace.data.tokenizer import load_tokenizer, need_template


@dataclass(frozen=True)
class DataSet:
    """Prompts of training and of validation, ready to be issued."""

    train: Prompts
    held_out: Prompts
    order: FeedOrder
    """In which the training prompts are issued."""
    tokenizer: Tokenizer

    def remarks(self, data: DataConfig) -> Iterator[str]:
        """What was left out or cut, a line each."""
        for key, prompts in (("train_files", self.train), ("val_files", self.held_out)):
            yield from (f"data.{key}: {line}" for line in prompts.remarks(data))


def read_train(data: DataConfig, progress: Progress | None = None) -> Rows:
    """The training rows. Raises DataError."""
    return _read(data, data.train_paths, progress)


def read_held_out(data: DataConfig, progress: Progress | None = None) -> Rows:
    """The rows for validation; none when no file is named. Raises DataError."""
    return _read(data, data.val_files, progress) if data.val_files else Rows([], [], Problems())


def prepare(config: RunConfig, progress: Progress | None = None) -> DataSet:
    """Everything that the queue service issues. Raises DataError.

    The files come first: they are read in less time than the tokenizer's library takes to load.
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


def _read(data: DataConfig, entries: list[str], progress: Progress | None) -> Rows:
    for name in entries:
        if demo.is_demo_uri(name):
            raise DataError(f"{name} names a part of the demo: `headrace run` prepares it; give a path here")
    return read_entries(
        entries,
        skip_invalid=data.skip_invalid,
        ground_truth_as_json=data.ground_truth_as_json,
        progress=progress,
    )
