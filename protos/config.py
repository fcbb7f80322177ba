"""The one configuration of every process: settings, profiles, and where they are read from; knows no process.

A setting is taken from the first of these that has it: the command line (`--block-size 32`), the environment
(`BLOCKPLANE_BLOCK_SIZE=32`), the TOML file that `--config` or `BLOCKPLANE_CONFIG` names (`block_size = 32`), the
profile, the default.
"""

import argparse
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from blockplane.protos.buckets import check_buckets, check_context_buckets
from blockplane.protos.errors import ConfigurationError


def _setting(default: Any, description: str) -> Any:
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting, each with its default and its line of help."""

    address: str = _setting("127.0.0.1:50051", "where the frontend listens for clients, host:port")
    engine_address: str = _setting("127.0.0.1:50050", "where workers and frontends find the engine, or unix:PATH")
    plaintext: str = _setting("local", "where a port may be without TLS: local (loopback, unix sockets) or anywhere")
    tls_certificate: str = _setting("", "PEM file of this process's certificate; a port that has one speaks TLS")
    tls_key: str = _setting("", "PEM file of that certificate's key")
    tls_ca: str = _setting("", "PEM file of whom to trust when dialling, or system; none = dial in plaintext")
    tls_client_ca: str = _setting("", "PEM file of who must have signed callers' certificates; none = need none")
    tokens: str = _setting("", "file of the tokens that calls here need, a line each: NAME SCOPE,SCOPE TOKEN")
    token: str = _setting("", "file of the token that this process calls others with")
    max_caller_requests: int = _setting(0, "requests that one caller may have open at a frontend; 0 = no limit")
    max_caller_tokens: int = _setting(0, "tokens, prompts and most outputs, of those requests; 0 = no limit")
    reflection: str = _setting("on", "tell callers which services and messages there are: on or off")
    channelz: str = _setting("off", "tell admins of connections and calls by grpc.channelz: on or off")
    metrics_address: str = _setting("", "where this process tells Prometheus of itself, host:port; none = nowhere")
    model: str = _setting("gemma3-270m", "gemma3-270m, a .gguf file, a Hugging Face directory, or synthetic")
    dtype: str = _setting("bfloat16", "weights and activations: bfloat16 or float32")
    quantize: str = _setting("none", "weights of products in few bits: none, int8, or int4 (mixed); on a CPU alone")
    kv_cache_dtype: str = _setting("auto", "KV: auto (as dtype) or fp8_e4m3, with the checkpoint's scales")
    profile: str = _setting("production", "bucket lists: production (several) or development (one each)")
    block_size: int = _setting(16, "tokens per KV block")
    num_batched_tokens_buckets: tuple[int, ...] = _setting(
        (), "prefill tokens a step, ascending; the last is the limit"
    )
    num_seqs_buckets: tuple[int, ...] = _setting((), "decode rows a step, ascending; the last is the limit")
    kv_segment_size_buckets: tuple[int, ...] = _setting(
        (), "tokens of prior KV that a prefill reads at a time; one size"
    )
    decode_context_length_buckets: tuple[int, ...] = _setting(
        (), "tokens of context that a decode step reads, ascending; none = by backend"
    )
    max_num_batched_tokens: int = _setting(0, "prefill tokens a step; 0 = the last bucket, else it becomes the last")
    max_num_seqs: int = _setting(0, "decode rows a step; 0 = the last bucket, else it becomes the last")
    segmented_prefill: str = _setting("on", "on, or off: prompts up to the last prefill bucket, and no prefix caching")
    max_model_len: int = _setting(0, "tokens of prompt and output together; 0 = the model's own limit")
    kv_cache_bytes: int = _setting(2 << 30, "bytes that a worker gives to KV; 0 = what its device can spare")
    num_blocks: int = _setting(0, "KV blocks, the null block included; 0 = as many as the memory holds")
    prefix_caching: str = _setting("on", "share the KV of equal prompt prefixes: on or off; needs segmented_prefill")
    num_draft_tokens: int = _setting(0, "tokens that a step may guess for each decode row; 0 = none")
    draft_source: str = _setting("ngram", "who guesses: ngram (what followed before in the same text) or model")
    draft_model: str = _setting("", "the model that guesses, named as model is; only for draft_source model")
    structured_output: str = _setting("on", "on, or off: workers start seconds sooner and hold no output to a grammar")
    max_waiting_requests: int = _setting(1024, "requests that may wait for a row; more are refused")
    max_waiting_tokens: int = _setting(4_194_304, "tokens in the prompts of waiting requests; more are refused")
    priority_seconds: int = _setting(10, "seconds of waiting that one step of priority counts as")
    max_queue_seconds: int = _setting(60, "seconds that accepted requests wait while no worker is ready")
    worker_timeout_seconds: int = _setting(5, "seconds without a sign of life after which a worker counts as lost")
    step_timeout_seconds: int = _setting(30, "seconds that any step may take; slow ones raise it by what is learnt")
    reattach_seconds: int = _setting(60, "seconds in which a worker that lost its stream finds its cached blocks again")
    drain_seconds: int = _setting(30, "seconds that a process told to stop gives its requests to end or move")
    stream_buffer_tokens: int = _setting(4096, "tokens kept for a client that reads slowly; then its request is parked")
    parked_seconds: int = _setting(60, "seconds that a parked request waits for its client")
    journal: str = _setting("", "file of the engine's journal, from which requests outlive it; none = no journal")
    journal_seconds: int = _setting(3600, "seconds that the journal keeps ended requests")
    record: str = _setting("", "file in which a worker records plans and results, for `blockplane replay`")
    tensor_parallel_size: int = _setting(1, "ranks of each worker group, among which the model is divided")
    context_parallel_size: int = _setting(1, "of those, ranks that share the positions of the same heads' KV")
    rendezvous_seconds: int = _setting(60, "seconds that ranks wait for the others of their group")
    group: str = _setting("", "name of the worker group that a worker is a rank of; none = it is a group alone")
    rank: int = _setting(0, "which rank of its group a worker is, from 0 on")
    rendezvous_host: str = _setting("", "host by which other ranks reach this one; none = as it reaches the engine")
    max_imbalance_percent: int = _setting(20, "how far above the mean a group's load may go for a cached prefix")
    role: str = _setting("both", "what a worker is for: both, prefill (then others go on) or decode")
    transfer_address: str = _setting("", "where a worker lets others read its KV blocks, host:port; none = nowhere")
    transport: str = _setting("auto", "how workers read each other's blocks: auto or grpc; nixl is not built yet")
    transfer_seconds: int = _setting(30, "seconds that moving a request's blocks may take; then they are computed anew")
    num_threads: int = _setting(0, "threads of a CPU worker; 0 = one for each core it may use")
    device: str = _setting("auto", "where a worker computes: cpu, neuron, or auto (neuron if it is there)")
    compile_cache: str = _setting("", "folder of graphs, of a device that compiles them; none = ~/.cache/blockplane")
    compile_cache_miss: str = _setting("compile", "what to do about a graph that is not there: compile, or fail")
    log_level: str = _setting("info", "debug, info, warning or error")

    @property
    def group_block_size(self) -> int:
        """Tokens per KV block of a whole worker group: of each, every rank of a context-parallel group keeps a part."""
        return self.block_size * self.context_parallel_size

    @property
    def kv_segment_size(self) -> int:
        """Tokens of prior KV that a prefill reads at a time; 0 = unsegmented (seed 001, "Attention Metadata")."""
        return self.kv_segment_size_buckets[0] if self.segmented_prefill == "on" else 0


PROFILES: Mapping[str, Mapping[str, Any]] = {
    # One bucket each: the fastest start where every bucket is a compilation (seed 000, "Trade-off").
    "development": {
        "num_batched_tokens_buckets": (512,),
        "num_seqs_buckets": (8,),
        "kv_segment_size_buckets": (512,),
    },
    "production": {
        "num_batched_tokens_buckets": (128, 256, 512, 1024),
        "num_seqs_buckets": (1, 2, 4, 8, 16, 32, 64),
        "kv_segment_size_buckets": (1024,),
    },
}


def add_settings(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Give `parser` one flag per setting and `--config`; what is not given stays out of the namespace.

    `names` are the settings to offer; None = all.
    """
    group = parser.add_argument_group("settings")
    group.add_argument("--config", metavar="FILE", help="a TOML file of settings", default=argparse.SUPPRESS)
    for setting in fields(Config):
        if names is not None and setting.name not in names:
            continue
        shown = (
            setting.default
            if setting.default not in ((), "")
            else "by profile"
            if setting.name in _BY_PROFILE
            else "none"
        )
        group.add_argument(
            f"--{setting.name.replace('_', '-')}",
            metavar="VALUE",
            help=f"{setting.metadata['help']} (default {shown})",
            default=argparse.SUPPRESS,
        )


