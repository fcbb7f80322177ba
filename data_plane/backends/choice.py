"""Which backend a worker has: the one that the setting `device` names, or the best that this machine offers."""

from dataclasses import replace

from blockplane.data_plane.backends import neuron_torch
from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.backends.cpu import CPU
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError


def chosen_backend(config: Config) -> Backend:
    """`auto` = NeuronCores where there are some and torch can use them, else the CPU.

    Raises:
        ConfigurationError: the device is not there, or its software is not.
    """
    if config.device == "cpu":
        return CPU
    if config.device == "auto" and not neuron_torch.is_there():
        return CPU
    # Only here: it loads torch's compiler.
    from blockplane.data_plane.backends.neuron import neuron_backend

    return neuron_backend(config)


def building_backend(config: Config) -> Backend:
    """The one that compiles graphs for `device`, whether or not that is in this machine.

    Raises:
        ConfigurationError: nothing is compiled for that device, or not here.
    """
    if config.device == "cpu":
        raise ConfigurationError("device is cpu, for which nothing is compiled; choose device neuron.")
    from blockplane.data_plane.backends.neuron import host_backend, neuron_backend

    if neuron_torch.has_neuron_core():
        return neuron_backend(replace(config, compile_cache_miss="compile"))
    return host_backend(config)
