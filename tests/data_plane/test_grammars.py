"""Which ids may come where outputs are structured: as the matcher itself says, behind any text, drafts or failure."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockplane.data_plane import grammars as module
from blockplane.data_plane.grammars import Grammars, Place, load_grammars
from blockplane.data_plane.models.synthetic import synthetic_model_info
from blockplane.data_plane.models.synthetic_arithmetic import EOS_TOKEN_ID, VOCAB_SIZE
from blockplane.data_plane.sampling_rows import SamplingRows
from blockplane.protos.config import Config
from blockplane.protos.errors import InvalidRequestError
from blockplane.protos.grammars import compile_grammar, grammar_tokenizer
from blockplane.protos.plan import Admission, StepPlan
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.structured import StructuredOutput

MODEL = synthetic_model_info(64)
TOKENIZER = grammar_tokenizer(MODEL)
PROMPT = np.array([7, 8, 9], np.int32)
WORDS = StructuredOutput("regex", "(ab|abc|bcd)+")
WIDE = StructuredOutput(
    "json_schema", json.dumps({"properties": {f"k{index}": {} for index in range(900)}, "type": "object"})
)
"""It compiles, and has too many ways to go on behind its first brace."""
DIVIDED = StructuredOutput(
    "json_schema", '{"type": "integer", "multipleOf": 10007, "minimum": 0, "maximum": 1000000000000}'
)
"""And this too many digits: the one fails as it takes a token, the other as it says what may follow."""
FORKED = StructuredOutput("grammar", f"start: number | WHY\nWHY: /y+/\nnumber: %json {DIVIDED.text}")
FAILING = [(WIDE, b"{"), (DIVIDED, b"2")]


@cache
def shared() -> Grammars:
    return Grammars(MODEL, num_threads=2)


@pytest.fixture
def grammars() -> Grammars:
    return shared()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[StructuredOutput]:
    """What is compiled for rows from now on."""
    noted: list[StructuredOutput] = []

    def compile_and_note(tokenizer: Any, structured: StructuredOutput) -> Any:
        noted.append(structured)
        return compile_grammar(tokenizer, structured)

    monkeypatch.setattr(module, "compile_grammar", compile_and_note)
    return noted


class Row:
    """A row that is admitted with this output."""

    def __init__(self, grammars: Grammars, structured: StructuredOutput = WORDS, output: bytes = b"") -> None:
        self.grammar = grammars.begin(structured, len(PROMPT))
        self.token_ids = np.concatenate((PROMPT, ids(output)))

    def say(self, *token_ids: int) -> None:
        self.token_ids = np.append(self.token_ids, np.array(token_ids, np.int32))

    def place(self, *drafts: int) -> Place:
        return Place(self.grammar, np.append(self.token_ids, np.array(drafts, np.int32)), len(self.token_ids))


def ids(output: bytes) -> np.ndarray:
    return np.array([*output], np.int32)


def ids_of(bits: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def may_follow(grammars: Grammars, *places: Row | Place) -> list[set[int]]:
    """What may come there, or behind the known tokens of rows."""
    bits = grammars.masks([place.place() if isinstance(place, Row) else place for place in places])
    return [ids_of(one) for one in bits]


def expected(output: bytes, structured: StructuredOutput = WORDS) -> set[int]:
    """What the matcher says that goes there at once."""
    matcher = compile_grammar(TOKENIZER, structured)
    assert matcher.consume_tokens([*output])
    return ids_of(np.frombuffer(matcher.compute_bitmask(), np.uint8))


def letters(text: str, *token_ids: int) -> set[int]:
    return {*text.encode(), *token_ids}


def test_a_mask_has_a_bit_for_each_id_and_says_what_the_matcher_says(grammars: Grammars) -> None:
    outputs = b"", b"a", b"ab", b"bc"
    bits = grammars.masks([Row(grammars, output=output).place() for output in outputs])
    assert (bits.dtype, bits.shape) == (np.int32, (4, -(-VOCAB_SIZE // 32)))
    assert [ids_of(one) for one in bits] == [expected(output) for output in outputs]
    assert [ids_of(one) for one in bits] == [letters("ab"), letters("b"), letters("abc", EOS_TOKEN_ID), letters("d")]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([b"ab", b"abc", b"bcd"]), max_size=6), st.data())
def test_a_row_is_where_its_output_is_however_the_output_came(words: list[bytes], data: st.DataObject) -> None:
    """At once on admission, as after a preemption or on another worker; in steps; as drafts that are taken or not."""
    grammars, output = shared(), b"".join(words)
    known = data.draw(st.integers(0, len(output)))
    stepwise = Row(grammars, output=output[:known])
    for stop in range(known, len(output) + 1):
        drafts = output[stop : stop + 3]
        masks = may_follow(grammars, *(stepwise.place(*drafts[:count]) for count in range(len(drafts) + 1)))
        assert masks == [expected(output[: stop + count]) for count in range(len(drafts) + 1)]
        stepwise.say(*output[stop : stop + 1])
    assert may_follow(grammars, stepwise, Row(grammars, output=output)) == [expected(output)] * 2


def test_a_draft_that_is_forbidden_lets_nothing_come_behind_it_and_is_forgotten(grammars: Grammars) -> None:
    first, mate = Row(grammars, output=b"a"), Row(grammars, output=b"b")
    places = [*(first.place(*b"bxb"[:count]) for count in range(4)), mate.place(), mate.place(*b"c")]
    masks = [letters("b"), letters("abc", EOS_TOKEN_ID), set[int](), set[int](), letters("c"), letters("d")]
    assert may_follow(grammars, *places) == masks
    assert may_follow(grammars, first) == [letters("b")]


def test_a_place_far_behind_the_known_tokens_may_be_asked_for_alone(grammars: Grammars) -> None:
    """As a draft model asks, draft after draft."""
    one = Row(grammars, output=b"a")
    for count in range(3):
        assert may_follow(grammars, one.place(*b"bc"[:count])) == [expected(b"abc"[: 1 + count])]


def test_drafts_leave_nothing_behind_in_a_grammar_that_knows_no_way_back(
    grammars: Grammars, compiled: list[StructuredOutput]
) -> None:
    """One that counts tokens; it is gone through once more, and not compiled once more."""
    counted = StructuredOutput("grammar", 'start: a "!"\na[max_tokens=2]: /[a-z]+/')
    one = Row(grammars, counted, b"x")
    first = expected(b"x", counted)
    assert may_follow(grammars, one) == [first]
    for drafts in (b"yz", b"y!", b"!"):
        may_follow(grammars, *(one.place(*drafts[:count]) for count in range(len(drafts) + 1)))
        assert may_follow(grammars, one) == [first]
    assert compiled == [counted]


@pytest.mark.parametrize("structured", [WORDS, StructuredOutput.choice(["ab", "abc"])])
def test_the_text_may_end_where_the_grammar_does_and_nothing_follows(
    grammars: Grammars, structured: StructuredOutput
) -> None:
    assert EOS_TOKEN_ID not in may_follow(grammars, Row(grammars, structured, b"a"))[0]
    done = Row(grammars, structured, b"ab")
    assert EOS_TOKEN_ID in may_follow(grammars, done)[0]
    assert may_follow(grammars, done.place(EOS_TOKEN_ID)) == [set()]
    done.say(EOS_TOKEN_ID)
    assert may_follow(grammars, done) == [set()]


def test_a_choice_that_nothing_can_follow_leaves_the_end_alone(grammars: Grammars) -> None:
    choice = StructuredOutput.choice(["ab", "abc"])
    assert may_follow(grammars, Row(grammars, choice, b"ab"), Row(grammars, choice, b"abc")) == [
        letters("c", EOS_TOKEN_ID),
        letters("", EOS_TOKEN_ID),
    ]


def test_a_token_that_the_grammar_forbids_ends_the_row_alone(grammars: Grammars) -> None:
    """As one does that an older worker let come."""
    lost, mate = Row(grammars, output=b"ax"), Row(grammars, output=b"a")
    assert may_follow(grammars, lost, mate) == [set(), letters("b")]


def test_what_does_not_compile_ends_its_row_alone(grammars: Grammars) -> None:
    bad, mate = Row(grammars, StructuredOutput("regex", "(")), Row(grammars)
    assert may_follow(grammars, bad, mate) == [set(), letters("ab")]


# -- grammars that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("structured", "begun"), FAILING)
def test_a_grammar_that_fails_lets_nothing_come_not_even_the_end(
    grammars: Grammars, structured: StructuredOutput, begun: bytes
) -> None:
    """The library itself would answer with an end of text, so that half a text looked whole."""
    failing, mate = Row(grammars, structured, begun), Row(grammars)
    assert may_follow(grammars, failing, mate) == [set(), letters("ab")]
    assert may_follow(grammars, failing, mate) == [set(), letters("ab")]


@pytest.mark.parametrize(("structured", "begun"), FAILING)
def test_a_grammar_that_fails_at_a_draft_fails_there_alone(
    grammars: Grammars, structured: StructuredOutput, begun: bytes
) -> None:
    one, first = Row(grammars, structured), expected(b"", structured)
    for _ in range(2):
        # The drafts were not taken: nothing of them is left.
        assert may_follow(grammars, one.place(), one.place(*begun)) == [first, set()]
        assert may_follow(grammars, *(one.place(*draft) for draft in (b"", begun, begun + b'"'))) == [
            first,
            set(),
            set(),
        ]
    one.say(*begun)
    assert may_follow(grammars, one) == [set()]


def test_rows_that_ask_for_what_fails_another_go_on(grammars: Grammars) -> None:
    before, failing = Row(grammars, FORKED), Row(grammars, FORKED)
    assert may_follow(grammars, before, failing) == [expected(b"", FORKED)] * 2
    failing.say(*b"2")
    assert may_follow(grammars, failing) == [set()]
    before.say(*b"y")
    after = Row(grammars, FORKED, b"y")
    for places in ((before.place(), before.place(*b"y"), after.place()), (after.place(), before.place())):
        assert may_follow(grammars, *places) == [letters("y", EOS_TOKEN_ID)] * len(places)


@pytest.mark.parametrize(("structured", "begun"), FAILING)
def test_a_row_that_failed_is_not_tried_again(
    grammars: Grammars, structured: StructuredOutput, begun: bytes, compiled: list[StructuredOutput]
) -> None:
    failing = Row(grammars, structured, begun)
    assert may_follow(grammars, failing) == [set()]
    failing.say(0)
    assert may_follow(grammars, failing) == [set()]
    assert compiled == [structured]


# -- compiling ---------------------------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_beside_the_steps_and_waited_for_where_its_row_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_compile = threading.Event()

    def compile_then(tokenizer: Any, structured: StructuredOutput) -> Any:
        assert may_compile.wait(20)
        return compile_grammar(tokenizer, structured)

    monkeypatch.setattr(module, "compile_grammar", compile_then)
    grammars = Grammars(MODEL, 1)
    one = Row(grammars)
    with ThreadPoolExecutor(1) as pool:
        masks = pool.submit(may_follow, grammars, one)
        time.sleep(0.05)
        assert not masks.done()
        may_compile.set()
        assert masks.result(20) == [letters("ab")]


def test_what_waits_to_be_compiled_for_a_row_that_is_released_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_compile, compiled = threading.Event(), list[StructuredOutput]()

    def compile_then(tokenizer: Any, structured: StructuredOutput) -> Any:
        assert may_compile.wait(20)
        compiled.append(structured)
        return compile_grammar(tokenizer, structured)

    monkeypatch.setattr(module, "compile_grammar", compile_then)
    grammars = Grammars(MODEL, 1)
    sampling = SamplingRows(4, VOCAB_SIZE, (EOS_TOKEN_ID,), grammars)
    asked = [StructuredOutput("regex", "a" * (1 + row)) for row in range(3)]
    sampling.apply(
        StepPlan(
            1,
            admissions=tuple(
                Admission(row, PROMPT, len(PROMPT), 0, SamplingParams(9, structured=structured), 0)
                for row, structured in enumerate(asked)
            ),
        )
    )
    sampling.apply(StepPlan(2, released_rows=np.array([1], np.int32)))
    last = Row(grammars)
    may_compile.set()
    may_follow(grammars, last)
    assert compiled == [asked[0], asked[2], WORDS]


@pytest.mark.parametrize("kind", ["off", "no end"])
def test_a_worker_may_know_no_structured_output(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    assert load_grammars(Config(), MODEL) is not None
    if kind == "off":
        assert load_grammars(Config(structured_output="off"), MODEL) is None
    else:
        model = synthetic_model_info(64)
        object.__setattr__(model, "eos_token_ids", (VOCAB_SIZE,))
        assert load_grammars(Config(), model) is None
        assert "no id that ends a text" in caplog.text


# -- the texts that are meant ------------------------------------------------------------------------------------------

SOUND = {
    "any object": (StructuredOutput("json_object"), ["{}", '{"a": [1, null]}'], ["[]", "1", "{} {}"]),
    "schema": (
        StructuredOutput(
            "json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
        ),
        ['{"a": 1}', '{"a":-20}', '{"a": 1, "b": "c"}', '{\n  "a": 1\n}'],
        ["{}", '{"a": "1"}', '{"a": 1' + " " * 40 + "}"],
    ),
    "regex": (StructuredOutput("regex", "[a-c]{2}|é"), ["ab", "é"], ["a", "abc", "xab"]),
    "grammar": (
        StructuredOutput("grammar", 'start: sum\nsum: INT ("+" INT)*\nINT: /[0-9]+/'),
        ["1", "12+3+4"],
        ["", "1+", "+1"],
    ),
    "choice": (StructuredOutput.choice(['say "é"', "a\\b\n"]), ['say "é"', "a\\b\n"], ["say", "a"]),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_text_may_come_and_end_exactly_where_it_is_meant(grammars: Grammars, name: str) -> None:
    structured, right, wrong = SOUND[name]
    for answer in right:
        assert EOS_TOKEN_ID in may_follow(grammars, Row(grammars, structured, answer.encode()))[0], answer
    for answer in wrong:
        assert EOS_TOKEN_ID not in may_follow(grammars, Row(grammars, structured, answer.encode()))[0], answer


@pytest.mark.parametrize(
    ("kind", "given_text", "reason"),
    [
        ("json_schema", "[]", "object"),
        ("json_schema", "{", "key must be a string|EOF"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "string", "enum": [1]}', "Unsatisfiable"),
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("grammar", "start: x", "unknown name"),
        ("grammar", 'start: "a" <|nothing|>', "special token"),
    ],
)
def test_what_cannot_be_held_to_is_refused_by_the_field_s_name(kind: Any, given_text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{kind} cannot be held to: .*({reason})") as refusal:
        compile_grammar(TOKENIZER, StructuredOutput(kind, given_text))
    assert "\n" not in str(refusal.value)
