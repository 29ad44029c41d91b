"""Checks that a model directory works in the loop, as far as possible without loading its weights.

Everything here imports torch and transformers, and with `model.trust_remote_code` runs the model's own code:
run it in a separate process (`headrace.local.trial`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config.run import RunConfig
from headrace.models.checkpoint_format import check_names, checkpoint_tensors
from headrace.models.files import eos_token_ids, read_settings, vocabulary_size


@dataclass
class Checked:
    """What one group of checks found."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_model(config: RunConfig, tokenizer: Any) -> Checked:
    """Check the policy's architecture, weight names, tokenizer and end tokens. `tokenizer`: loaded."""
    found = Checked()
    path = Path(config.model.path)
    _architecture(config, path, found)
    _engine(path, found)
    _tokens(path, tokenizer, found)
    found.problems = [f"model.path: {line}" for line in found.problems]
    found.warnings = [f"model.path: {line}" for line in found.warnings]
    return found


def _architecture(config: RunConfig, path: Path, found: Checked) -> None:
    """Check that transformers has it as a causal language model whose parameters match the checkpoint."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headrace.models.packed_model import check_reads_packed_rows

    trust = config.model.trust_remote_code
    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, trust_remote_code=trust)
        model.tie_weights()
    except Exception as error:  # of transformers or of the model's own code
        why = str(error).splitlines()[0] if str(error) else repr(error)
        found.problems.append(f"{path}: transformers cannot build it as a causal language model: {why}")
        return
    parameters = dict(model.named_parameters())
    found.facts["class"] = type(model).__name__
    found.facts["parameters"] = sum(p.numel() for p in parameters.values())
    names = [n for name, p in parameters.items() for n, _ in checkpoint_tensors(name, tuple(p.shape))]
    checks: list[Callable[[], object]] = [
        lambda: check_names(path, names),
        lambda: check_reads_packed_rows(model),
    ]
    for check in checks:
        try:
            check()
        except ValueError as error:
            found.problems.append(str(error))


def _engine(path: Path, found: Checked) -> None:
    """Check that vLLM knows the architecture."""
    named = [str(name) for name in read_settings(path).get("architectures") or []]
    try:
        from vllm import ModelRegistry

        known = set(ModelRegistry.get_supported_archs())
    except Exception as error:  # vLLM is for rollouters only
        found.warnings.append(f"whether vLLM knows {', '.join(named)} was not checked: {error!r}")
        return
    if named and not known & set(named):
        found.problems.append(
            f"{path}: the installed vLLM does not know {', '.join(named)}; give another model"
        )


def _tokens(path: Path, tokenizer: Any, found: Checked) -> None:
    try:
        ends = eos_token_ids(path)
    except ValueError as error:
        found.problems.append(str(error))
        ends = []
    found.facts["eos"] = {str(tokenizer.convert_ids_to_tokens(token)): token for token in ends}
    found.facts["tokenizer"] = {"class": type(tokenizer).__name__, "tokens": len(tokenizer)}
    found.facts["chat_template"] = bool(getattr(tokenizer, "chat_template", None))
    own = tokenizer.eos_token_id
    if ends and own is not None and own not in ends:
        found.warnings.append(
            f"the tokenizer ends texts with {tokenizer.eos_token!r} ({own}), at which the engine will not "
            f"stop (generation_config.json names {ends}): if the chat template ends an answer with it, add "
            "it to eos_token_id there"
        )
    try:
        vocabulary = vocabulary_size(path)
    except ValueError as error:
        found.problems.append(str(error))
        return
    if len(tokenizer) > vocabulary:
        found.problems.append(
            f"{path}: the tokenizer has {len(tokenizer)} tokens, the model {vocabulary}: they do not belong "
            "together; copy the tokenizer of this model"
        )
