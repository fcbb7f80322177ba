"""What a client is asked for, as a request on the wire, and the parameters that say so; knows no connection."""

import inspect
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from blockplane.client.values import structured_fields
from blockplane.protos.errors import InvalidRequestError
from blockplane.protos.structured import StructuredOutput
from blockplane.v1 import inference_pb2 as pb

_Parameters = ParamSpec("_Parameters")
_Self = TypeVar("_Self")
_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Generation:
    """A request, and what its client is to do where a call of it breaks; `generation` documents the fields."""

    request: pb.GenerateRequest
    timeout: float | None
    max_retries: int
    reattach_seconds: float


def generation(
    prompt: str | Sequence[int],
    *,
    num_samples: int = 1,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    bad_words: str | Sequence[str] = (),
    bad_word_token_ids: Sequence[Sequence[int]] = (),
    stop: str | Sequence[str] = (),
    include_stop_str_in_output: bool = False,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    skip_special_tokens: bool | None = None,
    spaces_between_special_tokens: bool | None = None,
    truncate_prompt_tokens: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    structured: StructuredOutput | None = None,
    whole_output: bool = False,
    request_id: str | None = None,
    priority: int = 0,
    cache_salt: str = "",
    add_special_tokens: bool | None = None,
    skip_prefix_cache: bool = False,
    timeout: float | None = None,
    max_retries: int = 2,
    reattach_seconds: float = 0.0,
) -> Generation:
    """What is None takes the model's own default, which is to change nothing where no other is named.

    Args:
        prompt: text, or token ids.
        num_samples: continuations of the prompt, at most 64, each with draws of its own. Their deltas come as their
            tokens do, and the iterator ends once all have ended.
        max_tokens: output tokens at most; None = as many as the context has room for.
        min_tokens: output tokens before which neither an end of text nor a stop id may come.
        temperature: 0 = greedy.
        top_k: draw from the k likeliest; 0 = from all.
        top_p: draw from the likeliest that together have this probability; 1 = from all.
        min_p: draw from those with at least this share of the likeliest one's probability; 0 = from all.
        seed: 64 bits; the same one gives the same continuations; None = the server draws one.
        presence_penalty: taken from the logit of every id that the output holds; -2 to 2.
        frequency_penalty: taken from it once for each time; -2 to 2.
        repetition_penalty: divides the positive and multiplies the negative logits of ids in prompt or output; at
            most 2; 1 = none.
        logit_bias: by id, what is added to its logit; -100 to 100.
        allowed_token_ids: only these may come; None = all.
        bad_words: one text or several that may not come, behind a space or none.
        bad_word_token_ids: id sequences of which none may be completed.
        stop: one text or several that end the output; neither they nor what follows arrives.
        include_stop_str_in_output: have the one that did arrive, too.
        stop_token_ids: ids that end the text, besides the model's.
        ignore_eos: go on past the model's end-of-text ids.
        skip_special_tokens: leave special tokens out of the text, as is done where it is None.
        spaces_between_special_tokens: False = where they are told, without the space that the tokenizer may put
            between two.
        truncate_prompt_tokens: use only the prompt's last so many tokens; a text's BOS token stays and counts.
        logprobs: tell of each output token how likely it was, and as many of the likeliest ids, at most 20; None =
            tell nothing.
        prompt_logprobs: the same of each token of the prompt but the first.
        structured: what the output's text must be as a whole: a JSON schema, any JSON object, a regex, a grammar or
            one of several texts; None = any text.
        whole_output: have one delta of each sample, once it has ended, which is less work for everybody.
        request_id: for `abort` and `resume`; unique among live requests; None = one is drawn.
        priority: less comes first; a request that waits gains on all that come later.
        cache_salt: only requests of the same salt share cached prefixes.
        add_special_tokens: put the model's BOS token before a text, as is done where it is None; False = the text
            spells those that it wants, as a chat template does.
        skip_prefix_cache: neither use cached prefixes nor leave any.
        timeout: seconds that the whole request may take, waiting and further attempts included; None = no limit.
        max_retries: how often to send it again where no server answers, or one says that it cannot now and when it
            can; only as long as nothing of it has come.
        reattach_seconds: if the call ends UNAVAILABLE, resume it until nothing came for so long; each token comes
            once. Log-probabilities of tokens that had not arrived by then are lost. The server needs a journal. In
            place of `max_retries`.

    Raises:
        InvalidRequestError: a value that the protocol cannot carry, at once; or that the server refuses, on `next`.
        CapacityError: the server has no room, on `next`; `retry_after_seconds` says when it may have.
        DeadlineError: `timeout` has passed, on `next`.
        BlockplaneError: any other refusal or failure, on `next`; of one of several samples once all have ended.
    """
    try:
        params = pb.SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=logit_bias,
            allowed_token_ids=None if allowed_token_ids is None else pb.TokenIds(ids=allowed_token_ids),
            bad_words=_several(bad_words),
            bad_word_token_ids=[pb.TokenIds(ids=ids) for ids in bad_word_token_ids],
            stop=_several(stop),
            include_stop_str_in_output=include_stop_str_in_output,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            truncate_prompt_tokens=truncate_prompt_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **structured_fields(structured),
        )
        request = pb.GenerateRequest(
            request_id=request_id or (secrets.token_hex(8) if reattach_seconds > 0 else ""),
            sampling_params=params,
            num_samples=num_samples,
            priority=priority,
            cache_salt=cache_salt,
            skip_prefix_cache=skip_prefix_cache,
            whole_output=whole_output,
            add_special_tokens=add_special_tokens,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    except ValueError as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}; correct that value.") from None
    return Generation(request, timeout, max_retries, reattach_seconds)


def _several(texts: str | Sequence[str]) -> Sequence[str]:
    return [texts] if isinstance(texts, str) else texts


def takes(
    build: Callable[_Parameters, _Asked],
) -> Callable[[Callable[[_Self, _Asked], _Answer]], Callable[Concatenate[_Self, _Parameters], _Answer]]:
    """Give a method the parameters of `build`, their types and their documentation; it gets what `build` makes of them.

    So what both clients take is written once.
    """

    def decorate(method: Callable[[_Self, _Asked], _Answer]) -> Callable[Concatenate[_Self, _Parameters], _Answer]:
        @wraps(method)
        def called(self: _Self, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Answer:
            return method(self, build(*args, **kwargs))

        own, built = inspect.signature(method), inspect.signature(build)
        parameters = [next(iter(own.parameters.values())), *built.parameters.values()]
        called.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__doc__ = f"{inspect.getdoc(method)}\n\n{inspect.getdoc(build)}"
        return called

    return decorate
