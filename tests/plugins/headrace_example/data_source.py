from collections.abc import Iterator
from typing import Any

from headrace.data.problems import UnreadableFile


def values(entry: str) -> Iterator[tuple[int, Any]]:
    """`counting:100`: a hundred numbers and what comes after each."""
    size = entry.partition(":")[2]
    if not size.isdigit():
        raise UnreadableFile(f"{size!r} is no number of rows; write counting:100")
    for number in range(1, int(size) + 1):
        yield (
            number,
            {
                "prompt": f"{number} ",
                "data_source": "counting",
                "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
                "extra_info": {"index": number},
            },
        )
