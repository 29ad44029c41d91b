"""What the chart renders, in a form for review: `tests/deploy/helm/golden/*.txt`, one file for each preset.

`defaults.txt` holds every object of the default values, a line for each fact. The other files hold what
differs from it: `-` is not there, `+` is there instead. A changed template shows once in `defaults.txt` where
it is the same for all, and in each preset where it is not. Nothing is left out but:

- what changes with every rendering or with everything (credentials, the configuration's hash): `(made)`;
- files of the chart that are taken as they are (rules, dashboards): their number of lines, or of rules;
- labels that every object has: they stand at the top; "(our queue)" are those by which a component's pods are
  found.

`pod` is the template of a workload's pods.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.helm import charts
from tests.deploy.helm.objects import Object, name_of

FOLDER = Path(__file__).parent / "golden"
HOW = "`make manifests` writes it."
_PLAIN = re.compile(
    r"(?!(true|false|null|yes|no|on|off)$)[A-Za-z/$(-][^\s,:{}\[\]\"]*(:[^\s,:{}\[\]\"]+)*|\d+(m|s|[kKMGT]i?|[kmg]b)",
    re.IGNORECASE,
)
"""Text that YAML reads as text without quotes."""
_WIDTH = 72
"""A map or list that is longer is written item by item."""
_SHARED = "labels of every object, beside its component"
Facts = dict[str, list[str]]
"""Lines by object, e.g. `Service demo-queue`."""


def file_of(preset: str) -> Path:
    return FOLDER / f"{preset.removesuffix('.yaml').replace('/', '-')}.txt"


def files() -> dict[Path, str]:
    """All of them, with the text that they should have."""
    return {file_of(preset): text(preset) for preset in charts.ALL}


def text(preset: str) -> str:
    if preset == charts.DEFAULTS:
        head = f"# What the default values render; {HOW}\n"
        return head + "".join(_whole(name, lines) for name, lines in facts(charts.rendered()).items())
    head = f"# Where {preset} differs from the default values (defaults.txt); {HOW}\n"
    return head + difference(facts(charts.rendered()), facts(charts.rendered(preset)))


def _whole(name: str, lines: Sequence[str]) -> str:
    return f"\n{name}\n" + "".join(f"  {line}\n" for line in lines)


def difference(base: Facts, other: Facts) -> str:
    """`-` what `other` lacks, `+` what it has beside."""
    out = ""
    for name in sorted({*base, *other}):
        if name not in other:
            out += f"\n- {name}\n"
        elif name not in base:
            out += _whole(f"+ {name}", other[name])
        else:
            gone = [f"- {line}" for line in _without(base[name], other[name])]
            new = [f"+ {line}" for line in _without(other[name], base[name])]
            if gone or new:
                out += _whole(name, [*gone, *new])
    return out


def _without(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    """In their order; a line that is there twice has to be there twice."""
    left = list(others)
    out = []
    for line in lines:
        if line in left:
            left.remove(line)
        else:
            out.append(line)
    return out


# -- facts --------------------------------------------------------------------------------------------


def facts(objects: Sequence[Object]) -> Facts:
    """Every object as lines `path: value`, sorted by kind and name; first of all the labels that all have."""
    shared = _shared_labels(objects)
    out = {_SHARED: [f"{key}: {value}" for key, value in sorted(shared.items())]}
    for thing in sorted(objects, key=name_of):
        labels = thing["metadata"].get("labels", {})
        if all(labels.get(key) == value for key, value in shared.items()):
            rest = {key: value for key, value in labels.items() if key not in shared}
            thing = {**thing, "metadata": {**thing["metadata"], "labels": rest}}
        name = name_of(thing)
        body = {k: v for k, v in thing.items() if k != "kind"}
        body["metadata"] = {k: v for k, v in body["metadata"].items() if k != "name"}
        out[name] = [line for key in body for line in _lines(key, _masked(thing, key, body[key]))]
    return out


def _shared_labels(objects: Sequence[Object]) -> dict[str, str]:
    """Those of nearly all: objects of a user's own (`extraObjects`) have none."""
    ours = [o["metadata"]["labels"] for o in objects if "helm.sh/chart" in o["metadata"].get("labels", {})]
    return {k: v for k, v in ours[0].items() if all(labels.get(k) == v for labels in ours)}


def _masked(thing: Object, key: str, value: Any) -> Any:
    if thing["kind"] == "Secret" and key == "data":
        return dict.fromkeys(value, "(made)")
    if thing["kind"] == "PrometheusRule" and key == "spec":
        return {"groups": {g["name"]: f"({len(g['rules'])} rules)" for g in value["groups"]}}
    if thing["kind"] == "ConfigMap" and key == "data":
        return {name: _file(name, content) for name, content in value.items()}
    return value


def _file(name: str, content: str) -> Any:
    """A configuration as what it says, a dashboard as its size, anything else as it is."""
    if name == "config.yaml":
        return yaml.safe_load(content)
    if name.endswith(".json"):
        return f"({len(content.splitlines())} lines)"
    return content


def _lines(path: str, value: Any) -> Iterator[str]:
    """A value that is short enough is one line, whatever is in it; so is an item without a name."""
    path = re.sub(
        r"^spec(\.leaderWorkerTemplate\.workerT|\.t)emplate\.(spec$|(?=metadata))", "pod.", path
    ).rstrip(".")
    short = _flow(value)
    if path.endswith("annotations.headrace/config-hash"):
        yield f"{path}: (made)"
    elif isinstance(value, str) and "\n" in value:
        for line in value.rstrip("\n").splitlines():
            yield f"{path} | {line}".rstrip()
    elif _named(value):
        for item in value:
            rest = {key: what for key, what in item.items() if key != "name"}
            yield from _lines(f"{path}[{item['name']}]", rest["value"] if set(rest) == {"value"} else rest)
    elif not isinstance(value, (Mapping, list)) or len(short) <= _WIDTH or _ours(value):
        yield f"{path}: {short}"
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _lines(f"{path}.{key}", value[key])
    else:
        for item in value:
            if isinstance(item, str):
                yield from _lines(f"{path}[]", item)
            else:
                yield f"{path}[]: {_flow(item)}"


def _named(value: Any) -> bool:
    """A list of things with names: containers, variables, volumes, ports."""
    return isinstance(value, list) and bool(value) and all(isinstance(i, dict) and "name" in i for i in value)


def _ours(value: Any) -> str | None:
    """Labels by which pods of the release are found, in short: those of a component, or of any."""
    ours = {"app.kubernetes.io/name": "headrace", "app.kubernetes.io/instance": "demo"}
    if not isinstance(value, Mapping) or any(value.get(key) != label for key, label in ours.items()):
        return None
    component = value.get("app.kubernetes.io/component")
    if component is None:
        return "(our pods)" if len(value) == 2 else None
    return f"(our {component})" if len(value) == 3 else None


def _flow(value: Any) -> str:
    """On one line, as YAML would have it."""
    if ours := _ours(value):
        return ours
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    if isinstance(value, str) and '"' in value and "'" not in value and "\n" not in value:
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    written = files()
    for path in FOLDER.glob("*.txt"):
        path.unlink()
    for path, content in written.items():
        path.write_text(content)


if __name__ == "__main__":
    main()