def load_config(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, defaults: Config | None = None
) -> Config:
    """Merge command line, environment, file, profile and defaults, and check what can be checked without a model.

    `defaults` stand where nothing else is given; None = those of Config.

    Raises:
        ConfigurationError: an unknown setting, a value that is no such thing, or a contradiction.
    """
    prefix = "BLOCKPLANE_"
    names = [setting.name for setting in fields(Config)]
    from_environ = {name: environ[prefix + name.upper()] for name in names if prefix + name.upper() in environ}
    file = flags.get("config", environ.get(prefix + "CONFIG"))
    given = {
        **(_read_file(Path(file)) if file else {}),
        **from_environ,
        **{name: flags[name] for name in names if name in flags},
    }
    config = replace(defaults or _DEFAULTS, **{name: _parse(name, value) for name, value in given.items()})
    if config.profile not in PROFILES:
        raise ConfigurationError(f"profile is {config.profile!r}; choose one of {', '.join(PROFILES)}.")
    unset = {name: value for name, value in PROFILES[config.profile].items() if getattr(config, name) == ()}
    for limit, name in _LIMITED.items():
        if name in unset and (cap := getattr(config, limit)):
            unset[name] = (*(bucket for bucket in unset[name] if bucket < cap), cap)
    config = replace(config, **unset)
    _check(config)
    return config


