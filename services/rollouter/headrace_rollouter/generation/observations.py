"""Encodes an environment's observation as the tokens between two turns of the model.

What this module guarantees:

- Earlier turns are never tokenised again. Only what follows the model's turn is.
- Messages become what the chat template writes after an assistant message when they follow it, up to the
  start of the next assistant turn. A template is refused if that text depends on the conversation before.
- An environment's text never yields a special token: they are removed before the template is applied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace.environments import Observation
from headrace.environments.loading import EnvironmentFailed

_MARK = "An answer that no template changes 7319."
_CONVERSATIONS = (
    [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _MARK}],
    [
        {"role": "user", "content": "A question."},
        {"role": "assistant", "content": "A first answer."},
        {"role": "user", "content": "Another question."},
        {"role": "assistant", "content": _MARK},
    ],
)
"""Two conversations, to check that what follows the mark does not depend on what precedes it."""


class ObservationEncoder:
    """Encodes observations for one model.

    `tokenizer`: a Hugging Face tokenizer. `stop_ids`: the tokens that end a turn. `vocabulary`: number of
    token ids that the model knows. `template_kwargs`: extra arguments of the chat template, the same as for
    the prompt (`data.apply_chat_template_kwargs`).
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Collection[int],
        vocabulary: int,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._template_kwargs = dict(template_kwargs or {})
        self._stops = [text for i in stop_ids if (text := tokenizer.decode([i]))]
        special = {token for token in tokenizer.all_special_tokens if token}
        special |= {str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special}
        self._special = sorted(special, key=len, reverse=True)
        self._checked: set[tuple[str, ...]] = set()

    def encode(self, observation: Observation) -> list[int]:
        """Token ids, at least one. Raises EnvironmentFailed."""
        try:
            return self._encode(observation)
        except EnvironmentFailed:
            raise
        except Exception as error:  # such as text that is not a str, or not valid UTF-8
            raise EnvironmentFailed(f"the Observation cannot be made tokens: {error!r}") from error

    def _encode(self, observation: Observation) -> list[int]:
        if bool(observation.text) == bool(observation.messages):
            raise EnvironmentFailed(
                "an Observation needs text or messages, one of the two; return Done() to end the trajectory"
            )
        text = self._clean(observation.text) or self._between_turns(observation.messages)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise EnvironmentFailed(f"the Observation {observation.text!r:.200} has no tokens")
        if max(ids) >= self._vocabulary:
            raise EnvironmentFailed(
                f"the Observation has token {max(ids)}, the model's vocabulary {self._vocabulary}: the "
                "tokenizer is not this model's"
            )
        return ids

    def _between_turns(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not messages:
            return ""
        cleaned = [{str(k): self._clean(str(v)) for k, v in m.items()} for m in messages]
        first = self._behind_mark(_CONVERSATIONS[0], cleaned)
        roles = tuple(m.get("role", "") for m in cleaned)
        if roles not in self._checked:
            second = self._behind_mark(_CONVERSATIONS[1], cleaned)
            if first != second:
                raise EnvironmentFailed(
                    "the model's chat template writes messages that follow a turn differently, depending on "
                    f"what was said before ({first!r:.200} and {second!r:.200}); return an Observation with "
                    "text instead"
                )
            self._checked.add(roles)
        return first

    def _behind_mark(self, before: Sequence[Mapping[str, str]], messages: Sequence[Mapping[str, str]]) -> str:
        """What the template writes after the model's turn, less the stop token, which the model wrote."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise EnvironmentFailed(
                "the model's tokenizer has no chat template, so an Observation cannot have messages; return "
                "one with text"
            )
        try:
            whole = self._tokenizer.apply_chat_template(
                [*before, *messages], tokenize=False, add_generation_prompt=True, **self._template_kwargs
            )
        except Exception as error:  # a template is code by the model's author
            roles = sorted({str(m.get("role")) for m in messages})
            raise EnvironmentFailed(
                f"the model's chat template refuses messages with the roles {', '.join(roles)}: {error!r}"
            ) from error
        head, mark, tail = str(whole).partition(_MARK)
        if not mark or _MARK in tail:
            raise EnvironmentFailed(
                f"the model's chat template leaves out or repeats the assistant's message ({head!r:.200}); "
                "return an Observation with text instead"
            )
        for stop in self._stops:
            if tail.startswith(stop):
                return tail[len(stop) :]
        return tail

    def _clean(self, text: str) -> str:
        """Remove special tokens, including any that form when others are removed."""
        while True:
            before = text
            for token in self._special:
                text = text.replace(token, "")
            if text == before:
                return text
