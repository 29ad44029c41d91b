"""Users' code: one loader of files and modules, and one registry for everything that is chosen by name."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch

from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS, AdvantageInput, estimate
from headrace.algorithms.policy_loss import POLICY_LOSSES
from headrace.plugins.registry import Registry
from headrace.plugins.user_code import UserCodeError, load_user

USER_FILE = """
from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS, per_trajectory

@ADVANTAGE_ESTIMATORS.register("test_user_doubled")
def doubled(batch):
    return per_trajectory(batch, 2 * batch.scores())
"""


def test_an_unknown_name_is_answered_by_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown policy loss 'pp0'.*nearest first: ppo, "):
        POLICY_LOSSES.get("pp0")
    with pytest.raises(ValueError, match=r"nearest first: grpo_passk, .*headrace\.advantage_estimators"):
        ADVANTAGE_ESTIMATORS.get("grpo_pass_k")
    with pytest.raises(ValueError, match="nearest first: none"):
        Registry[int]("number").get("one")


def test_a_taken_name_is_refused() -> None:
    numbers: Registry[int] = Registry("number", {"zero": 0})
    assert numbers.register("one")(1) == 1
    for name in ("zero", "one"):
        with pytest.raises(ValueError, match=f"{name!r} is registered already"):
            numbers.register(name)(2)
    assert numbers.get("one") == 1
    assert numbers.names() == ["one", "zero"]


def test_what_is_named_by_its_place_is_imported_when_asked_for() -> None:
    found: Registry[object] = Registry("function", {"dump": "pickle:dumps", "none": "pickle:none"})
    assert found.loaded("dump") is None
    assert found.get("dump") is pickle.dumps
    assert found.loaded("dump") is pickle.dumps
    with pytest.raises(AttributeError):
        found.get("none")


def test_a_users_file_registers_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Names are for the life of the process: leave none behind for other tests.
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_entries", dict(ADVANTAGE_ESTIMATORS._entries))
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    module = load_user(str(file))
    assert load_user(str(file)) is module
    rewards = torch.tensor([[0.0, 1.5]])
    batch = AdvantageInput(rewards, torch.ones_like(rewards), torch.zeros(1, dtype=torch.int64))
    assert estimate("test_user_doubled", batch).advantages.tolist() == [[3.0, 3.0]]


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    """And what they define can be pickled, each by its own name."""
    made = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        file = tmp_path / str(number) / "same.py"
        file.write_text(f"class Mine:\n    number = {number}\n")
        made.append(load_user(str(file)).Mine())
    again = tmp_path / "1" / ".." / "1" / "same.py"
    assert load_user(str(again)) is sys.modules[type(made[0]).__module__]
    assert [one.number for one in pickle.loads(pickle.dumps(made))] == [1, 2]


def test_a_failed_import_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.py"
    package = tmp_path / "test_broken_package"
    package.mkdir()
    (package / "part.py").touch()
    (package / "__init__.py").write_text("from . import part\nraise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    for text, told in (("x = 1\nraise OSError", "line 2"), ("def f(:", "SyntaxError"), ("1/0", "line 1")):
        broken.write_text(text)
        with pytest.raises(UserCodeError, match=told):
            load_user(str(broken))
    with pytest.raises(UserCodeError, match=r"does not import: SystemExit\(3\)"):
        load_user("test_broken_package")
    assert set(sys.modules) == before
    broken.write_text("fixed = True")
    assert load_user(str(broken)).fixed


def test_ctrl_c_in_an_import_is_no_fault_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "interrupted.py"
    file.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_user(str(file))


def test_what_is_not_there_is_told_from_what_does_not_import(tmp_path: Path) -> None:
    assert load_user("headrace.algorithms.kl").__name__ == "headrace.algorithms.kl"
    with pytest.raises(UserCodeError, match=r"^no_such_pkg\.x does not import.*install it"):
        load_user("no_such_pkg.x")
    with pytest.raises(UserCodeError, match=r"missing\.py does not exist; give an existing"):
        load_user(str(tmp_path / "missing.py"))
    broken = tmp_path / "test_imports_another.py"
    broken.write_text("import surely_not_installed_anywhere\n")
    with pytest.raises(UserCodeError, match=r"surely_not_installed.*\(line 1\)"):
        load_user(str(broken))