def as_flags(config: Config) -> list[str]:
    """The command line that gives another process this very configuration."""
    return [_as_flag(setting.name, getattr(config, setting.name)) for setting in fields(Config)]


def _as_flag(name: str, value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    # One word, not two: a value may begin with a dash.
    return f"--{name.replace('_', '-')}={text}"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration file {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}.") from error
    unknown = values.keys() - {setting.name for setting in fields(Config)}
    if unknown:
        raise ConfigurationError(f"{path} sets {', '.join(sorted(unknown))}, which is no setting; remove or rename it.")
    return values


def _parse(name: str, value: Any) -> Any:
    """Turn a flag's, variable's or file's value into the type of the setting's default; an empty list is none given."""
    kind = type(getattr(_DEFAULTS, name))
    try:
        if kind is tuple:
            return tuple(map(_whole_number, value.split(",") if isinstance(value, str) and value else value))
        if kind is int:
            return _whole_number(value)
    except (TypeError, ValueError):
        wanted = "whole numbers, such as 1,2,4" if kind is tuple else "a whole number"
        raise ConfigurationError(f"{name} is {value!r}; give {wanted}.") from None
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} is {value!r}; give a text in quotes.")
    return value


def _whole_number(value: Any) -> int:
    """Read a number; only texts are converted, since int() would cut a file's 1.5 to 1."""
    if type(value) not in (int, str):
        raise TypeError
    return int(value)


def _check(config: Config) -> None:
    _check_drafts(config)
    _check_tls(config)
    _check_port("metrics_address", config.metrics_address)
    _check_port("transfer_address", config.transfer_address)
    _check_ranks(config)
    for name, least in _LEAST.items():
        if getattr(config, name) < least:
            raise ConfigurationError(f"{name} is {getattr(config, name)}; give at least {least}.")
    if config.num_blocks == 1:
        raise ConfigurationError("num_blocks is 1, and block 0 is never used; give at least 2, or 0 for all that fit.")
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ConfigurationError(f"{name} is {getattr(config, name)!r}; choose one of {', '.join(choices)}.")
    _check_bucket_lists(config)


def _check_drafts(config: Config) -> None:
    if config.draft_source == "eagle":
        raise ConfigurationError("draft_source is 'eagle', which is not built yet; choose one of ngram, model.")
    if config.draft_source == "model" and not config.draft_model:
        raise ConfigurationError(
            "draft_source is 'model' and draft_model is empty; name a model of the same vocabulary."
        )
    if config.draft_source != "model" and config.draft_model:
        raise ConfigurationError(
            f"draft_model is {config.draft_model!r} and draft_source is {config.draft_source!r}, which needs none; set"
            " draft_source to model, or leave draft_model out."
        )


