"""The variables that keep a process from asking a proxy for hosts of the run."""

from __future__ import annotations

from collections.abc import Mapping


def past_proxies(inherited: Mapping[str, str], host: str) -> dict[str, str]:
    """Return NO_PROXY and no_proxy for a process: what each lists already, plus the host and this machine."""
    listed = {name: [part for part in inherited.get(name, "").split(",") if part] for name in ("NO_PROXY", "no_proxy")}
    return {name: ",".join(dict.fromkeys([*hosts, host, "127.0.0.1", "localhost"])) for name, hosts in listed.items()}
