"""`headrace COMMAND | head`: a reader that has had enough is no error to tell of."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.run_process import ROOT


@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_goes_is_not_complained_of(buffered: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "modes", "configs/demo.yaml"],
        cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, env=environment, timeout=60, check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