def _check_tls(config: Config) -> None:
    if bool(config.tls_certificate) != bool(config.tls_key):
        raise ConfigurationError("tls_certificate and tls_key go together; give both, or neither.")
    if config.tls_client_ca and not config.tls_certificate:
        raise ConfigurationError(
            "tls_client_ca asks callers for certificates and has none to show; set tls_certificate."
        )


def _check_port(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if address and not (host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigurationError(f"{name} is {address!r}; give host:port, such as 127.0.0.1:50052.")


def _check_ranks(config: Config) -> None:
    if config.context_parallel_size and config.tensor_parallel_size % config.context_parallel_size:
        raise ConfigurationError(
            f"context_parallel_size is {config.context_parallel_size} and does not divide tensor_parallel_size,"
            f" {config.tensor_parallel_size}: choose one that does."
        )
    if config.rank and not config.group:
        raise ConfigurationError(f"rank is {config.rank} and group is empty; name the group that the ranks make.")


def _check_bucket_lists(config: Config) -> None:
    """What no backend lifts; the rest is asked when a worker attaches, which knows its backend and its model."""
    check_buckets("num_batched_tokens_buckets", config.num_batched_tokens_buckets)
    check_buckets("num_seqs_buckets", config.num_seqs_buckets)
    check_buckets("kv_segment_size_buckets", config.kv_segment_size_buckets)
    if config.decode_context_length_buckets:
        check_context_buckets(config.decode_context_length_buckets, config.block_size, config.max_model_len)
    for limit, name in _LIMITED.items():
        cap, last = getattr(config, limit), getattr(config, name)[-1]
        if cap and cap != last:
            raise ConfigurationError(
                f"{limit} is {cap} and the last of {name} is {last}, and both are the same limit; make them equal, or"
                " give only one of the settings."
            )
    if len(config.kv_segment_size_buckets) > 1:
        raise ConfigurationError(
            f"kv_segment_size_buckets is {list(config.kv_segment_size_buckets)}, {len(config.kv_segment_size_buckets)}"
            " sizes, and 1 is supported; give one size, such as 1024."
        )
    if config.num_batched_tokens_buckets[-1] < config.block_size:
        raise ConfigurationError(
            f"the last of num_batched_tokens_buckets is {config.num_batched_tokens_buckets[-1]}, less than block_size,"
            f" {config.block_size}: no prefill segment could fill a block; raise the first or lower the second."
        )


_DEFAULTS = Config()
_BY_PROFILE = frozenset().union(*PROFILES.values())
_LIMITED = {"max_num_batched_tokens": "num_batched_tokens_buckets", "max_num_seqs": "num_seqs_buckets"}
"""Each limit, and the list whose last bucket it is."""
_LEAST = {
    "block_size": 1,
    "max_model_len": 0,
    "kv_cache_bytes": 0,
    "num_blocks": 0,
    "num_draft_tokens": 0,
    "max_num_batched_tokens": 0,
    "max_num_seqs": 0,
    "max_caller_requests": 0,
    "max_caller_tokens": 0,
    "max_waiting_requests": 1,
    "max_waiting_tokens": 1,
    "priority_seconds": 0,
    "max_queue_seconds": 0,
    "worker_timeout_seconds": 1,
    "step_timeout_seconds": 1,
    "reattach_seconds": 0,
    "drain_seconds": 0,
    "stream_buffer_tokens": 1,
    "parked_seconds": 0,
    "journal_seconds": 0,
    "num_threads": 0,
    "tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "rendezvous_seconds": 1,
    "rank": 0,
    "max_imbalance_percent": 0,
    "transfer_seconds": 1,
}
_CHOICES = {
    "dtype": ("bfloat16", "float32"),
    "quantize": ("none", "int8", "int4"),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
    "segmented_prefill": ("on", "off"),
    "prefix_caching": ("on", "off"),
    "draft_source": ("ngram", "model"),
    "structured_output": ("on", "off"),
    "plaintext": ("local", "anywhere"),
    "reflection": ("on", "off"),
    "channelz": ("on", "off"),
    "device": ("auto", "cpu", "neuron"),
    "compile_cache_miss": ("compile", "fail"),
    "role": ("both", "prefill", "decode"),
    "transport": ("auto", "grpc", "nixl"),
    "log_level": ("debug", "info", "warning", "error"),
}
