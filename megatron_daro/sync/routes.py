"""Which ranks hand weights out to which servers, if handles of GPU memory go to servers on several hosts.

On each host one rank hands them out. On the host of the stage's sending rank this is that rank; elsewhere it is a rank
that takes part in the export, and so has every tensor, or, if there is none, a rank to which the sending rank
broadcasts each bucket (handles.py). So the bytes reach each host once, whatever the layout and however many servers it
has. With most other transports one rank of a stage sends to all servers (`one_route`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from megatron_daro.errors import SyncError
from megatron_daro.sync.plan import SendPlan, SendReport


@dataclass(frozen=True, slots=True)
class RankRole:
    """host: of a rank. exports: it takes part in the export of the stage. sends: it is the first rank that does."""

    host: str
    exports: bool
    sends: bool


@dataclass(frozen=True, slots=True)
class Routes:
    """Who hands out what. sender: the stage's sending rank. plans: rank -> plan for its servers, for ranks that export;
    relays: the same for ranks that get each bucket from the sender."""

    sender: int
    plans: Mapping[int, SendPlan]
    relays: Mapping[int, SendPlan] = field(default_factory=dict)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the group in which buckets are broadcast, the sender first; empty if none are."""
        return (self.sender, *self.relays) if self.relays else ()


def one_route(plan: SendPlan, roles: Mapping[int, RankRole]) -> Routes:
    """Have the sending rank send to all servers. Args: see `routes`."""
    sender = next(rank for rank, role in roles.items() if role.sends)
    return Routes(sender, {sender: plan})


def routes(plan: SendPlan, roles: Mapping[int, RankRole]) -> Routes:
    """Assign the servers of a plan to ranks on their hosts.

    Args:
        plan: for all servers. roles: rank -> its role, for all ranks of the policy.

    Raises:
        SyncError: a server's host has no rank.
    """
    if len({role.host for role in roles.values()}) == 1:
        return one_route(plan, roles)
    sender = next(rank for rank, role in roles.items() if role.sends)
    plans, relays = {sender: replace(plan, targets=())}, dict[int, SendPlan]()
    for host in dict.fromkeys(urlsplit(target.url).hostname or "" for target in plan.targets):
        own = replace(plan, targets=tuple(t for t in plan.targets if (urlsplit(t.url).hostname or "") == host))
        here = [rank for rank, role in roles.items() if role.host == host]
        exporting = [rank for rank in here if roles[rank].exports]
        if sender in here:
            plans[sender] = own
        elif exporting:
            plans[exporting[0]] = own
        elif here:
            relays[here[0]] = own
        else:
            names = ", ".join(target.name for target in own.targets)
            hosts = ", ".join(sorted({role.host for role in roles.values()}))
            raise SyncError(
                f"engine.sglang.sync: got {plan.transport} for {names} on {host}, where no rank of the actor is (they "
                f"are on {hosts}): GPU memory is handed over within a host; set engine.sglang.sync=distributed"
            )
    return Routes(sender, plans, relays)


def joined_report(routes: Routes, reports: Mapping[int, SendReport]) -> SendReport:
    """Return the sender's report with the failures and the longest time of all: other ranks sent the same weights."""
    failures = {name: failure for report in reports.values() for name, failure in report.failures.items()}
    return replace(reports[routes.sender], failures=failures, send_s=max(report.send_s for report in reports.values()))
