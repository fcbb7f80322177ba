"""A rank's model is one graph for a compiler, with the group's collectives in it. Never compiled for an accelerator."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_llama import LLAMA
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from blockplane.data_plane.models.transformer import Transformer
from blockplane.data_plane.models.weights import DecoderWeights
from blockplane.data_plane.ranks.process_groups import DeviceGroup
from blockplane.kernels.slots import ALONE as WHOLE_CONTEXT


class FakeRanks(DeviceGroup):
    """The second of two ranks, whose collectives a compiler sees as on a device, and which nobody answers."""

    rank, world_size, context_parallel = 1, 2, WHOLE_CONTEXT

    def __init__(self) -> None:
        super().__init__("fake", FakeStore(), self.rank, self.world_size, 1)


@pytest.fixture
def ranks() -> Iterator[FakeRanks]:
    torch._dynamo.reset()
    ranks = FakeRanks()
    yield ranks
    ranks.leave()


def collectives(compute: Callable[..., Tensor], *inputs: Tensor) -> tuple[Counter[str], Tensor]:
    """Those in the one graph that `compute` is, and what it gives."""
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(module.graph)
        return module.forward

    with torch.inference_mode():
        output = torch.compile(compute, fullgraph=True, backend=keep)(*inputs)
    (graph,) = graphs
    names = (str(node.target) for node in graph.nodes if node.op == "call_function")
    return Counter(name for name in names if "c10d" in name and "wait" not in name), output


def test_a_graph_holds_the_sums_and_the_gathering_of_its_rank(ranks):
    weights = DecoderWeights(LLAMA, torch.float32, ranks=ranks)
    for _, tensor in weights.named_tensors():
        tensor.fill_(0.1)
    model = Transformer(LLAMA, weights, ranks=ranks)
    for layer in model._layers:
        # Kernels are each backend's own matter.
        layer.attention = lambda query, key, value, batches: query
    token_ids = torch.arange(5)
    of_forward, hidden = collectives(lambda ids, positions: model.forward(ids, positions, ()), token_ids, token_ids)
    # Of the embeddings, and of each layer's attention and MLP.
    assert of_forward == {"_c10d_functional.all_reduce": 1 + 2 * len(LLAMA.layers)}
    assert hidden.shape == (5, LLAMA.hidden_size)
    of_logits, logits = collectives(lambda rows: model.logits(rows), hidden[:3])
    assert of_logits == {"_c10d_functional.all_gather_into_tensor": 1}
    assert logits.shape == (3, LLAMA.vocab_size)


def test_a_graph_of_a_model_alone_holds_no_collective():
    torch._dynamo.reset()
    weights = DecoderWeights(LLAMA, torch.float32)
    for _, tensor in weights.named_tensors():
        tensor.fill_(0.1)
    model = Transformer(LLAMA, weights)
    of_logits, _ = collectives(lambda rows: model.logits(rows), torch.ones(3, LLAMA.hidden_size))
    assert not of_logits
