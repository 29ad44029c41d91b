"""`headrace data` and the queue service's start, over real files and a real tokenizer; `convert-config`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli import convert_config
from headrace.cli.main import main
from headrace.config import loading
from headrace.config.run import RunConfig
from headrace.data.dataset import prepare
from headrace.data.problems import DataError
from headrace_queue import startup
from tests.support.cli_desk import REPO, Desk

WORDS = ["<bos>", "<u>", "<a>", "<unk>", *"abcdefgh"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a tokenizer whose tokens are words; it has no chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", unk_token="<unk>").save_pretrained(
        directory
    )
    return directory


def row(prompt: Any, **changes: Any) -> dict[str, Any]:
    return {"prompt": prompt, "data_source": "s", "reward_model": {"ground_truth": "t"}, **changes}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def file(tmp_path: Path, model: Path) -> Path:
    """A configuration: three chats as JSON lines, three texts as Parquet, one held-out chat."""
    import pandas

    def lines(name: str, *rows: dict[str, Any]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
        return str(tmp_path / name)

    pandas.DataFrame([row(text) for text in ("a", "a b", "a b c d e f")]).to_parquet(
        tmp_path / "text.parquet"
    )
    template = tmp_path / "template.jinja"
    template.write_text("<bos> {% for m in messages %}<u> {{ m.content }} {% endfor %}{{ mark or '<a>' }}")
    config = {
        "name": "x",
        "model": {"path": str(model)},
        "data": {
            "train_files": [
                lines("chat.jsonl", *(row(chat(text)) for text in "def")),
                str(tmp_path / "*.parquet"),
            ],
            "val_files": lines("val.jsonl", row(chat("g"))),
            "max_prompt_length": 8,
            "chat_template": str(template),
        },
        "rollout": {"total_rollout_steps": 16},
        "actor": {"ppo_mini_batch_size": 8},
        "custom_reward_function": {"path": "headrace.demo.reward"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def load(file: Path, *overrides: str) -> RunConfig:
    return loading.load(file, overrides)


def text(config: RunConfig, ids: Any) -> str:
    return " ".join(WORDS[number] for number in ids)


def headrace(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert isinstance(ended.value.code, int)
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_prompts_are_those_of_the_template_and_of_the_tokenizer(file: Path) -> None:
    config = load(file, "data.shuffle=false")
    found = prepare(config)
    assert [text(config, ids) for ids in found.train.tokens] == [
        "<bos> <u> d <a>", "<bos> <u> e <a>", "<bos> <u> f <a>", "<bos> a", "<bos> a b", "<bos> a b c d e f"
    ]  # fmt: skip
    assert [text(config, ids) for ids in found.held_out.tokens] == ["<bos> <u> g <a>"]
    assert found.train.sizes == [3, 3]
    marked = prepare(load(file, "data.apply_chat_template_kwargs={mark: h}"))
    assert text(config, marked.held_out.tokens[0]) == "<bos> <u> g h"


def test_the_command_shows_what_is_issued_token_by_token(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = headrace(capsys, "data", str(file), "--show", "8", "--json")
    shown = json.loads(out)
    assert code == 0
    found = prepare(load(file))
    issued = [found.order.at(issue) for issue in range(8)]
    assert [prompt["epoch"] for prompt in shown["prompts"]] == [epoch for epoch, _ in issued]
    for prompt, (_, index) in zip(shown["prompts"], issued, strict=True):
        assert [token["id"] for token in prompt["tokens"]] == list(found.train.tokens[index])
        assert " ".join(token["text"] for token in prompt["tokens"]) == prompt["text"]
    assert shown["train"] == {
        "prompts": 6, "by_source": {"s": 6}, "tokens": {"min": 2, "median": 4, "max": 7}, "left_out": 0,
        "cut": 0,
    }  # fmt: skip
    code, out, _ = headrace(capsys, "data", str(file), "--val", "--show", "3")
    assert "held-out: 1 prompts (s 1); tokens 4 to 4, median 4; left out 0, cut 0" in out
    assert f"prompt 0: {file.parent}/val.jsonl:1, s, epoch 0, ground truth 't'\n  | <bos> <u> g <a>\n" in out
    assert "  4 tokens: 0:'<bos>' 1:'<u>' 10:'g' 2:'<a>'" in out


def test_a_mixture_is_told_with_its_shares(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = file.parent
    mixture = f"[{{path: {where}/chat.jsonl, weight: 3}}, {{path: {where}/text.parquet, weight: 1}}]"
    code, out, _ = headrace(capsys, "data", str(file), f"data.train_files={mixture}")
    assert code == 0
    assert f"  75.0% from {where}/chat.jsonl: 3 prompts, 4 epochs" in out
    assert f"  25.0% from {where}/text.parquet: 3 prompts, 1.33 epochs" in out


def test_the_queue_service_starts_with_the_same(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (file.parent / "chat.jsonl").open("a") as lines:
        lines.write("no JSON\n")
    with pytest.raises(DataError, match=r"chat.jsonl:4: is not JSON"):
        startup.read_data(load(file))
    config = load(file, "data.skip_invalid=true", "data.max_prompt_length=4", "data.truncation=skip")
    with caplog.at_level(logging.WARNING):
        found = startup.read_data(config)
    assert [r.index for r in found.train.rows] == [0, 1, 2, 3, 4]
    assert [record.message.split(": ", 1)[1].split(":")[0] for record in caplog.records] == [
        "1 of 7 rows left out (data.skip_invalid)", "1 of 7 rows left out (data.truncation"
    ]  # fmt: skip
    plain = json.loads(startup.fingerprint(config, found))
    assert "data.mixture" not in plain
    mixed = [
        {"path": path, "weight": weight} for path, weight in zip(config.data.train_paths, (1, 2), strict=True)
    ]
    weighted = load(file, f"data.train_files={json.dumps(mixed)}", "data.skip_invalid=true")
    assert json.loads(startup.fingerprint(weighted, startup.read_data(weighted)))["data.mixture"] == [
        [3, 3],
        [1, 2],
    ]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.chat_template=", "has no chat template: set data.chat_template to a file"),
        ("data.chat_template=nowhere.jinja", "nowhere.jinja: cannot be read: No such file or directory"),
        ("data.chat_template={file}", "run.yaml:1: no Jinja template: "),
        (
            "data.max_prompt_length=6",
            "1 of 6 prompts cannot be used; 1 longer than data.max_prompt_length",
        ),
        ("model.path=nowhere", "is no directory; give the one with the tokenizer's files"),
        ("data.train_files=demo:spell_backward/train", "`headrace run` makes them"),
    ],
)
def test_what_cannot_be_used_is_told(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    override: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if "{file}" in override:
        file.write_text("# {% for %}\n" + file.read_text())
    code, _, err = headrace(capsys, "data", str(file), override.format(file=file))
    assert code == 2
    assert said in err


def test_the_checks_before_a_run_read_chats_and_tell_what_is_left_out(desk: Desk) -> None:
    both = [json.dumps(row(chat(one))) for one in ("p", "q")]
    (desk.directory / "chat.jsonl").write_text("\n".join([*both, "no JSON"]))
    chats = ["data.train_files=chat.jsonl", "data.val_files=chat.jsonl"]
    code, output = desk.headrace("run", "run.yaml", "--dry-run", *chats)
    assert code == 2
    assert "chat.jsonl:3: is not JSON" in output
    code, output = desk.headrace("run", "run.yaml", "--dry-run", *chats, "data.skip_invalid=true")
    assert code == 2
    assert "chat.jsonl: the prompts are chats, but the tokenizer in " in output
    (desk.directory / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    code, output = desk.headrace("run", "run.yaml", "--dry-run", *chats, "data.skip_invalid=true")
    assert code == 0, output
    assert "warning: data.train_files: 1 of 3 rows are left out (data.skip_invalid): " in output
    assert "2 of 2 held-out prompts are training prompts too" in output


def test_conversion_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(REPO / "docs" / "examples" / "verl_fully_async.yaml")
    code, printed, err = headrace(capsys, "convert-config", source)
    assert code == 0
    assert "no counterpart:\n  trainer.total_epochs: " in err
    assert "still to be set:\n  there is no reward: set custom_reward_function.path" in err
    out = tmp_path / "run.yaml"
    code, said, _ = headrace(
        capsys, "convert-config", source, "--out", str(out), "+reward_model.enable=False"
    )
    assert code == 0
    assert out.read_text() == printed
    assert said == err
    config = loading.load(out, ["custom_reward_function={path: headrace.demo.reward}"])
    assert (config.rollout.replicas, config.rule.window, config.trainer.device) == (4, 4 * 4 * 32, "cuda")
    code, _, err = headrace(capsys, "convert-config", source, "--out", str(out))
    assert (code, err) == (2, f"{out}: exists already; give another name to --out, or remove it\n")
    assert headrace(capsys, "convert-config", str(tmp_path / "none.yaml"))[0] == 2
    assert set(convert_config.EXIT_CODES) == {0, 2}
