"""The synthetic model through real block KV says what the oracle says, and its text is fit for a client."""

import random
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_driver import SyntheticDriver
from synthetic_oracle import SyntheticOracle, continue_greedily, next_token
from tokenizers import Tokenizer

from blockplane.data_plane.models import synthetic_arithmetic as arithmetic
from blockplane.data_plane.models.synthetic import MAX_MODEL_LEN, SyntheticModel, synthetic_model_info
from blockplane.protos.errors import ConfigurationError

DTYPES = ("float32", "bfloat16")
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
MODELS = {dtype: SyntheticModel(dtype) for dtype in DTYPES}


def text(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=num_tokens)


def byte_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(zlib.decompress(synthetic_model_info(1).tokenizer_json_zlib).decode())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97])
def test_prompts_around_block_chunk_and_window_boundaries_equal_the_oracle(dtype: str, length: int) -> None:
    prompt = text(length)
    driver = SyntheticDriver([prompt], model=MODELS[dtype], kv_dtype=getattr(torch, dtype))
    for start in range(0, length, 32):
        hidden = driver.prefill((0, min(32, length - start)), padding=start % 7)
    for token_id in continue_greedily(prompt, 3, ignore_eos=True):
        assert driver.model.logits(hidden[-1:]).argmax() == token_id
        driver.texts[0].append(token_id)
        hidden = driver.decode(0)
    assert driver.states[0] == SyntheticOracle(driver.texts[0]).states.tolist()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_packing_of_any_texts_equals_the_oracle(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(2, 120), min_size=1, max_size=4))
    texts = [text(length, seed) for seed, length in enumerate(lengths)]
    driver = SyntheticDriver(
        texts,
        model=MODELS[data.draw(st.sampled_from(DTYPES))],
        kv_dtype=data.draw(st.sampled_from(KV_DTYPES)),
        block_size=data.draw(st.sampled_from([1, 4, 16, 32])),
        seed=data.draw(st.integers(0, 9)),
    )
    num_decoded = data.draw(st.integers(0, 3))
    while remaining := {row: n for row, ids in enumerate(texts) if (n := len(ids) - len(driver.states[row])) > 0}:
        rows, padding = data.draw(st.permutations(sorted(remaining))), data.draw(st.integers(0, 9))
        if max(remaining.values()) <= num_decoded:
            driver.decode(*rows, padding=padding)
        else:
            driver.prefill(*((row, data.draw(st.integers(1, remaining[row]))) for row in rows), padding=padding)
    assert driver.states == [SyntheticOracle(ids).states.tolist() for ids in texts]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_context_of_2100_tokens_equals_the_oracle(dtype: str) -> None:
    prompt = text(2100)
    driver = SyntheticDriver([prompt, prompt[:100]], model=MODELS[dtype], kv_dtype=getattr(torch, dtype))
    for num_tokens in (512, 512, 512, 512, 50):
        driver.prefill((0, num_tokens), (1, num_tokens // 25))
    driver.decode(0, 1)
    driver.decode(1, 0, padding=1)
    expected = SyntheticOracle(prompt).states.tolist()
    assert driver.states == [expected, expected[:84]]


@pytest.mark.slow
def test_the_longest_context_in_bfloat16_equals_the_oracle() -> None:
    prompt = text(MAX_MODEL_LEN)
    driver = SyntheticDriver([prompt], model=MODELS["bfloat16"], kv_dtype=torch.bfloat16)
    for _ in range(8):
        driver.prefill((0, MAX_MODEL_LEN // 8))
    assert driver.states[0] == SyntheticOracle(prompt).states.tolist()


def test_position_codes_are_far_apart_up_to_the_longest_context() -> None:
    channels = torch.arange(arithmetic.NUM_CODE_CHANNELS)
    for layer in range(arithmetic.NUM_LAYERS):
        for kv_head in range(arithmetic.NUM_KV_HEADS):
            code = arithmetic.position_code(layer, kv_head, torch.arange(MAX_MODEL_LEN)[:, None], channels).float()
            for start in range(0, MAX_MODEL_LEN, 1024):
                scores = code[start : start + 1024] @ code.T
                scores.diagonal(start).zero_()
                assert scores.max() <= arithmetic.NUM_CODE_CHANNELS - 50


def test_the_target_leads_every_other_logit_by_more_than_six() -> None:
    torch.manual_seed(0)
    hidden = torch.stack([torch.randint(-(2**63), 2**63 - 1, (500,)), torch.randint(256, (500,))], dim=1)
    logits = MODELS["bfloat16"].logits(hidden)
    assert logits.dtype == torch.float32
    first, second = logits.topk(2).values.unbind(1)
    assert (first - second).min() > 6
    assert logits.min() >= 0
    assert logits.sort().values[:, :-1].diff(dim=1).unique().numel() > 1000


def test_the_oracle_continues_a_text_token_by_token() -> None:
    prompt = text(100)
    continuation = continue_greedily(prompt, 20, ignore_eos=True)
    assert continuation == [next_token(prompt + continuation[:i]) for i in range(20)]


def test_text_is_printable_and_ends_by_itself_once_in_256_tokens() -> None:
    torch.manual_seed(0)
    tokens, alphabet = [0], torch.tensor(arithmetic.ALPHABET)
    for state in torch.randint(-(2**63), 2**63 - 1, (4096, 1)):
        tokens.append(int(arithmetic.target(state, torch.tensor(tokens[-1:]), alphabet)))
    assert 6 <= tokens.count(arithmetic.EOS_TOKEN_ID) <= 32
    written = byte_tokenizer().decode(tokens[1:])
    assert written.isprintable()
    assert sum(not character.isascii() for character in written) > 32
    assert len(set(written)) > 100


def test_a_text_stops_at_its_end_of_text_token() -> None:
    texts = [continue_greedily(text(9, seed), 400) for seed in range(4)]
    ended = [tokens for tokens in texts if len(tokens) < 400]
    assert ended
    assert all(tokens.index(arithmetic.EOS_TOKEN_ID) == len(tokens) - 1 for tokens in ended)


def test_the_tokenizer_maps_every_byte_to_its_value_and_adds_nothing() -> None:
    tokenizer = byte_tokenizer()
    every = "".join(map(chr, range(0x250))) + "€🙂 the end"
    assert tokenizer.encode(every).ids == list(every.encode())
    assert tokenizer.decode(list(every.encode())) == every
    assert tokenizer.decode([*b"ab", 0xC3, *b"c", arithmetic.EOS_TOKEN_ID]) == "ab\N{REPLACEMENT CHARACTER}c"
    assert tokenizer.encode("<bos>a<eos>").ids == [arithmetic.BOS_TOKEN_ID, ord("a"), arithmetic.EOS_TOKEN_ID]
    assert tokenizer.get_vocab_size() == arithmetic.VOCAB_SIZE


def test_a_context_beyond_exactness_is_refused() -> None:
    assert synthetic_model_info(MAX_MODEL_LEN).max_model_len == MAX_MODEL_LEN
    with pytest.raises(ConfigurationError, match="4096"):
        synthetic_model_info(MAX_MODEL_LEN + 1)
