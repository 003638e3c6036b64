"""Commands that start a container: `docker run ... IMAGE ARGUMENTS` as the command that runs inside."""

from __future__ import annotations

import re
from collections.abc import Sequence

from perfmodel.configs.tables import common_rules

_ENGINES = ("docker", "podman", "nerdctl")
_IMAGE = re.compile(r"[\w][\w.-]*(?::\d+)?(?:/[\w.-]+)+(?::[\w.-]+)?(?:@sha256:[0-9a-f]+)?")


def command_inside(words: Sequence[str]) -> list[str]:
    """Return the words of the command in the container, with the entry point of its image; other commands unchanged."""
    start = 1 if words[:1] == ["sudo"] else 0
    if start + 1 >= len(words) or words[start] not in _ENGINES or words[start + 1] != "run":
        return list(words)
    for index in range(start + 2, len(words)):
        if _IMAGE.fullmatch(words[index]):
            name = re.split(r"[:@]", words[index].rpartition("/")[2])[0]
            return [*common_rules()["entry_points"].get(name, "").split(), *words[index + 1 :]]
    return list(words)
