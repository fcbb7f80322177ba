"""The real worker, each graph of which takes GRAPH_SECONDS of its environment, as on some device. Knows no load.

The graph is computed as always, and waits for the rest of that time, so that the run's pictures show an engine that
waits for its workers, not processes that fight for a laptop's cores.
"""

import os
import sys
import time
from typing import Any

from blockplane.data_plane import __main__ as entry
from blockplane.data_plane.graphs import Graphs
from blockplane.protos.process import run_process

GRAPH_SECONDS = float(os.environ["GRAPH_SECONDS"])


def paced_run(graphs: Graphs, *arguments: Any) -> Any:
    ends = time.perf_counter() + GRAPH_SECONDS
    computed = run(graphs, *arguments)
    time.sleep(max(0.0, ends - time.perf_counter()))
    return computed


run, Graphs.run = Graphs.run, paced_run  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(run_process("worker", "Loads the model and takes its time.", entry.serve))
