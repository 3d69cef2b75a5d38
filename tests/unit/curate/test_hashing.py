"""n-grams, signatures and candidates against sets computed one by one; what is compared in a full bucket."""

import random

import numpy as np

from megatron_daro.workshop.curate import alike
from megatron_daro.workshop.curate.alike import Ragged, ngrams, sequence_hash, signatures, similar_pairs, token_hash

WORDS = [f"w{i}" for i in range(400)]


def statements(count, seed=0):
    rng = random.Random(seed)
    return [tuple(rng.choices(WORDS, k=rng.randint(0, 30))) for _ in range(count)]


def test_ngrams_are_those_of_each_statement():
    rows = [*statements(50), (), ("a", "b"), ("a", "b", "c"), ("x", "a", "b", "c")]
    hashes, owners = ngrams(Ragged(rows), 3)
    expected = [(i, row[j : j + 3]) for i, row in enumerate(rows) for j in range(len(row) - 2)]
    assert owners.tolist() == [i for i, _ in expected]
    names: dict[tuple, int] = {}
    for (_, gram), value in zip(expected, hashes.tolist(), strict=True):
        assert names.setdefault(gram, value) == value
    assert len(set(names.values())) == len(names)
    assert len(ngrams(Ragged([("a",)]), 3)[0]) == len(ngrams(Ragged([]), 3)[0]) == 0


def test_hashes_are_the_same_everywhere():
    assert token_hash("frac") == 7620642320965614648 and sequence_hash(["1", "2"]) != sequence_hash(["12"])


def test_signatures_estimate_jaccard():
    rng = random.Random(1)
    pairs = []
    for _ in range(60):
        base = rng.sample(WORDS, 40)
        pairs += [tuple(base), tuple(base[:30] + rng.sample(WORDS, 10))]
    found = signatures(Ragged([*pairs, ()]))
    truth = [len({*a} & {*b}) / len({*a} | {*b}) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    guess = (found[:-1:2] == found[1:-1:2]).mean(axis=1)
    assert np.abs(guess - truth).mean() < 0.05 and (found[-1] == 2**32 - 1).all()


def test_signatures_do_not_depend_on_the_other_statements(monkeypatch):
    rows = statements(300)
    whole = signatures(Ragged(rows))
    monkeypatch.setattr("megatron_daro.workshop.curate.alike._CHUNK_TOKENS", 64)
    assert (signatures(Ragged(rows)) == whole).all()
    assert (signatures(Ragged(rows[100:120])) == whole[100:120]).all()


def test_pairs_are_found_within_a_key_only():
    rng = random.Random(2)
    base = [tuple(rng.sample(WORDS, 20)) for _ in range(200)]
    near = [(*row[:-2], "new", "word") for row in base]
    rows = [*base, *near]
    keys = np.array([0] * 400, np.uint64)
    pairs, crowded = similar_pairs(signatures(Ragged(rows)), keys)
    found = {tuple(pair) for pair in pairs.tolist()}
    assert {(i, i + 200) for i in range(200)} <= found and crowded == 0 and len(found) < 260
    assert (np.diff(pairs[:, 1]) >= 0).all() and (pairs[:, 0] < pairs[:, 1]).all()
    keys[200:] = 1
    pairs, _ = similar_pairs(signatures(Ragged(rows)), keys)
    assert not {(i, i + 200) for i in range(200)} & {tuple(pair) for pair in pairs.tolist()}


def test_a_full_bucket_is_bounded_and_counted():
    rows = [tuple(WORDS[:20])] * 600
    pairs, crowded = similar_pairs(signatures(Ragged(rows)), np.zeros(600, np.uint64))
    assert crowded > 0 and len(pairs) <= 600 * 48 and {later for _, later in pairs.tolist()} == set(range(1, 600))


def test_a_bucket_of_48_is_compared_whole_and_of_49_in_part():
    whole, part = alike._within(np.arange(48)), alike._within(np.arange(49))
    assert len(whole) == 48 * 47 // 2 and len(part) > 49 * 48 // 2
    pairs = {tuple(pair) for pair in part.tolist()}
    assert {(i, 48) for i in (*range(24), *range(24, 48))} == {pair for pair in pairs if pair[1] == 48}
    large = {tuple(pair) for pair in alike._within(np.arange(100, 200)).tolist()}
    assert {e for e, later in large if later == 199} == {*range(100, 124), *range(175, 199)}
    assert all(earlier < later for earlier, later in large)


def test_pairs_agree_in_three_tenths_of_their_signatures():
    signatures = np.tile(np.arange(120, dtype=np.uint32), (3, 1))
    signatures[1, 36:] += 1000
    signatures[2, 35:] += 2000
    pairs, crowded = alike.similar_pairs(signatures, np.zeros(3, np.uint64))
    assert pairs.tolist() == [[0, 1]] and crowded == 0
    assert alike.similar_pairs(signatures[:1], np.zeros(1, np.uint64))[0].shape == (0, 2)
    full = np.tile(np.arange(120, dtype=np.uint32), (48, 1))
    assert alike.similar_pairs(full, np.zeros(48, np.uint64))[1] == 0
    assert alike.similar_pairs(np.concatenate([full, full[:1]]), np.zeros(49, np.uint64))[1] == alike.BANDS == 40
