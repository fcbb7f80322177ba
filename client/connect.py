"""From settings to a client of the frontend or the engine that they name; knows no request."""

from collections.abc import Mapping
from typing import Any

from blockplane.client.admin import Admin
from blockplane.client.async_client import AsyncClient
from blockplane.client.client import Client
from blockplane.protos.access import access_of
from blockplane.protos.config import Config, load_config

_SETTINGS = ("tls_ca", "tls_certificate", "tls_key", "token", "plaintext")

SETTINGS = ("address", *_SETTINGS)
"""Those that have to do with calling a frontend."""

ENGINE_SETTINGS = ("engine_address", *_SETTINGS)
"""Those that have to do with calling an engine."""


def connect(flags: Mapping[str, Any]) -> Client:
    """Raises ConfigurationError as `load_config` and `Access` do."""
    config = settings_of(flags)
    return Client(config.address, access=access_of(config))


def connect_in_loop(flags: Mapping[str, Any]) -> AsyncClient:
    """The same for the event loop that runs."""
    config = settings_of(flags)
    return AsyncClient(config.address, access=access_of(config))


def connect_engine(flags: Mapping[str, Any]) -> Admin:
    """An operator's client of the engine. Raises as `connect` does."""
    config = settings_of(flags)
    return Admin(config.engine_address, access_of(config))


def settings_of(flags: Mapping[str, Any]) -> Config:
    """The settings that have to do with calling. Raises ConfigurationError as `load_config` does."""
    # A flag that is an argument of a request may have a setting's name.
    return load_config({name: flags[name] for name in (*SETTINGS, "engine_address", "config") if name in flags})
