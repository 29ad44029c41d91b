"""What each preset renders is what `tests/deploy/helm/golden/` says, and a change shows there."""

from __future__ import annotations

import base64
import copy
import difflib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.helm import charts, golden
from tests.deploy.helm.objects import Object, name_of, of_kind

Place = tuple[str | int, ...]


@pytest.mark.parametrize("preset", charts.ALL)
def test_what_is_kept_for_review_is_current(preset: str) -> None:
    path = golden.file_of(preset)
    kept, rendered = path.read_text() if path.exists() else "", golden.text(preset)
    changes = difflib.unified_diff(
        kept.splitlines(), rendered.splitlines(), path.name, "rendered", lineterm="", n=0
    )
    assert kept == rendered, (
        f"the chart renders {preset} otherwise; run `make manifests`, and "
        "read the difference:\n" + "\n".join(changes)
    )


def test_nothing_else_lies_there() -> None:
    assert set(golden.FOLDER.iterdir()) == {golden.file_of(preset) for preset in charts.ALL}


def test_no_credential_lies_there() -> None:
    """Of this rendering; one that was kept would make the text another one at every rendering."""
    text = golden.text(charts.DEFAULTS)
    (secret,) = of_kind(charts.rendered(), "Secret")
    assert secret["data"]
    for value in secret["data"].values():
        assert value not in text
        assert base64.b64decode(value).decode() not in text


def places(node: Any, at: Place = ()) -> Iterator[Place]:
    """Where its values are that hold no others."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    if not inner:
        yield at
    for key, value in inner:
        yield from places(value, (*at, key))


def changed(thing: Object, place: Place) -> Object:
    out = copy.deepcopy(thing)
    node: Any = out
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = "another"
    return out


def made(thing: Object, place: Place) -> bool:
    """Whether it is left out on purpose: a credential, a hash, a file that is taken as it is."""
    text = ".".join(map(str, place))
    return (
        (thing["kind"] == "Secret" and place[0] == "data")
        or "headrace/config-hash" in text
        or (thing["kind"] == "PrometheusRule" and "rules" in text)
        or text.endswith(".json")
    )


def test_every_value_is_a_fact() -> None:
    """A template that renders one other value, wherever, changes the text; an object of each kind."""
    objects = charts.rendered("ci/everything.yaml")
    whole = {o["kind"]: o for o in objects if "config.yaml" not in o.get("data", {})}.values()
    for thing in whole:
        before = golden.facts([thing])
        for place in places(thing):
            if not made(thing, place):
                assert golden.facts([changed(thing, place)]) != before, f"{name_of(thing)}: {place}"


def test_a_difference_is_what_is_gone_and_what_is_new() -> None:
    one = {"Service a": ["port: 1", "kept: x"], "Service b": ["port: 2"]}
    two = {"Service a": ["port: 3", "kept: x"], "Service c": ["port: 4"]}
    assert golden.difference(one, two) == (
        "\nService a\n  - port: 1\n  + port: 3\n\n- Service b\n\n+ Service c\n  port: 4\n"
    )
    assert golden.difference(one, one) == ""
