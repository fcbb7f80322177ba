"""What the runner tells of prompts and tokens, against the log-softmax of transformers over the whole text."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from told import Entries, lists_of
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from blockplane.data_plane.loading.build import load_model
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.runner import Runner
from blockplane.protos.plan import Admission, Configure, Int32Array, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams

VOCAB_SIZE, BLOCK_SIZE, MAX_MODEL_LEN = 96, 4, 320
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": MAX_MODEL_LEN}
PROMPT = [(7 * index + 3) % VOCAB_SIZE for index in range(21)]


@pytest.fixture
def pair(
    tmp_path: Path,
    randomized: Callable[[PreTrainedModel], PreTrainedModel],
    save_checkpoint: Callable[..., Path],
) -> tuple[Model, PreTrainedModel]:
    """Our decoder and transformers' own."""
    theirs = randomized(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)))
    return load_model(open_checkpoint(str(save_checkpoint(theirs, tmp_path))), "float32"), theirs


class Steps:
    """Plans to a runner, in which every row has its own blocks from the start."""

    def __init__(self, model: Model, num_draft_tokens: int = 0) -> None:
        blocks_per_row = MAX_MODEL_LEN // BLOCK_SIZE
        configure = Configure(
            BLOCK_SIZE, 1 + 4 * blocks_per_row, MAX_MODEL_LEN, (16, 512), (1, 4), num_draft_tokens=num_draft_tokens
        )
        self._runner = Runner(model, configure, num_draft_tokens=num_draft_tokens)
        self._blocks = 1 + np.arange(4 * blocks_per_row, dtype=np.int32).reshape(4, blocks_per_row)
        self._step, self._admissions, self._released = 0, [], column()
        self._num_draft_tokens = num_draft_tokens

    def admit(self, row: int, prompt: Sequence[int], output: Sequence[int] = (), **params: object) -> None:
        """In the next plan."""
        token_ids = column(*prompt, *output)
        self._admissions.append(Admission(row, token_ids, len(prompt), 0, SamplingParams(99, **params), 0))

    def release(self, row: int) -> None:
        """In the next plan, before any admission."""
        self._released = column(row)

    def prefill(self, **num_tokens: int) -> StepResult:
        """So many tokens of row0, row1, ..."""
        admissions, self._admissions = tuple(self._admissions), []
        released_rows, self._released = self._released, column()
        new_rows = [admission.row for admission in admissions]
        return self._run(
            released_rows=released_rows,
            admissions=admissions,
            block_rows=np.repeat(column(*new_rows), self._blocks.shape[1]),
            block_ids=self._blocks[new_rows].ravel(),
            prefill_rows=column(*(int(name.removeprefix("row")) for name in num_tokens)),
            prefill_num_tokens=column(*num_tokens.values()),
            decode_rows=column(),
        )

    def decode(self, *rows: int) -> StepResult:
        granted = np.full(len(rows), 1 + self._num_draft_tokens, np.int32)
        return self._run(decode_rows=column(*rows), decode_num_tokens=granted)

    def _run(self, **columns: object) -> StepResult:
        self._step += 1
        return self._runner.step(StepPlan(self._step, **columns))


