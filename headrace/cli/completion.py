"""`headrace completion`: print shell completion for commands, options, files and run names."""

from __future__ import annotations

import argparse
from typing import Any

DESCRIPTION = (
    'Print completion for a shell. bash: put `eval "$(headrace completion bash)"` into ~/.bashrc. zsh: '
    "write it to a file `_headrace` in a directory of $fpath. fish: write it to "
    "~/.config/fish/completions/headrace.fish."
)
SHELLS = ("bash", "zsh", "fish")

_RUNS = {"bash": "_headrace_runs", "zsh": "_headrace_runs", "fish": "(__headrace_runs)"}
_PREAMBLE = {
    "bash": r"""
# Names of runs under --runs-dir, or under runs.
_headrace_runs() {
  local dir=runs i file name
  for ((i = 1; i + 1 < ${#COMP_WORDS[@]}; i++)); do
    [[ ${COMP_WORDS[i]} == --runs-dir ]] && dir=${COMP_WORDS[i + 1]}
  done
  for file in "$dir"/*/config.yaml; do
    name=${file%/config.yaml} name=${name##*/}
    # Not compgen -W, which expands $(...). The name also lands unquoted on the command line.
    [[ -e $file && $name =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ && $name == "$1"* ]] && printf '%s\n' "$name"
  done
}
""",
    "zsh": """
# Names of runs under --runs-dir, or under runs.
_headrace_runs() {
  local dir=runs i=${words[(i)--runs-dir]}
  (( i < ${#words} )) && dir=${words[i + 1]}
  local -a found
  found=($dir/*/config.yaml(N:h:t))
  compadd -a found
}
""",
    "fish": """
# Names of runs under --runs-dir, or under runs.
function __headrace_runs
    set -l dir runs
    set -l words (commandline -opc)
    if set -l i (contains -i -- --runs-dir $words); and test $i -lt (count $words)
        set dir $words[(math $i + 1)]
    end
    for file in $dir/*/config.yaml
        basename (dirname $file)
    end
end
""",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def main(args: argparse.Namespace) -> int:
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    import shtab

    from headrace.cli.main import parser

    top = parser()
    _mark(
        top, {"run": _RUNS, "runs": _RUNS, "config": shtab.FILE, "overrides": shtab.FILE, "out": shtab.FILE}
    )
    return str(shtab.complete(top, shell, preamble=_PREAMBLE[shell]))


def _mark(parser: argparse.ArgumentParser, kinds: dict[str, Any]) -> None:
    """Set how each argument completes."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _mark(command, kinds)
        elif action.dest == "runs_dir":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest in kinds and not action.choices:
            action.complete = kinds[action.dest]  # type: ignore[attr-defined]
