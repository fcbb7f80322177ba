"""What `kubectl kustomize` makes of deploy/kubernetes, as far as its files go: resources and JSON patches; no test."""

from pathlib import Path
from typing import Any, TypeAlias

import yaml

Manifest: TypeAlias = dict[str, Any]


def rendered(folder: Path, *components: Path) -> list[Manifest]:
    """The resources of a kustomization, patched by it and then by each of the components."""
    resources = list[Manifest]()
    for kustomization in (folder, *components):
        told = yaml.safe_load((kustomization / "kustomization.yaml").read_text())
        for name in told.get("resources", ()):
            path = kustomization / name
            resources += rendered(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
        for patch in told.get("patches", ()):
            _patch(resources, patch)
    return resources


def _patch(resources: list[Manifest], patch: Manifest) -> None:
    kind, name = patch["target"]["kind"], patch["target"]["name"]
    (target,) = (each for each in resources if (each["kind"], each["metadata"]["name"]) == (kind, name))
    for operation in yaml.safe_load(patch["patch"]):
        *parents, last = operation["path"].split("/")[1:]
        place: Any = target
        for parent in parents:
            place = place[int(parent) if isinstance(place, list) else parent]
        if last == "-":
            place.append(operation["value"])
        else:
            # RFC 6902: what is replaced must be there.
            assert operation["op"] == "add" or last in place, operation
            place[last] = operation["value"]