def column(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def assert_told(told: list[Entries], theirs: PreTrainedModel, text: Sequence[int], first: int, count: int) -> None:
    """Of `text` from position `first` on: each token, and `count` of the likeliest there."""
    assert len(told) == len(text) - first
    with torch.inference_mode():
        exact = torch.log_softmax(theirs(torch.tensor([text])).logits[0].double(), -1)
    for position, entries in enumerate(told, start=first):
        row = exact[position - 1]
        assert [token_id for token_id, _ in entries] == [text[position], *row.topk(count).indices.tolist()]
        assert [logprob for _, logprob in entries] == pytest.approx([float(row[i]) for i, _ in entries], abs=1e-4)


def test_a_prompt_in_segments_is_told_as_it_is_at_once(pair: tuple[Model, PreTrainedModel]) -> None:
    """Packed with another that asks for more, and with one that asks for nothing."""
    model, theirs = pair
    steps = Steps(model)
    steps.admit(2, PROMPT, prompt_logprobs=2)
    steps.admit(0, PROMPT[:9])
    steps.admit(1, PROMPT[3:], prompt_logprobs=0)
    parts = [lists_of(steps.prefill(row2=8, row0=9, row1=18).prompt_logprobs)]
    assert_told(parts[0][8:], theirs, PROMPT[3:], 1, 0)
    parts[0] = parts[0][:8]
    parts += [lists_of(steps.prefill(row2=num_tokens).prompt_logprobs) for num_tokens in (8, 5)]
    assert [len(part) for part in parts] == [8, 8, 4]
    in_segments = [entries for part in parts for entries in part]
    assert_told(in_segments, theirs, PROMPT, 1, 2)
    at_once = Steps(model)
    at_once.admit(3, PROMPT, prompt_logprobs=2)
    assert_told(lists_of(at_once.prefill(row3=21).prompt_logprobs), theirs, PROMPT, 1, 2)


def test_of_a_resumed_text_the_prompt_alone_is_told_and_of_a_row_s_next_request_nothing(
    pair: tuple[Model, PreTrainedModel],
) -> None:
    model, theirs = pair
    steps = Steps(model)
    steps.admit(0, PROMPT[:6], PROMPT[6:], prompt_logprobs=0)
    told = [steps.prefill(row0=num_tokens).prompt_logprobs for num_tokens in (4, 8, 9)]
    assert [len(lists_of(part)) for part in told] == [4, 1, 0]
    assert told[2] is None
    assert_told(lists_of(told[1]), theirs, PROMPT[:6], 5, 0)
    steps.release(0)
    steps.admit(0, PROMPT)
    assert steps.prefill(row0=21).prompt_logprobs is None


def test_a_long_prompt_is_projected_in_pieces(pair: tuple[Model, PreTrainedModel]) -> None:
    model, theirs = pair
    sizes, project = [], model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return project(hidden)

    model.logits = logits  # type: ignore[method-assign]
    prompt = (PROMPT * 15)[:300]
    steps = Steps(model)
    steps.admit(0, prompt, prompt_logprobs=1)
    told = lists_of(steps.prefill(row0=300).prompt_logprobs)
    assert sorted(sizes) == [1, 43, 128, 128]
    assert_told(told, theirs, prompt, 1, 1)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 2.0, "top_k": 5},
        {"repetition_penalty": 1.8, "frequency_penalty": 1.5, "logit_bias": ((5, 3.0),)},
    ],
)
def test_tokens_are_told_by_the_model_s_distribution_before_any_change(
    pair: tuple[Model, PreTrainedModel], params: dict[str, object]
) -> None:
    """Beside a row that asks for nothing."""
    model, theirs = pair
    steps = Steps(model)
    steps.admit(1, PROMPT[:4])
    steps.admit(0, PROMPT, logprobs=3, **params)
    results = [steps.prefill(row1=4, row0=21), *(steps.decode(1, 0) for _ in range(6))]
    told = [lists_of(result.logprobs) for result in results]
    assert all(other == [] for other, _ in told)
    text = PROMPT + [result.token_ids.tolist()[1] for result in results]
    assert_told([entries for _, entries in told], theirs, text, len(PROMPT), 3)


def test_of_drafts_those_that_are_taken_are_told(pair: tuple[Model, PreTrainedModel]) -> None:
    """A bias makes two texts repeat themselves, and a penalty ends that now and then: drafts are right and wrong."""
    model, theirs = pair
    params = {"logprobs": 1, "logit_bias": ((5, 60.0), (6, 54.0), (7, 50.0)), "frequency_penalty": 1.5}
    steps, prompts = Steps(model, num_draft_tokens=3), (PROMPT, PROMPT[5:])
    for row, prompt in enumerate(prompts):
        steps.admit(row, prompt, **params)
    results = [steps.prefill(row0=21, row1=16), *(steps.decode(0, 1) for _ in range(12))]
    texts: tuple[list[int], ...] = [], []
    told: tuple[list[Entries], ...] = [], []
    for result in results:
        token_ids, entries = iter(result.token_ids.tolist()), iter(lists_of(result.logprobs))
        for row, count in enumerate([1, 1] if result.num_tokens is None else result.num_tokens.tolist()):
            texts[row].extend(islice(token_ids, count))
            told[row].extend(islice(entries, count))
        assert (next(token_ids, None), next(entries, None)) == (None, None)
    num_right = sum(map(len, texts)) - 2 * len(results)
    assert sum(result.num_draft_tokens for result in results) > num_right > 0, "some drafts are right, and some wrong"
    for prompt, text, of_text in zip(prompts, texts, told, strict=True):
        assert_told(of_text, theirs, prompt + text, len(prompt), 1)
