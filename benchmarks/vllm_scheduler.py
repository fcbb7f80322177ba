"""Times the scheduler of an installed vLLM, alone, as benchmarks/control_plane.py asks; knows nothing of Blockplane.

Run by the python of an environment that has vLLM. Reads one JSON request a line from standard input and answers each
with one JSON line; control_plane.py says what the requests mean. Needs no model: a stand-in has the few fields of a
model's configuration that the scheduler reads.
"""

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
# No scheduler needs them, and they are often built for another torch than vLLM's, which stops its import.
sys.modules.update(dict.fromkeys(("torchvision", "torchaudio", "torchcodec")))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.config import CacheConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.gc_utils import freeze_gc_heap  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402


class Peer:
    """One vLLM scheduler under one load; steps and admissions in CPU microseconds."""

    def __init__(self, load: dict[str, Any]) -> None:
        self.load = load
        self.random = np.random.default_rng(0)
        self.names = itertools.count()
        config = make_config(load)
        self.scheduler = make_scheduler(config, load["windows"])
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(load["block_size"], hash_function)
        freeze_gc_heap()  # as its engine does before it serves
        for _ in range(load["num_fillers"]):
            self.admission(self.prompt(load["filler_length"]))
        for num_tokens in load["prompt_lengths"]:
            self.scheduler.add_request(self.request(self.prompt(num_tokens), load["max_model_len"]))
        while self.scheduler.waiting:
            self.step()
        for _ in range(load["num_warm_up_steps"]):
            self.step()

    def prompt(self, num_tokens: int) -> list[int]:
        return self.random.integers(self.load["vocab_size"], size=num_tokens).tolist()

    def request(self, token_ids: list[int], max_tokens: int, *, is_hashed: bool = True) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        hasher = self.hasher if is_hashed else None
        return Request(f"request-{next(self.names)}", token_ids, params, None, block_hasher=hasher)

    def step(self) -> float:
        """Schedule, and take the answer. Returns microseconds; making the answer is the worker's work."""
        schedule, plan = timed(self.scheduler.schedule)
        answer = self.answer(plan)
        update, _ = timed(lambda: self.scheduler.update_from_output(plan, answer))
        return schedule + update

    def answer(self, plan: Any) -> ModelRunnerOutput:
        """A random token for each request whose last known token the plan computes."""
        names = list(plan.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        token_ids = [
            [token_id] if request.num_computed_tokens >= request.num_tokens else []
            for token_id, request in zip(self.prompt(len(names)), requests, strict=True)
        ]
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, token_ids)

    def decode(self, num_steps: int) -> list[float]:
        return [self.step() for _ in range(num_steps)]

    def admit(self, num_tokens: int) -> dict[str, float]:
        """A prompt that is new, the same once it is cached, and of the latter its hashing and its lookup alone."""
        prompt = self.prompt(num_tokens)
        cold, cached = self.admission(prompt), self.admission(prompt)
        request = self.request(prompt, 1, is_hashed=False)
        hashing, request.block_hashes = timed(lambda: self.hasher(request))
        lookup, (_, num_cached, *_) = timed(lambda: self.scheduler.kv_cache_manager.get_computed_blocks(request))
        assert num_cached >= num_tokens - self.load["block_size"], num_cached
        return {"cold": cold, "cached": cached, "hashing": hashing, "lookup": lookup}

    def admission(self, prompt: list[int]) -> float:
        def admit() -> Any:
            self.scheduler.add_request(self.request(prompt, max_tokens=1))
            return self.scheduler.schedule()

        microseconds, plan = timed(admit)
        self.scheduler.update_from_output(plan, self.answer(plan))
        assert not self.scheduler.requests, "the prompt was not computed in one step"
        return microseconds


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """A call's microseconds on this thread, and what it returned."""
    started = time.thread_time_ns()
    result = function()
    return (time.thread_time_ns() - started) / 1000, result


def make_config(load: dict[str, Any]) -> VllmConfig:
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=load["max_num_seqs"],
            max_num_batched_tokens=load["max_num_batched_tokens"],
            max_model_len=load["max_model_len"],
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(
            block_size=load["block_size"], enable_prefix_caching=True, num_gpu_blocks_override=load["num_blocks"]
        ),
    )
    config.cache_config.kv_cache_layout = "LBNHC"
    config.model_config = SimpleNamespace(
        max_model_len=load["max_model_len"],
        original_max_model_len=load["max_model_len"],
        runner_type="generate",
        skip_tokenizer_init=True,
        multimodal_config=None,
        uses_mrope=False,
        is_encoder_decoder=False,
        is_diffusion=False,
        supports_multimodal_inputs=False,
        return_sampling_mask=False,
    )
    return config


def make_scheduler(config: VllmConfig, windows: list[int | None]) -> Scheduler:
    """A scheduler of the KV groups that vLLM itself makes of layers of these sliding windows; None = full attention."""
    shape: dict[str, Any] = {
        "block_size": config.cache_config.block_size,
        "num_kv_heads": 1,
        "head_size": 256,
        "dtype": torch.bfloat16,
    }
    register_all_kvcache_specs(config)
    specs: dict[str, KVCacheSpec] = {
        f"layers.{index}": FullAttentionSpec(**shape)
        if window is None
        else SlidingWindowSpec(**shape, sliding_window=window)
        for index, window in enumerate(windows)
    }
    kv_cache_config = generate_scheduler_kv_cache_config(get_kv_cache_configs(config, [specs], [1 << 50]))
    config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )


def main() -> None:
    # What vLLM prints is none of the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"version": vllm.__version__}), file=answers)
    peer: Peer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if "load" in request:
            peer = None
            gc.collect()
            peer = Peer(request["load"])
            answer: Any = {"num_groups": len(peer.scheduler.kv_cache_config.kv_cache_groups)}
        elif "decode" in request:
            answer = peer.decode(request["decode"])
        else:
            answer = peer.admit(request["admit"])
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
