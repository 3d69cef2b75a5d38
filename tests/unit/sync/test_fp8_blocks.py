"""Matrices as fp8 blocks: half a step of the type away, whatever the shape; and a stream that keeps buckets full."""

from __future__ import annotations

import pytest
import torch
from fp8_restored import restored
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.sync.buckets import bucketize
from megatron_daro.sync.fp8_cast import as_blocks, cast, pattern_of

E4M3 = torch.float8_e4m3fn
TEMPLATES = ("model.layers.{layer}.mlp.down_proj.weight", "model.layers.{layer}.mlp.experts.{expert}.w1.weight")


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_number_is_within_half_a_step_of_its_blocks_scale(rows, columns, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    spread_R1 = torch.logspace(-20, 20, rows)[:, None]  # each block has a scale of its own
    matrix_NK = (torch.randn(rows, columns, generator=generator) * spread_R1).to(dtype)
    narrow_NK, scale_nk = cast(matrix_NK)
    assert narrow_NK.dtype == E4M3 and narrow_NK.shape == matrix_NK.shape and narrow_NK.is_contiguous()
    assert scale_nk.dtype == torch.float32 and scale_nk.shape == (-(-rows // 128), -(-columns // 128))
    back_NK = restored(narrow_NK, scale_nk, torch.float32)
    for i in range(scale_nk.shape[0]):
        for j in range(scale_nk.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            values, scale = matrix_NK[block].float(), float(scale_nk[i, j])
            assert narrow_NK[block].float().abs().max() == 448.0
            # e4m3 has three bits of fraction; below 2^-6 its steps are equal, of 2^-9
            allowed = torch.maximum(values.abs() / 16, torch.tensor(2.0**-10 * scale)) * 1.0001
            assert ((back_NK[block] - values).abs() <= allowed).all()


def test_zeros_stay_zero_and_what_is_not_finite_is_not_hidden():
    matrix_NK = torch.zeros(256, 256)
    matrix_NK[0, 200], matrix_NK[200, 0] = torch.inf, torch.nan
    back_NK = restored(*cast(matrix_NK), torch.float32)
    assert (back_NK[:128, :128] == 0).all() and (back_NK[128:, 128:] == 0).all()
    assert torch.isnan(back_NK[:128, 128:]).any() and torch.isnan(back_NK[128:, :128]).all()


def stream():
    """Of two layers; one buffer for all tensors of a shape, as a gathering rank may have."""
    for layer in range(2):
        norm_D = torch.full((256,), float(layer), dtype=torch.bfloat16)
        yield from (
            (f"model.layers.{layer}.input_layernorm.weight", norm_D),
            (f"model.layers.{layer}.mlp.down_proj.weight", torch.full((256, 128), layer + 1.0, dtype=torch.bfloat16)),
            (f"model.layers.{layer}.mlp.experts.7.w1.weight", torch.ones(128, 128, dtype=torch.bfloat16)),
            (f"model.layers.{layer}.mlp.down_proj.bias", norm_D),
        )
        norm_D.fill_(-1.0)
    yield "lm_head.weight", torch.ones(512, 256, dtype=torch.bfloat16)


def test_matrices_are_followed_by_their_scales_and_all_else_is_as_it_was():
    sent = []
    got = {name: tensor.clone() for name, tensor in as_blocks(stream(), TEMPLATES, 1 << 16, sent)}
    matrices = [f"model.layers.{i}.mlp.{part}.weight" for i in range(2) for part in ("down_proj", "experts.7.w1")]
    assert sent == matrices
    assert {name for name, tensor in got.items() if tensor.dtype == E4M3} == set(matrices)
    for layer in range(2):
        down = f"model.layers.{layer}.mlp.down_proj.weight"
        assert (restored(got[down], got[f"{down}_scale_inv"], torch.float32) == layer + 1.0).all()
        assert (got[f"model.layers.{layer}.input_layernorm.weight"] == layer).all(), "held back, not kept in a buffer"
    assert got["lm_head.weight"].shape == (512, 256) and len(got) == 13


@pytest.mark.parametrize(("bucket_bytes", "most"), [(1 << 22, 4), (1 << 16, 9)])
def test_what_is_small_is_held_back_so_that_buckets_stay_full(bucket_bytes, most):
    """Without that, every scale and every norm would end a bucket: more than a dozen."""
    buckets = list(bucketize(as_blocks(stream(), TEMPLATES, bucket_bytes, []), bucket_bytes))
    assert len(buckets) <= most and sum(len(bucket.names) for bucket in buckets) == 13


def test_names_are_those_of_the_templates_and_no_others():
    pattern = pattern_of(TEMPLATES)
    assert pattern.fullmatch("model.layers.12.mlp.experts.127.w1.weight")
    for other in (
        "model.layers.1.mlp.down_proj.weight_scale_inv",
        "model.layers.x.mlp.down_proj.weight",
        "modelXlayers",
    ):
        assert not pattern.fullmatch(other)
