"""A structured output as a matcher over a model's vocabulary, compiled alike by both planes. Knows no request.

The work is `llguidance`'s: a parser over lexemes, each of them a regex by derivatives (https://github.com/guidance-ai/
llguidance, docs/syntax.md and docs/json_schema.md say which schemas and grammars it knows). What it costs is bounded by
counts of its own, never by a clock, so that where one worker goes on another would too.
"""

import json
import zlib

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from blockplane.protos.errors import InvalidRequestError, ModelError, invalid_parameter
from blockplane.protos.model import ModelInfo
from blockplane.protos.structured import StructuredOutput

# A fifth of the default, with which one mask of nested counted repetitions takes seconds and a hundred megabytes.
_LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)
_MAX_REASON = 300
"""Characters of a compiler's message that are handed on."""
MAX_WHITESPACE = 32
"""Characters between two parts of a JSON text: without an end to them bounded values would not bound a text."""


def ending_ids(model: ModelInfo) -> list[int]:
    """The ids that end a text and that the model's logits reach."""
    return [token_id for token_id in model.eos_token_ids if token_id < model.vocab_size]


def grammar_tokenizer(model: ModelInfo) -> LLTokenizer:
    """The model's vocabulary as grammars are compiled for it; takes seconds where it is large, and holds the GIL.

    Raises:
        ModelError: the model has no end of text, or a tokenizer that no grammar can be laid over.
    """
    ends = ending_ids(model)
    if not ends:
        raise ModelError(f"{model.name} has no id that ends a text, so that no structured output could end.")
    try:
        document = zlib.decompress(model.tokenizer_json_zlib).decode()
        return LLTokenizer(document, n_vocab=model.vocab_size, eos_token=ends)
    except ValueError as error:
        raise ModelError(f"no grammar can be laid over the tokenizer of {model.name}: {error}.") from error


def compile_grammar(tokenizer: LLTokenizer, structured: StructuredOutput) -> LLMatcher:
    """A matcher at the beginning of the output; the GIL is free meanwhile.

    Raises:
        InvalidRequestError: it says nothing that can be held to, or is too complex; the message names its kind.
    """
    try:
        matcher = LLMatcher(tokenizer, _grammar_of(structured), log_level=0, limits=_LIMITS)
    except ValueError as error:
        raise refusal(structured, str(error)) from None
    if matcher.is_error():
        raise refusal(structured, matcher.get_error())
    return matcher


def refusal(structured: StructuredOutput, reason: str) -> InvalidRequestError:
    """The error of a structured output that cannot be compiled, in one line."""
    words = " ".join(reason.replace("<non-verbose/>", "").split()).rstrip(".")
    shown = words if len(words) <= _MAX_REASON else words[:_MAX_REASON] + " ..."
    return invalid_parameter(structured.kind, f"{structured.kind} cannot be held to: {shown}; correct or simplify it.")


def _grammar_of(structured: StructuredOutput) -> str:
    """The grammar in the compiler's own form. Raises ValueError where the text is no JSON object but should be."""
    match structured.kind:
        case "json_schema":
            return _json_grammar(structured.text)
        case "json_object":
            return _json_grammar('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(structured.text)
        case "grammar":
            return LLMatcher.grammar_from_lark(structured.text)
        case "choice":
            # Lark spells texts as JSON does.
            choices = map(json.dumps, json.loads(structured.text))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(choices)}")


def _json_grammar(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_pattern": rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}"}
    )
