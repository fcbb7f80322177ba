"""`blockplane builder`: compiles every graph that an engine configures, for workers to find. Serves nobody."""

import sys

import torch

from blockplane.data_plane.backends.choice import building_backend
from blockplane.data_plane.loaded_worker import loaded_worker
from blockplane.protos.access import access_of
from blockplane.protos.config import Config
from blockplane.protos.process import run_process
from blockplane.protos.threads import num_usable_cores


def serve(config: Config) -> None:
    """Attach as a worker would, build, and leave.

    Raises:
        ConfigurationError: nothing can be compiled here, or not for these settings.
    """
    torch.set_num_threads(config.num_threads or num_usable_cores())
    backend = building_backend(config)
    loaded_worker(config, backend, serves=False).serve(config.engine_address, access_of(config))
    if backend.finish_builds is not None:
        backend.finish_builds()


if __name__ == "__main__":
    sys.exit(run_process("builder", "Compiles every graph that the engine configures, and ends.", serve))
