"""What quantized weights cost in accuracy and spare in memory and time, beside bfloat16 and in the same run.

    python benchmarks/quantization.py [--quick] [--json FILE] [--model gemma3-270m]

Accuracy: over benchmarks/workloads/prose.txt, the cross entropy of each next token in nats; how far the distributions
are from those in float32, as the mean Kullback-Leibler divergence in nats; and how often the likeliest token is the
same. The text goes through the model a few tokens at a time, so that the products are those of a decode.

Speed: decode steps of one row behind 512 tokens, greedy, model alone; the settings in turns, and ratios to bfloat16.
end_to_end.py --quantize measures it as a service, next to llama.cpp.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from driven_model import SEGMENT_SIZE, DrivenModel
from tokenizers import Tokenizer
from torch import Tensor

from blockplane.data_plane.loading.build import load_weights
from blockplane.data_plane.loading.checkpoint import DEMO_MODEL, Checkpoint, open_checkpoint
from blockplane.data_plane.models.config import ModelConfig
from blockplane.data_plane.models.quantized import WIDTHS
from blockplane.data_plane.models.transformer import Transformer
from blockplane.data_plane.models.weights import DecoderWeights
from blockplane.kernels.native import library as native
from blockplane.kernels.quantization import GROUP, Bits
from blockplane.protos.threads import num_usable_cores

PROSE = Path(__file__).parent / "workloads" / "prose.txt"
TEXT_TOKENS, QUICK_TEXT_TOKENS = 4096, 256
# Tokens that go through a model at once, and whose logits are compared at once.
PIECE, COMPARED = 8, 64
CONTEXT = 512
# Of a setting's steps in a turn, the first ones bring its weights into whatever cache there is.
TURN_STEPS, COLD_STEPS = 12, 2
NUM_TURNS, QUICK_NUM_TURNS = 10, 3


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one setting. `ratio`: its step's time over that in bfloat16, the median of turns."""

    setting: str
    weight_bytes: int
    num_tokens: int
    cross_entropy: float
    divergence: float
    agreement: float
    step_milliseconds: float
    ratio: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less text and fewer turns: under 40 s")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here too")
    parser.add_argument("--model", default=DEMO_MODEL)
    flags = parser.parse_args()
    torch.set_num_threads(num_usable_cores())
    native.set_num_threads(num_usable_cores())
    num_tokens, num_turns = (QUICK_TEXT_TOKENS, QUICK_NUM_TURNS) if flags.quick else (TEXT_TOKENS, NUM_TURNS)
    figures = measure(open_checkpoint(flags.model), num_tokens, num_turns)
    print(f"{figures[0].num_tokens} tokens, {num_usable_cores()} threads, kernels: {native.is_there()}")
    print("setting       MB  cross entropy  divergence  agreement  step ms  ratio")
    for f in figures:
        accuracy = f"{f.cross_entropy:15.4f} {f.divergence:11.5f} {f.agreement:10.1%}"
        print(f"{f.setting:10} {f.weight_bytes / 1e6:5.0f}{accuracy} {f.step_milliseconds:8.2f} {f.ratio:6.3f}")
    if flags.json:
        flags.json.write_text(json.dumps([asdict(f) for f in figures], indent=1) + "\n")
    return 0


@torch.inference_mode()
def measure(checkpoint: Checkpoint, num_tokens: int, num_turns: int) -> list[Figures]:
    """Of every choice of the setting `quantize`, in bfloat16."""
    token_ids = tokens_of(checkpoint, num_tokens)
    weights = load_weights(checkpoint, "float32")
    rounded = DecoderWeights(checkpoint.config, torch.bfloat16)
    for (_, source), (_, target) in zip(weights.named_tensors(), rounded.named_tensors(), strict=True):
        target.copy_(source)
    max_tokens = max(len(token_ids), CONTEXT + 1)
    models = {
        setting: DrivenModel(Transformer(checkpoint.config, rounded, max_tokens, quantize=setting), max_tokens)
        for setting in WIDTHS
    }
    exact = DrivenModel(Transformer(checkpoint.config, weights, max_tokens), max_tokens)
    times = step_times(models, token_ids, num_turns)
    accuracies = compare(exact, models, token_ids)
    return [
        Figures(
            "bfloat16" if setting == "none" else setting,
            weight_bytes(checkpoint.config, setting),
            len(token_ids),
            *accuracies[setting],
            step_milliseconds=statistics.median(times[setting]),
            ratio=statistics.median(own / base for own, base in zip(times[setting], times["none"], strict=True)),
        )
        for setting in models
    ]


