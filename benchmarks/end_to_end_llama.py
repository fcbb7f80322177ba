"""Serves requests from standard input with an installed llama-cpp-python; knows nothing of Blockplane.

    PYTHON end_to_end_llama.py FILE.gguf NUM_THREADS

Run by the python of an environment that has llama-cpp-python, whose in-process API decodes one sequence at a time.
end_to_end_peers.py says what the lines mean. Ends with its input.
"""

import itertools
import json
import os
import sys
from typing import Any

import llama_cpp
from llama_cpp import Llama

CONTEXT_TOKENS = 9216


def main() -> None:
    # What llama.cpp prints is none of the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    path, num_threads = sys.argv[1], int(sys.argv[2])
    threads = {"n_threads": num_threads, "n_threads_batch": num_threads}
    llama = Llama(path, n_ctx=CONTEXT_TOKENS, n_batch=512, verbose=False, **threads)
    say(answers, {"ready": f"llama-cpp-python {llama_cpp.__version__}"})
    for line in sys.stdin:
        request = json.loads(line)
        if "reset" in request:
            llama.reset()
            say(answers, {"reset": True})
        else:
            generate(llama, request, answers)


def generate(llama: Llama, request: dict[str, Any], answers: Any) -> None:
    # Each request computes its whole prompt: nothing of the one before is kept.
    llama.reset()
    tokens = llama.generate(
        request["prompt"], top_k=request["top_k"], top_p=request["top_p"], min_p=0.0, temp=request["temperature"]
    )
    for token_id in itertools.islice(tokens, request["max_tokens"]):
        say(answers, {"id": request["id"], "token_ids": [token_id]})
    say(answers, {"id": request["id"], "num_cached_tokens": 0})


def say(answers: Any, line: dict[str, Any]) -> None:
    answers.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
