"""`reasoning_gym:` names make rows that score, or are refused with what is wrong in them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys

import pytest

from headrace.data.gym_package import import_reasoning_gym
from headrace.data.rows import DataError, Message, load_rows


def test_rows_are_a_function_of_the_name_and_carry_what_scores_them() -> None:
    name = "reasoning_gym:basic_arithmetic?size=20&seed=3&max_terms=4&operators=[%2B]"
    rows, again = load_rows([name]), load_rows([name])
    assert rows == again
    assert len(rows) == 20
    first = rows[0]
    assert (first.data_source, first.file, first.is_row) == ("reasoning_gym/basic_arithmetic", name, True)
    carried = first.extra_info["reasoning_gym"]
    assert carried["dataset"] == "basic_arithmetic"
    assert carried["entry"].keys() == {"question", "answer", "metadata"}
    assert first.prompt == (Message("user", carried["entry"]["question"]),)
    assert first.ground_truth == carried["entry"]["answer"]
    assert not {" - ", "*", "/"} & set(carried["entry"]["question"]), "operators"
    dataset = import_reasoning_gym().create_dataset("basic_arithmetic", seed=3, size=20)
    assert dataset.score_answer(first.ground_truth, carried["entry"]) == 1.0
    assert dataset.score_answer("no", carried["entry"]) == 0.0
    other = load_rows(["reasoning_gym:basic_arithmetic?size=2&seed=99"])
    assert other[0].prompt != first.prompt


def test_the_question_alone_or_after_a_system_message() -> None:
    (text,) = load_rows(["reasoning_gym:spell_backward?size=1&chat=false"])
    assert isinstance(text.prompt, str)
    (chat,) = load_rows(["reasoning_gym:spell_backward?size=1&system=Be%20brief%26exact."])
    assert chat.prompt == (Message("system", "Be brief&exact."), Message("user", text.prompt))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("basic_arithmetc", "there is no data set 'basic_arithmetc' in reasoning_gym; did you mean basic_ar"),
        ("zzz", "in reasoning_gym; there are ab, acre, "),
        (
            "basic_arithmetic?max_term=3",
            "basic_arithmetic has no argument 'max_term'; did you mean max_terms?",
        ),
        ("basic_arithmetic?zzz=3", "has no argument 'zzz'; it has allow_negation, "),
        ("basic_arithmetic?size=0", "size = 0 is not possible; give a number above 0"),
        ("basic_arithmetic?chat=3", "chat = 3 is not possible; give true or false"),
        ("basic_arithmetic?size", "'size' is no argument; write key=value"),
        ("basic_arithmetic?seed=1&seed=2", "seed is given twice"),
        ("basic_arithmetic?operators=[", "operators: '[' cannot be read as YAML"),
        ("basic_arithmetic?min_terms=9&max_terms=4", "not possible: max_terms must be >= min_terms"),
        ("basic_arithmetic?min_terms=many", "these arguments are not possible"),
        ("rearc?size=1", "its score needs types that JSON does not keep"),
    ],
)
def test_names_that_are_not_possible(name: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        load_rows([f"reasoning_gym:{name}"])
    assert f"  reasoning_gym:{name}: " in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "package"),
    [("zebra_puzzles", "pycosat"), ("figlet_font", "pyfiglet"), ("rubiks_cube", "magiccube"), ("bf", "bfi")],
)
def test_a_package_that_is_absent_is_named(dataset: str, package: str) -> None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        pytest.skip(f"{package} {importlib.metadata.version(package)} is installed here")
    load_rows(["reasoning_gym:spell_backward?size=1"])
    assert package not in sys.modules, "a placeholder was left for others to find"
    with pytest.raises(
        DataError, match=f"needs the Python package {package}, which is not installed; take anot"
    ):
        load_rows([f"reasoning_gym:{dataset}?size=1"])