def tokens_of(checkpoint: Checkpoint, most: int) -> list[int]:
    """The first tokens of the text, behind the one that the model wants before any."""
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json.decode())
    first = [] if checkpoint.bos_token_id is None else [checkpoint.bos_token_id]
    text = tokenizer.encode(PROSE.read_text(encoding="utf-8"), add_special_tokens=False)
    return (first + text.ids)[:most]


def weight_bytes(config: ModelConfig, setting: str) -> int:
    """Of all that products read, and of the embeddings."""
    weights, widths = DecoderWeights(config, torch.bfloat16, torch.device("meta")), WIDTHS[setting]
    sensitive = [weights.embeddings, *(layer.qkv for layer in weights.layers)]
    if weights.output is not weights.embeddings:
        sensitive.append(weights.output)
    others = [weight for layer in weights.layers for weight in (layer.output, layer.gate_up, layer.down)]
    own = sum(bytes_in(widths.sensitive, weight) for weight in sensitive)
    return own + sum(bytes_in(widths.others, weight) for weight in others)


def bytes_in(bits: Bits | None, weight: Tensor) -> int:
    """Of a weight whose numbers have so many bits; a group has a scale, and of 4 bits a minimum, too."""
    if bits is None:
        return weight.nbytes
    return weight.numel() * bits // 8 + weight.numel() // GROUP * (2 if bits == 8 else 4)


def compare(exact: DrivenModel, models: dict[str, DrivenModel], token_ids: Sequence[int]) -> dict[str, list[float]]:
    """Of each model its cross entropy, its divergence from the exact one, and the share of equal likeliest tokens."""
    expected = hidden_states(exact, token_ids, SEGMENT_SIZE)
    hidden = {setting: hidden_states(driven, token_ids, PIECE) for setting, driven in models.items()}
    sums = {setting: torch.zeros(3, dtype=torch.float64) for setting in models}
    # What comes behind the last token is not known.
    for start in range(0, len(token_ids) - 1, COMPARED):
        stop = min(start + COMPARED, len(token_ids) - 1)
        following = torch.tensor(token_ids[start + 1 : stop + 1])
        truth = exact.model.logits(expected[start:stop]).log_softmax(-1)
        for setting, driven in models.items():
            pieces = torch.split(hidden[setting][start:stop], PIECE)
            own = torch.cat([driven.model.logits(piece) for piece in pieces]).log_softmax(-1)
            entropy = -own.gather(1, following[:, None]).sum()
            divergence = torch.nn.functional.kl_div(own, truth, reduction="sum", log_target=True)
            agreement = (own.argmax(-1) == truth.argmax(-1)).sum()
            sums[setting] += torch.stack((entropy, divergence, agreement)).double()
    return {setting: (total / (len(token_ids) - 1)).tolist() for setting, total in sums.items()}


def hidden_states(driven: DrivenModel, token_ids: Sequence[int], piece: int) -> Tensor:
    """[num_tokens, hidden_size], computed so many tokens at a time."""
    starts = range(0, len(token_ids), piece)
    return torch.cat([driven.prefill(token_ids[start : start + piece], start) for start in starts])


def step_times(models: dict[str, DrivenModel], token_ids: Sequence[int], num_turns: int) -> dict[str, list[float]]:
    """Of each model the milliseconds of a decode step, the median of each turn."""
    prompt = (list(token_ids) * (CONTEXT // len(token_ids) + 1))[:CONTEXT]
    for driven in models.values():
        driven.prefill(prompt)
    times: dict[str, list[float]] = {setting: [] for setting in models}
    for _ in range(num_turns):
        for setting, driven in models.items():
            steps = list(step_milliseconds(driven, prompt[0]))
            times[setting].append(statistics.median(steps[COLD_STEPS:]))
    return times


def step_milliseconds(driven: DrivenModel, token_id: int) -> Iterator[float]:
    for _ in range(TURN_STEPS):
        started = time.perf_counter()
        hidden = driven.decode(token_id, CONTEXT)
        if driven.model.greedy_tokens(hidden) is None:
            driven.model.logits(hidden).argmax(-1)
        yield 1e3 * (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
