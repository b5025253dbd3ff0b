"""Text from a decoder, token by token; each choice is a function of (logits, settings, seed, place)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sirara.errors import ConfigError
from sirara.model.attention import KvCache
from sirara.model.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the next token is chosen: temperature 0 takes the likeliest; top_k and top_p keep the likeliest few."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def pick(self, logits_V: torch.Tensor, generator: torch.Generator) -> int:
        """One token of the distribution that these settings make of the logits."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        values, ids = (logits_V.float() / self.temperature).sort(descending=True, stable=True)
        chances = values.softmax(-1)
        keep = len(ids) if self.top_k == 0 else min(self.top_k, len(ids))
        if self.top_p < 1:
            # The smallest set that holds top_p of the chance; never empty.
            keep = min(keep, int((chances.cumsum(-1) < self.top_p).sum()) + 1)
        return int(ids[torch.multinomial(chances[:keep], 1, generator=generator)])


def generate(
    model: Decoder, prompt: Sequence[int], *, tokens: int, choice: Choice, stop: int | None
) -> Iterator[int]:
    """At most `tokens` tokens that follow the prompt; ends before `stop` and at the model's longest sequence.

    Raises:  ConfigError for an empty prompt and for one that leaves no room.
    """
    longest = model.shape.max_seq
    if not prompt:
        raise ConfigError(
            "the prompt is empty: there is nothing to continue", try_=["--prompt 'Once upon a time'"]
        )
    if len(prompt) >= longest:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens, the model sees at most {longest}",
            try_=["a shorter --prompt"],
        )
    generator = torch.Generator().manual_seed(choice.seed)
    cache, at, fresh = KvCache(), 0, list(prompt)
    with torch.no_grad():
        for _ in range(min(tokens, longest - len(prompt))):
            positions = torch.arange(at, at + len(fresh)).unsqueeze(0)
            logits = model(torch.tensor([fresh]), positions_BL=positions, cache=cache)[0, -1]
            at += len(fresh)
            token = choice.pick(logits, generator)
            if token == stop:
                return
            yield token
            fresh = [token]
