"""What is told of a text is one and the same whatever the system does on the way to it, and told once."""

from collections import defaultdict
from typing import Any

import pytest
from planes_in_process import Planes
from test_same_text import PROMPTS, WAYS, planes
from told import Entries, lists_of

from blockplane.control_plane.engine.step import StepOutputs
from blockplane.protos.plan import StepResult
from blockplane.protos.sampling import SamplingParams

ASKED = SamplingParams(24, logprobs=2, prompt_logprobs=1, ignore_eos=True)


class Told:
    """Runs the prompts through both planes, and keeps what each is told of its prompt and of its tokens, in order."""

    def __init__(self, engine: Planes) -> None:
        self.tokens: dict[int, list[Entries]] = defaultdict(list)
        self.prompts: dict[int, list[Entries]] = defaultdict(list)
        self._update = engine.scheduler.update
        engine.scheduler.update = self._record  # type: ignore[method-assign]
        for prompt in PROMPTS:
            engine.submit(prompt, ASKED)
        engine.run()
        self.texts = engine.texts

    def _record(self, result: StepResult) -> StepOutputs:
        outputs = self._update(result)
        for number, entries in zip(outputs.stream_ids.tolist(), lists_of(outputs.logprobs), strict=False):
            self.tokens[number].append(entries)
        for request, told in outputs.told_prompts:
            self.prompts[request.stream_id] += lists_of(told)
        return outputs


@pytest.fixture(scope="module")
def plainly() -> Told:
    return Told(planes(**WAYS["plainly"]))


def assert_same(told: list[Entries], expected: list[Entries]) -> None:
    assert [[token_id for token_id, _ in entries] for entries in told] == [
        [token_id for token_id, _ in entries] for entries in expected
    ]
    logprobs = [[logprob for entries in tokens for _, logprob in entries] for tokens in (told, expected)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)


def test_every_token_is_told_first_of_its_entries_and_every_prompt_from_its_second_token_on(plainly: Told) -> None:
    for number, prompt in enumerate(PROMPTS):
        assert [entries[0][0] for entries in plainly.tokens[number]] == plainly.texts[number]
        assert [entries[0][0] for entries in plainly.prompts[number]] == prompt[1:]
        assert {len(entries) for entries in plainly.tokens[number]} == {3}


@pytest.mark.parametrize("way", ["in chunks of a block", "with too few blocks", "with drafts from the text"])
def test_the_same_is_told(way: str, plainly: Told) -> None:
    settings: dict[str, Any] = WAYS[way]
    engine = planes(**settings)
    told = Told(engine)
    statistics = engine.scheduler.statistics()
    assert (statistics.num_preemptions > 0) == (way == "with too few blocks")
    assert statistics.num_cached_tokens == 0
    for number in range(len(PROMPTS)):
        assert_same(told.tokens[number], plainly.tokens[number])
        assert_same(told.prompts[number], plainly.prompts[number])
