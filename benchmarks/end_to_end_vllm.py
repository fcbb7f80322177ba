"""Serves requests from standard input with an installed vLLM, as end_to_end.py asks; knows nothing of Blockplane.

    PYTHON end_to_end_vllm.py MODEL_FOLDER

Run by the python of an environment that has vLLM: its AsyncLLM, whose engine core is a process of its own, driven with
token ids and without HTTP, which favours it. end_to_end_peers.py says what the lines mean. Ends with its input.
"""

import asyncio
import json
import os
import sys
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "block_size": 128,
    "enable_prefix_caching": True,
    "async_scheduling": False,
}
LONGEST_LINE = 1 << 24


def main() -> None:
    # What vLLM prints is none of the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asyncio.run(serve(sys.argv[1], answers))


async def serve(model: str, answers: Any) -> None:
    def answer(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")

    arguments = AsyncEngineArgs(model=model, skip_tokenizer_init=True, disable_log_stats=True, **SETTINGS)
    engine = AsyncLLM.from_engine_args(arguments)
    running: set[asyncio.Task[None]] = set()
    try:
        lines = asyncio.StreamReader(limit=LONGEST_LINE)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        answer({"ready": f"vLLM {vllm.__version__}"})
        while line := await lines.readline():
            request = json.loads(line)
            if "reset" in request:
                await engine.reset_prefix_cache()
                answer({"reset": True})
                continue
            task = asyncio.create_task(generate(engine, request, answer))
            running.add(task)
            task.add_done_callback(running.discard)
    finally:
        engine.shutdown()


async def generate(engine: AsyncLLM, request: dict[str, Any], answer: Any) -> None:
    params = SamplingParams(
        max_tokens=request["max_tokens"],
        temperature=request["temperature"],
        top_k=request["top_k"],
        top_p=request["top_p"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    num_cached = 0
    async for output in engine.generate({"prompt_token_ids": request["prompt"]}, params, request["id"]):
        num_cached = output.num_cached_tokens or num_cached
        answer({"id": request["id"], "token_ids": list(output.outputs[0].token_ids)})
    answer({"id": request["id"], "num_cached_tokens": num_cached})


if __name__ == "__main__":
    main()
