"""Who keeps whose snapshot, what fits into memory, and where a lost state comes from."""

from __future__ import annotations

import itertools

import pytest

from megatron_daro.actor.double_buffer import KINDS_OF_SNAPSHOT
from megatron_daro.runtime.rank_info import RankInfo
from megatron_daro.runtime.snapshot_keepers import affordable, kinds_sent, peers_of, sources_of
from megatron_daro.runtime.snapshot_store import SnapshotSerials, Source

GIB = 2**30


def infos(*ranks):
    """(host, key of the weights) of each."""
    return [RankInfo(0, 0, exports=False, sends=False, reports=False, host=host, weights_key=(k,)) for host, k in ranks]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", [None]),
        ("aa", [1, 0]),
        ("aaaa", [2, 3, 0, 1]),
        ("aabb", [2, 3, 0, 1]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("aaab", [3, 3, 3, 0]),
    ],
)
def test_a_peer_is_on_another_host_where_there_is_one(hosts, expected):
    assert peers_of(infos(*((host, rank) for rank, host in enumerate(hosts)))) == expected
    assert peers_of(infos(*((host, 0) for host in hosts))) == expected


PIPELINES = {
    "on one host": [("a", 0), ("a", 0), ("a", 1), ("a", 1)],
    "of a host each": [("a", 0), ("b", 0), ("c", 1), ("d", 1)],
    "over all hosts": [("a", 0), ("b", 1), ("c", 0), ("d", 1)],
    "of one host alone": [("a", 0), ("a", 0), ("b", 1), ("b", 1)],
}


@pytest.mark.parametrize("ranks", PIPELINES.values(), ids=PIPELINES)
def test_two_ranks_that_die_are_replaced_unless_one_keeps_the_others_copy(ranks):
    ranks, workers = infos(*ranks), list(range(4))
    peers, sent = peers_of(ranks), kinds_sent(ranks, "both")
    for lost in itertools.combinations(workers, 2):
        living = {
            rank: SnapshotSerials((5,), {other: (5,) for other, peer in enumerate(peers) if peer == rank})
            for rank in workers
            if rank not in lost
        }
        sources = sources_of(5, living, ranks, workers)
        if any(peers[rank] in lost for rank in lost):
            assert sources in lost
        else:
            assert sources.keys() == set(lost)
            for source in itertools.chain(*sources.values()):
                assert set(source.kinds) <= set(KINDS_OF_SNAPSHOT if source.owner is None else sent[source.owner])


def test_weights_are_sent_only_where_no_replica_elsewhere_has_them():
    on_two = infos(("a", 0), ("a", 1), ("b", 0), ("b", 1))
    assert kinds_sent(on_two, "both") == [("optimizer",)] * 4
    assert kinds_sent(on_two, "peer") == [KINDS_OF_SNAPSHOT] * 4, "no rank keeps its own for others"
    replicas_beside = infos(("a", 0), ("a", 0), ("b", 1), ("b", 1))
    assert kinds_sent(replicas_beside, "both") == [KINDS_OF_SNAPSHOT] * 4, "both replicas go with their host"
    assert kinds_sent(infos(("a", 0), ("a", 0)), "both") == [("optimizer",)] * 2


@pytest.mark.parametrize(
    ("free_gib", "memory_gib", "expected"),
    [
        # Two ranks a host, of 1 GiB of weights and 3 of optimizer each: 2 x 4 of its own and 2 x 3 of its peer.
        (56, None, ("both", 28.0, 28.0)),
        (55.9, None, ("peer", 24.0, 27.95)),  # 1 x 4 and 2 x 4
        (47, None, ("none", 24.0, 23.5)),
        (1, 28, ("both", 28.0, 28.0)),
        (100, 24, ("peer", 24.0, 24.0)),
        (100, 0, ("none", 24.0, 0.0)),
    ],
)
def test_what_fits_into_memory_is_kept(free_gib, memory_gib, expected):
    ranks = infos(("a", 0), ("a", 1), ("b", 0), ("b", 1))
    sizes = [{"weights": GIB, "optimizer": 3 * GIB}] * 4
    assert affordable(ranks, sizes, [int(free_gib * GIB)] * 4, memory_gib) == pytest.approx(expected, abs=1e-6)


def test_one_rank_has_no_peer():
    assert affordable(infos(("a", 0)), [{"weights": 1, "optimizer": 1}], [GIB], None)[0] == "none"


def kept(own=(5,), **copies):
    return SnapshotSerials(own, {int(rank[1:]): serials for rank, serials in copies.items()})


def test_a_lost_state_comes_from_peer_and_replica():
    ranks, workers = infos(("a", 0), ("a", 1), ("b", 0), ("b", 1)), list("wxyz")
    living = {0: kept(r2=(4, 5)), 1: kept(r3=(5,)), 3: kept(r1=(5,))}
    expected = [Source("w", None, ("weights",), rest=False), Source("w", 2, ("optimizer",), rest=True)]
    assert sources_of(5, living, ranks, workers) == {2: expected}
    assert sources_of(6, living, ranks, workers) == 0, "nobody has the snapshot 6 of rank 0"
    del living[0]
    assert sources_of(5, living, ranks, workers) == 0, "rank 2 kept rank 0's"


def test_a_copy_of_another_snapshot_is_none():
    ranks = infos(("a", 0), ("a", 1))
    assert sources_of(5, {0: kept(r1=(4, 6))}, ranks, list("wx")) == 1


def test_where_peers_alone_keep_snapshots_a_living_rank_gets_its_own_from_there():
    ranks, workers = infos(("a", 0), ("a", 1)), list("wx")
    living = {0: kept(own=(6,), r1=(5,)), 1: kept(own=(), r0=(5, 6))}
    whole = {0: [Source("x", 0, KINDS_OF_SNAPSHOT, rest=True)], 1: [Source("w", 1, KINDS_OF_SNAPSHOT, rest=True)]}
    assert sources_of(5, living, ranks, workers) == whole
    assert sources_of(5, {0: living[0]}, ranks, workers) == 0
