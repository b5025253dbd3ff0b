"""Generation against the plainest version of itself: the whole prefix again for every token."""

import pytest
import torch

from sirara.errors import ConfigError
from sirara.model.decoder import Decoder
from sirara.model.generate import Choice, generate
from sirara.pure.families import ModelShape

FAMILIES = ["gpt2", "bloom", "llama", "mistral", "qwen2", "qwen3"]


def small(family: str) -> Decoder:
    shape = ModelShape(family=family, layers=2, hidden=32, heads=4, vocab=50, max_seq=16)
    model = Decoder(shape, device="cpu", dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_gives_the_tokens_of_the_whole_prefix(family: str) -> None:
    model, prompt = small(family), [3, 1, 4, 1, 5]
    choice = Choice(temperature=0.9, top_k=10, top_p=0.9, seed=5)
    expected, generator = list(prompt), torch.Generator().manual_seed(5)
    for _ in range(8):
        with torch.no_grad():
            expected.append(choice.pick(model(torch.tensor([expected]))[0, -1], generator))
    assert list(generate(model, prompt, tokens=8, choice=choice, stop=None)) == expected[5:]


def test_it_ends_at_the_longest_sequence_and_before_the_stop_token() -> None:
    model = small("llama")
    greedy = list(generate(model, [1, 2, 3], tokens=100, choice=Choice(temperature=0), stop=None))
    assert len(greedy) == 13
    stopped = list(generate(model, [1, 2, 3], tokens=100, choice=Choice(temperature=0), stop=greedy[4]))
    assert stopped == greedy[: greedy.index(greedy[4])]


def test_top_p_keeps_the_smallest_set_and_top_k_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    draws = {
        name: {choice.pick(logits, torch.Generator().manual_seed(n)) for n in range(200)}
        for name, choice in {
            "p": Choice(top_p=0.6),
            "k": Choice(top_k=3),
            "all": Choice(),
            "one": Choice(top_p=0.01),
        }.items()
    }
    assert draws == {"p": {0, 1}, "k": {0, 1, 2}, "all": {0, 1, 2, 3}, "one": {0}}


@pytest.mark.parametrize(("prompt", "words"), [([], "empty"), (list(range(16)), "at most 16")])
def test_a_prompt_without_room_is_refused(prompt: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(generate(small("llama"), prompt, tokens=1, choice=Choice(), stop=None))
