"""The worth of a group by pass rate: the formula by hand, and that it prefers what points uphill."""

from __future__ import annotations

import oracle
import pytest
import torch
from closed_run import ClosedRun
from closed_world import Dials


def measured(gain, noise, groups=(0, 2, 1, 0), **sample):
    columns = {name: torch.zeros(0) for name in ("bins_N", "lengths_N", "correct_N", "groups_N")}
    vectors = (torch.tensor(v, dtype=torch.float64) for v in (groups, gain, noise))
    return oracle.Measured(*vectors, **(columns | sample))


def test_efficiency_by_hand():
    found = measured(gain=[0, 3, 1, 0], noise=[0, 1, 1, 0])
    assert found.best_k.tolist() == [0, 3, 1, 0]
    equal = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    # (2 * 3 + 1 * 1)^2 / (2 + 1) / (2 * 9 + 1 * 1)
    assert found.efficiency(equal) == pytest.approx(49 / 3 / 19)
    assert found.efficiency(found.best_k) == pytest.approx(1.0) == found.efficiency(7 * found.best_k)
    assert found.efficiency(-equal) == 0.0


@pytest.fixture(scope="module")
def found():
    run = ClosedRun(Dials(spectrum=(1.0, 1.0), rollouts=4, problems=300, held_out=100, groups=64), "grpo", 0.04, 0)
    for _ in range(5):
        run.one_batch()
    return oracle.measure(run, repeats=2)


def test_every_bin_leads_uphill_and_noise_is_that_of_single_groups(found):
    assert (found.gain_k[1:-1] > 0).all() and (found.noise_k[1:-1] > 0).all()
    assert int(found.groups_k.sum()) == int(((found.bins_N > 0) & (found.bins_N < 4)).sum()) / 4
    assert 0.8 < found.efficiency(oracle.paid("grpo", found)) <= 1.0


def test_what_arms_pay_comes_from_their_own_coefficients(found):
    grpo, dr_grpo, daro = (oracle.paid(arm, found)[1:-1] for arm in ("grpo", "dr_grpo", "daro"))
    assert torch.allclose(grpo, grpo[0].expand(3))
    # No division by the standard deviation, sqrt(mu (1 - mu)).
    rates = torch.tensor([1, 2, 3], dtype=torch.float64) / 4
    assert torch.allclose(dr_grpo / dr_grpo[1], 2 * (rates * (1 - rates)).sqrt(), rtol=1e-4)
    # At rest w_k |L_k| = 1, so a bin's coefficient is one over its absolute loss sum (the clamp is not reached here).
    sizes = torch.tensor([float((found.bins_N == k).sum()) for k in (1, 2, 3)], dtype=torch.float64)
    assert not torch.allclose(daro / daro[1], sizes[1] / sizes, rtol=1e-3), "lengths count too"
    assert daro.argmax() == sizes.argmin()
