"""Policies of the user's own, from a Python file that registers them."""

from __future__ import annotations

import runpy
from pathlib import Path

from minillm.core.errors import ConfigError
from minillm.core.policies import QUEUE_POLICIES, VICTIM_POLICIES


def load_policy_file(path: Path | str) -> list[str]:
    """Run a file that registers policies (see :mod:`minillm.core.policies`); returns the names that are new.

    The file is ordinary Python and runs with this process's rights. :class:`ConfigError`, with nothing registered, if
    it cannot be read, raises, registers nothing, or takes a name that is in use.
    """
    registries: tuple[dict, ...] = (QUEUE_POLICIES, VICTIM_POLICIES)
    before = [dict(registry) for registry in registries]
    try:
        runpy.run_path(str(path), run_name="minillm_policy_file")
        return _check(path, before)
    except (Exception, SystemExit) as error:
        for registry, known in zip(registries, before, strict=True):
            registry.clear()
            registry.update(known)
        if isinstance(error, ConfigError):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        raise ConfigError(f"policy_file={str(path)!r}: {why}") from error


def _check(path: Path | str, before: list[dict]) -> list[str]:
    names: list[str] = []
    registries: tuple[dict, ...] = (QUEUE_POLICIES, VICTIM_POLICIES)
    for registry, known in zip(registries, before, strict=True):
        taken = [name for name, policy in known.items() if registry.get(name) is not policy]
        if taken:
            raise ConfigError(f"policy_file={str(path)!r}: the policy name {taken[0]!r} is in use; choose another")
        names += [name for name in registry if name not in known]
    if not names:
        raise ConfigError(
            f"policy_file={str(path)!r} registers no policy: use @register_victim_policy or @register_queue_policy"
        )
    return names
