"""The configuration: which source wins, which errors name which setting, and its way to another process and back."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.protos.config import PROFILES, Config, add_settings, as_flags, load_config
from blockplane.protos.errors import ConfigurationError

NAMES = [setting.name for setting in fields(Config)]


def parse(*arguments: str) -> dict[str, Any]:
    """Flags as a process sees them."""
    parser = argparse.ArgumentParser()
    add_settings(parser)
    return vars(parser.parse_args(arguments))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "blockplane.toml"


# -- where a setting comes from ----------------------------------------------------------------------------------------


def test_each_source_wins_over_the_ones_behind_it(file: Path) -> None:
    file.write_text("block_size = 2\nnum_blocks = 12\nmax_model_len = 22\nnum_threads = 32\n")
    environ = {"BLOCKPLANE_BLOCK_SIZE": "3", "BLOCKPLANE_NUM_BLOCKS": "13", "BLOCKPLANE_MAX_MODEL_LEN": "23"}
    config = load_config(parse("--config", str(file), "--block-size", "4", "--num-blocks", "14"), environ)
    assert (config.block_size, config.num_blocks, config.max_model_len, config.num_threads) == (4, 14, 23, 32)
    assert config.kv_cache_bytes == Config().kv_cache_bytes


@pytest.mark.parametrize("source", ["flag", "environ", "file"])
def test_bucket_lists_win_over_the_profile_wherever_they_are_given(source: str, file: Path) -> None:
    file.write_text("num_seqs_buckets = [3, 5]\n")
    given = {
        "flag": (parse("--num-seqs-buckets", "3,5"), {}),
        "environ": ({}, {"BLOCKPLANE_NUM_SEQS_BUCKETS": "3, 5"}),
        "file": (parse("--config", str(file)), {}),
    }
    config = load_config(*given[source])
    assert config.num_seqs_buckets == (3, 5)
    assert config.num_batched_tokens_buckets == PROFILES["production"]["num_batched_tokens_buckets"]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_sets_the_bucket_lists(profile: str) -> None:
    config = load_config({"profile": profile}, {})
    assert {name: getattr(config, name) for name in PROFILES[profile]} == PROFILES[profile]


def test_development_has_one_bucket_each_and_production_several() -> None:
    assert [len(buckets) for buckets in PROFILES["development"].values()] == [1, 1, 1]
    # Of segment sizes only one is supported (seed 001).
    assert {name for name, buckets in PROFILES["production"].items() if len(buckets) == 1} == {
        "kv_segment_size_buckets"
    }
    assert PROFILES["development"].keys() == PROFILES["production"].keys()


def test_without_any_source_the_defaults_stand_and_the_profile_is_production() -> None:
    config = load_config({}, {})
    differing = {name for name in NAMES if getattr(config, name) != getattr(Config(), name)}
    assert differing == PROFILES["production"].keys()
    assert config == load_config({"profile": "production"}, {})


def test_the_file_may_be_named_by_the_environment_and_the_flag_wins(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    file.write_text("block_size = 8")
    other.write_text("block_size = 64")
    environ = {"BLOCKPLANE_CONFIG": str(file)}
    assert load_config({}, environ).block_size == 8
    assert load_config({"config": str(other)}, environ).block_size == 64
    assert load_config({}, {"BLOCKPLANE_CONFIG": ""}).block_size == 16


def test_given_defaults_stand_behind_every_source_and_win_over_the_profile() -> None:
    defaults = Config(engine_address="unix:/run/x", block_size=8, num_seqs_buckets=(7,))
    config = load_config({}, {"BLOCKPLANE_BLOCK_SIZE": "4"}, defaults)
    assert (config.engine_address, config.block_size, config.num_seqs_buckets) == ("unix:/run/x", 4, (7,))


def test_other_variables_and_lower_case_ones_are_not_settings() -> None:
    assert load_config({}, {"BLOCK_SIZE": "1", "BLOCKPLANE_block_size": "2", "PATH": "3"}) == load_config({}, {})


def test_a_parser_may_offer_some_settings_only() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, ["address"])
    assert vars(parser.parse_args(["--address", "x:1"])) == {"address": "x:1"}
    with pytest.raises(SystemExit):
        parser.parse_args(["--block-size", "4"])


def test_every_setting_has_a_flag_and_a_line_of_help() -> None:
    parser = argparse.ArgumentParser(prog="x")
    add_settings(parser)
    shown = " ".join(parser.format_help().split())
    for setting in fields(Config):
        assert f"--{setting.name.replace('_', '-')} VALUE {setting.metadata['help'].split()[0]}" in shown


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", "0"),
        ("block_size", "-16"),
        ("block_size", "16.0"),
        ("block_size", ""),
        ("max_model_len", "-1"),
        ("num_blocks", "-1"),
        ("num_blocks", "1"),
        ("kv_cache_bytes", "-1"),
        ("kv_cache_bytes", "1GiB"),
        ("max_waiting_requests", "0"),
        ("num_threads", "-1"),
        ("num_threads", "many"),
        ("num_draft_tokens", "-1"),
        ("draft_source", "guess"),
        ("draft_source", "eagle"),
        ("draft_source", "model"),
        ("draft_model", "synthetic"),
        ("dtype", "float16"),
        ("dtype", ""),
        ("quantize", "int2"),
        ("quantize", ""),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("kv_cache_dtype", "int8"),
        ("profile", "fast"),
        ("plaintext", "everywhere"),
        ("reflection", "yes"),
        ("channelz", ""),
        ("tls_certificate", "a.pem"),
        ("tls_key", "a.key"),
        ("tls_client_ca", "ca.pem"),
        ("max_caller_requests", "-1"),
        ("max_caller_tokens", "-1"),
        ("log_level", "loud"),
        ("kv_segment_size_buckets", "512,1024"),
        ("kv_segment_size_buckets", "0"),
        ("kv_segment_size_buckets", "-1"),
        ("decode_context_length_buckets", "512,256"),
        ("decode_context_length_buckets", "100"),
        ("max_num_batched_tokens", "-1"),
        ("max_num_seqs", "-1"),
        ("max_waiting_tokens", "0"),
        ("priority_seconds", "-1"),
        ("max_queue_seconds", "-1"),
        ("segmented_prefill", "maybe"),
        ("num_seqs_buckets", "1,2,x"),
        ("num_seqs_buckets", "1,2,2"),
        ("num_seqs_buckets", "0,1"),
        ("num_batched_tokens_buckets", "256,128"),
        ("num_batched_tokens_buckets", "1,,2"),
        ("num_batched_tokens_buckets", "8"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "environ"])
def test_an_impossible_value_is_refused_in_a_sentence_that_names_the_setting(
    name: str, value: str, source: str
) -> None:
    flags, environ = ({name: value}, {}) if source == "flag" else ({}, {f"BLOCKPLANE_{name.upper()}": value})
    with pytest.raises(ConfigurationError, match=rf"\b{name}\b.*\.$"):
        load_config(flags, environ)


@pytest.mark.parametrize(
    "line",
    [
        "block_size = 16.5",
        "block_size = 16.0",
        "block_size = true",
        "block_size = [16]",
        'num_threads = "two"',
        "num_seqs_buckets = 8",
        "num_seqs_buckets = [1.5, 2]",
        "num_seqs_buckets = [true, 2]",
        "address = 50051",
        'model = ["gemma3-270m"]',
        "dtype = 16",
    ],
)
def test_a_file_s_value_of_another_type_is_refused_naming_the_setting(line: str, file: Path) -> None:
    file.write_text(line)
    with pytest.raises(ConfigurationError, match=rf"\b{line.split()[0]}\b.*\.$"):
        load_config({"config": str(file)}, {})


def test_a_file_s_unknown_settings_are_named_and_so_is_the_file(file: Path) -> None:
    file.write_text("block_size = 8\nblocksize = 8\n[engine]\nx = 1\n")
    with pytest.raises(ConfigurationError, match=rf"{file.name} sets blocksize, engine, which is no setting"):
        load_config({"config": str(file)}, {})


@pytest.mark.parametrize("content", [b"block_size 8", b"block_size = ", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_named(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=file.name):
        load_config({"config": str(file)}, {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigurationError, match=rf"cannot read the configuration file {path}"):
            load_config({"config": str(path)}, {})


def test_the_last_prefill_bucket_must_hold_a_block_and_the_sentence_has_both_numbers() -> None:
    assert load_config({"num_batched_tokens_buckets": "8,32", "block_size": "32"}, {}).block_size == 32
    with pytest.raises(ConfigurationError, match=r"num_batched_tokens_buckets is 31.*block_size, 32"):
        load_config({"num_batched_tokens_buckets": "8,31", "block_size": "32"}, {})


def test_the_least_values_are_taken() -> None:
    least = {"block_size": 1, "max_model_len": 0, "num_blocks": 0, "num_threads": 0}
    least |= {"max_caller_requests": 0, "max_caller_tokens": 0}
    least |= {"max_waiting_requests": 1, "max_waiting_tokens": 1, "priority_seconds": 0, "max_queue_seconds": 0}
    config = load_config({name: str(value) for name, value in least.items()}, {})
    assert {name: getattr(config, name) for name in least} == least
    assert load_config({"num_blocks": "2"}, {}).num_blocks == 2


# -- limits and buckets ------------------------------------------------------------------------------------------------


def test_a_limit_alone_trims_the_profile_s_list_and_becomes_its_last_bucket() -> None:
    for cap, buckets in (
        ("317", (128, 256, 317)),
        ("512", (128, 256, 512)),
        ("100", (100,)),
        ("2000", (128, 256, 512, 1024, 2000)),
        ("0", (128, 256, 512, 1024)),
    ):
        assert load_config({"max_num_batched_tokens": cap}, {}).num_batched_tokens_buckets == buckets
    config = load_config({"max_num_seqs": "3", "max_num_batched_tokens": "64"}, {})
    assert (config.num_seqs_buckets, config.num_batched_tokens_buckets) == ((1, 2, 3), (64,))


def test_a_limit_that_contradicts_a_given_list_is_refused_with_both_numbers() -> None:
    lists = {"num_batched_tokens_buckets": "128,256,512", "num_seqs_buckets": "4,8"}
    for cap in ("317", "513"):
        with pytest.raises(
            ConfigurationError,
            match=rf"^max_num_batched_tokens is {cap} and .* num_batched_tokens_buckets is 512, .*\.$",
        ):
            load_config({**lists, "max_num_batched_tokens": cap}, {})
    with pytest.raises(ConfigurationError, match=r"^max_num_seqs is 9 and .* num_seqs_buckets is 8, .*\.$"):
        load_config({**lists, "max_num_seqs": "9"}, {})
    config = load_config({**lists, "max_num_seqs": "8", "max_num_batched_tokens": "512"}, {})
    assert (config.num_seqs_buckets, config.num_batched_tokens_buckets) == ((4, 8), (128, 256, 512))


def test_segments_of_prior_kv_have_the_one_size_or_0_when_prefill_is_unsegmented() -> None:
    assert load_config({}, {}).kv_segment_size == 1024
    assert load_config({"profile": "development"}, {}).kv_segment_size == 512
    assert load_config({"kv_segment_size_buckets": "2048"}, {}).kv_segment_size == 2048
    assert load_config({"segmented_prefill": "off"}, {}).kv_segment_size == 0
    with pytest.raises(ConfigurationError, match=r"^kv_segment_size_buckets is \[512, 1024\], 2 sizes, and 1 is .*\.$"):
        load_config({"kv_segment_size_buckets": "512,1024"}, {})


def test_decode_contexts_must_hold_whole_blocks_and_a_given_max_model_len() -> None:
    assert load_config({}, {}).decode_context_length_buckets == ()
    buckets = {"decode_context_length_buckets": "512,1024"}
    assert load_config({**buckets, "max_model_len": "1024"}, {}).decode_context_length_buckets == (512, 1024)
    with pytest.raises(ConfigurationError, match=r"^decode_context_length_buckets has 512, .* block_size, 96; .*\.$"):
        load_config({**buckets, "block_size": "96"}, {})
    with pytest.raises(
        ConfigurationError, match=r"decode_context_length_buckets is 1024, less than max_model_len, 1025"
    ):
        load_config({**buckets, "max_model_len": "1025"}, {})


def test_an_empty_list_is_one_not_given(file: Path) -> None:
    file.write_text("num_seqs_buckets = []")
    for config in (load_config({"num_seqs_buckets": ""}, {}), load_config({"config": str(file)}, {})):
        assert config == load_config({}, {})


def test_a_third_source_of_drafts_is_refused_for_now_and_the_two_that_are_there_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"draft_source is 'eagle', which is not built yet; .*ngram, model"):
        load_config({"draft_source": "eagle"}, {})


def test_a_draft_model_and_its_source_come_together() -> None:
    assert load_config({"draft_source": "model", "draft_model": "synthetic"}, {}).draft_model == "synthetic"
    assert load_config({}, {}).draft_source == "ngram"


# -- to another process ------------------------------------------------------------------------------------------------


def buckets(least: int) -> st.SearchStrategy[tuple[int, ...]]:
    sizes = st.sets(st.integers(least, 1 << 20), min_size=1, max_size=6)
    return sizes.map(lambda chosen: tuple(sorted(chosen)))


free_text = st.text(st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from("-=, '"), max_size=20)
configs = st.builds(
    Config,
    address=free_text,
    engine_address=free_text,
    model=free_text,
    dtype=st.sampled_from(["bfloat16", "float32"]),
    profile=st.sampled_from(sorted(PROFILES)),
    block_size=st.integers(1, 512),
    num_batched_tokens_buckets=buckets(512),
    num_seqs_buckets=buckets(1),
    kv_segment_size_buckets=st.tuples(st.integers(1, 1 << 20)),
    segmented_prefill=st.sampled_from(["on", "off"]),
    num_draft_tokens=st.integers(0, 64),
    max_waiting_tokens=st.integers(1, 1 << 40),
    priority_seconds=st.integers(0, 1 << 20),
    max_queue_seconds=st.integers(0, 1 << 20),
    max_model_len=st.integers(0, 1 << 20),
    kv_cache_bytes=st.integers(0, 1 << 45),
    num_blocks=st.just(0) | st.integers(2, 1 << 20),
    max_waiting_requests=st.integers(1, 1 << 20),
    num_threads=st.integers(0, 512),
    device=st.sampled_from(["auto", "cpu", "neuron"]),
    compile_cache=free_text,
    compile_cache_miss=st.sampled_from(["compile", "fail"]),
    log_level=st.sampled_from(["debug", "info", "warning", "error"]),
)


@given(config=configs)
def test_flags_carry_a_configuration_to_another_process(config: Config) -> None:
    environ = {f"BLOCKPLANE_{name.upper()}": "no such value" for name in NAMES}
    assert load_config(parse(*as_flags(config)), environ) == config


def test_flags_carry_limits_and_decode_contexts_to_another_process() -> None:
    given = {"max_num_seqs": "3", "max_num_batched_tokens": "317", "decode_context_length_buckets": "512"}
    config = load_config(given, {})
    assert load_config(parse(*as_flags(config)), {"BLOCKPLANE_MAX_NUM_SEQS": "7"}) == config


def test_flags_carry_values_that_look_like_flags() -> None:
    config = load_config({"model": "--block-size", "address": "-1"}, {})
    assert load_config(parse(*as_flags(config)), {}) == config
