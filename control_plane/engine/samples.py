"""The requests that one submission becomes; knows no queue."""

import hashlib
import secrets
from dataclasses import replace

from blockplane.control_plane.engine.request import Request
from blockplane.protos.delivery import Submission
from blockplane.protos.errors import InvalidRequestError
from blockplane.protos.sampling import MAX_SAMPLES, check_sampling_params, check_token_ids


def check_submission(submission: Submission, vocab_size: int) -> None:
    """Raise InvalidRequestError unless any model of that vocabulary could serve it."""
    if not 1 <= submission.num_samples <= MAX_SAMPLES:
        raise InvalidRequestError(
            f"{submission.num_samples} samples are asked for; ask for 1 to {MAX_SAMPLES}.", "num_samples"
        )
    if not submission.prompt_token_ids.size:
        raise InvalidRequestError("the prompt holds no token; send at least one.", "prompt")
    check_token_ids("prompt", submission.prompt_token_ids, vocab_size)
    check_sampling_params(submission.params, vocab_size)


def seeded(submission: Submission) -> Submission:
    """The same with a seed of its own, drawn here and once: whatever happens to it later, its noise stays the same."""
    if submission.params.seed is not None:
        return submission
    return replace(submission, params=replace(submission.params, seed=secrets.randbits(64)))


def samples_of(submission: Submission, owner: int = 0) -> list[Request]:
    """A seeded submission's requests: the first leads, the others share the blocks of its prompt by the prefix cache.

    The first tells of the prompt too, if that is asked for.
    """
    params, seed = submission.params, submission.params.seed
    assert seed is not None
    return [
        Request(
            request_id=submission.request_id,
            token_ids=submission.prompt_token_ids,
            num_prompt_tokens=len(submission.prompt_token_ids),
            params=params if index == 0 else replace(params, prompt_logprobs=None),
            seed=_sample_seed(seed, index),
            owner=owner,
            stream_id=submission.stream_id + index,
            caller=submission.caller,
            traceparent=submission.traceparent,
            priority=submission.priority,
            cache_salt=submission.cache_salt,
            skip_prefix_cache=submission.skip_prefix_cache,
        )
        for index in range(submission.num_samples)
    ]


def _sample_seed(seed: int, index: int) -> int:
    """The seed of a prompt's sample of that index; unrelated ones, though the first is the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
