"""The embedded generator against plain forward passes of transformers, and against itself in other batches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_checkpoints import CONFIGS, VOCAB, save_small_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

import megatron_daro.engine.generator as generator_module
from megatron_daro.data.stops import repeated_at
from megatron_daro.engine.decoding import AbortSignal
from megatron_daro.engine.generator import EmbeddedGenerator
from megatron_daro.engine.growing_cache import growing_cache
from megatron_daro.errors import EngineError, ModelError
from megatron_daro.sync.buckets import bucketize
from megatron_daro.types import GroupRequest, Prompt, SamplingParams

STOPS = (3, 17)


@pytest.fixture(scope="session")
def small_models(tmp_path_factory):
    """family -> checkpoint directory."""
    directories = {}
    for family in (*CONFIGS, "gpt_oss", "olmo3", "qwen3_next"):
        directories[family] = tmp_path_factory.mktemp(family)
        save_small_model(directories[family], family)
    return directories


def request(group, tokens, *, count=4, attempt=0, **sampling):
    sampling = {"max_new_tokens": 12, "stop_token_ids": STOPS, **sampling}
    prompt = Prompt(id=f"p{group}", answer="", source="", tokens=tuple(tokens))
    return GroupRequest(group, attempt, prompt, tuple(range(count)), SamplingParams(**sampling))


def requests(groups=6, **sampling):
    rng = np.random.default_rng(0)
    return [request(g, rng.integers(0, VOCAB, 1 + 3 * (g % 4)).tolist(), **sampling) for g in range(groups)]


def run(generator, wanted):
    rollouts = [r for batch in generator.plan(wanted) for r in generator.generate_rows(batch)]
    return {(r.group_id, r.attempt, r.index): r for r in rollouts}


def responses(rollouts):
    return {key: r.tokens[r.prompt_length :].tolist() for key, r in rollouts.items()}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gpt_oss", "olmo3", "qwen3_next"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.8), (0.0, 1.0)])
def test_logprobs_are_those_of_a_plain_forward_of_the_whole_sequence(family, temperature, top_p, small_models):
    generator = EmbeddedGenerator(small_models[family], seed=1, batch_size=64)
    model = AutoModelForCausalLM.from_pretrained(small_models[family]).eval()
    rollouts = run(generator, requests(temperature=temperature, top_p=top_p, stop_token_ids=()))
    assert len(rollouts) == 24
    for rollout in rollouts.values():
        with torch.no_grad():
            logits = model(torch.tensor(rollout.tokens, dtype=torch.int64)[None]).logits[0]
        expected = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        at = torch.arange(rollout.prompt_length - 1, len(rollout.tokens) - 1)
        chosen = torch.tensor(rollout.tokens[rollout.prompt_length :], dtype=torch.int64)
        np.testing.assert_allclose(rollout.logprobs, expected[at, chosen].numpy(), atol=1e-4)
        if temperature == 0:
            assert torch.equal(chosen, logits[at].argmax(-1))


def test_sampling_settings_of_the_checkpoint_are_not_applied(tmp_path):
    model = save_small_model(tmp_path)
    model.generation_config = GenerationConfig(
        do_sample=True, repetition_penalty=5.0, top_k=1, temperature=0.1, eos_token_id=STOPS[0], max_length=3
    )
    wanted = requests(stop_token_ids=())
    plain = run(EmbeddedGenerator(tmp_path, seed=1, batch_size=64), wanted)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "generation_config.json").exists()
    bent = run(EmbeddedGenerator(tmp_path, seed=1, batch_size=64), wanted)
    assert responses(bent) == responses(plain)
    assert all(np.array_equal(bent[key].logprobs, plain[key].logprobs) for key in plain)
    assert {r.response_length for r in bent.values()} == {12}


def test_tokens_do_not_depend_on_the_batch(small_models):
    wanted = requests(8)
    together = responses(run(EmbeddedGenerator(small_models["qwen2"], seed=5, batch_size=100), wanted))
    assert len({tuple(t) for t in together.values()}) > 16
    for batch_size in (1, 5):
        assert (
            responses(run(EmbeddedGenerator(small_models["qwen2"], seed=5, batch_size=batch_size), wanted)) == together
        )
    generator = EmbeddedGenerator(small_models["qwen2"], seed=5, batch_size=100)
    assert responses(run(generator, wanted[::-1])) == together
    alone = responses(run(generator, [wanted[3]]))
    assert alone == {key: tokens for key, tokens in together.items() if key[0] == 3}


def test_the_same_list_gives_the_same_bits(small_models):
    first = run(EmbeddedGenerator(small_models["qwen3"], seed=5, batch_size=7), requests())
    again = run(EmbeddedGenerator(small_models["qwen3"], seed=5, batch_size=7), requests())
    assert responses(first) == responses(again)
    assert all(np.array_equal(first[key].logprobs, again[key].logprobs) for key in first)


def test_seed_group_attempt_and_index_each_change_the_tokens(small_models):
    tokens = [5, 6, 7]

    def answer(seed=0, group=1, attempt=0):
        generator = EmbeddedGenerator(small_models["qwen2"], seed=seed, batch_size=64)
        asked = request(group, tokens, attempt=attempt, count=2, stop_token_ids=())
        return [r.tokens.tolist() for r in run(generator, [asked]).values()]

    base = answer()
    assert base[0] != base[1]
    assert base != answer(seed=1) and base != answer(group=2) and base != answer(attempt=1)
    assert base == answer()


def test_asking_for_some_indices_gives_the_same_rollouts_as_asking_for_all(small_models):
    generator = EmbeddedGenerator(small_models["qwen2"], seed=0, batch_size=64)
    full = responses(run(generator, [request(1, [4, 5], count=6)]))
    part = GroupRequest(1, 0, request(1, [4, 5]).prompt, (5, 2), request(1, [4, 5]).sampling)
    assert responses(run(generator, [part])) == {key: full[key] for key in ((1, 0, 5), (1, 0, 2))}


def letters(ids):
    """Three letters in turn; token 30 has no text, and token 29 two letters."""
    return "".join({29: "bc", 30: ""}.get(i, "abc"[i % 3]) for i in ids)


@pytest.mark.parametrize("stop", ["bb", "bca", "acbc"])
def test_a_stop_text_ends_an_answer_at_the_token_that_completes_it(small_models, stop):
    """The same answers as without it, up to there: what is cut off would have come anyway."""
    generator = EmbeddedGenerator(small_models["qwen2"], seed=2, batch_size=64, decode=letters)
    options = {"max_new_tokens": 40, "stop_token_ids": (5,)}
    free = run(generator, requests(8, **options))
    ended = run(generator, requests(8, stop=(stop,), **options))
    cut = 0
    for key, whole in free.items():
        ids, one = whole.tokens[whole.prompt_length :].tolist(), ended[key]
        count = next((n for n in range(1, len(ids) + 1) if stop in letters(ids[:n])), None)
        cut += count is not None
        expected = ids[:count] if count else ids
        assert one.tokens[one.prompt_length :].tolist() == expected
        np.testing.assert_allclose(one.logprobs, whole.logprobs[: len(expected)], atol=1e-5)
        text = letters(expected)
        assert one.text == (text[: text.index(stop) + len(stop)] if count else text)
        assert one.finish_reason == ("stop" if count else whole.finish_reason)
    assert cut >= 3


def test_a_stop_text_saves_the_steps_behind_it(small_models):
    generator = EmbeddedGenerator(small_models["qwen2"], seed=2, batch_size=64, decode=letters)
    steps = []
    generator.model.register_forward_hook(lambda *_: steps.append(1))
    run(generator, requests(2, max_new_tokens=200, stop_token_ids=(), stop=("a", "b")))
    assert len(steps) < 60


def test_an_answer_in_segments_is_that_of_one_request(small_models):
    """Greedy: the second segment reads prompt and first segment, and goes on under the weights of its own time."""
    generator = EmbeddedGenerator(small_models["qwen2"], seed=2, batch_size=64, decode=letters)
    asked = requests(temperature=0.0, stop_token_ids=())
    whole = run(generator, asked)
    first = run(generator, [replace(one, limits=dict.fromkeys(one.indices, 5)) for one in asked])
    assert {r.finish_reason for r in first.values()} == {"segment"}
    assert {r.response_length for r in first.values()} == {5}
    generator.weight_version = 7
    partial = {
        one.group_id: {i: replace(first[one.group_id, 0, i], finish_reason="abort") for i in one.indices[:2]}
        for one in asked
    }
    again = run(generator, [replace(one, attempt=1, partial=partial[one.group_id]) for one in asked])
    for (group, _, index), rollout in again.items():
        other = whole[group, 0, index]
        assert (rollout.tokens.tolist(), rollout.text) == (other.tokens.tolist(), other.text)
        np.testing.assert_allclose(rollout.logprobs, other.logprobs, atol=1e-5)
        assert rollout.version_spans == (((0, 5), (7, 7)) if index < 2 else ((7, 12),))
        assert rollout.weight_version == (0 if index < 2 else 7)


SPAN = (8, 4)


def test_an_answer_that_repeats_itself_ends_where_it_began_to_and_saves_the_steps_behind_it(small_models):
    generator = EmbeddedGenerator(small_models["qwen2"], seed=2, batch_size=64, decode=letters)
    options = {"max_new_tokens": 200, "stop_token_ids": (), "temperature": 0.0}
    free = run(generator, requests(6, **options))
    ended = run(generator, requests(6, repetition=SPAN, **options))
    counts = {key: repeated_at(whole.tokens[whole.prompt_length :], *SPAN) for key, whole in free.items()}
    for key, count in counts.items():
        assert ended[key].response_length == (count or 200)
        assert ended[key].finish_reason == ("repetition" if count else "length")
        np.testing.assert_array_equal(ended[key].tokens, free[key].tokens[: len(ended[key].tokens)])
    early = [one for one in requests(6, repetition=SPAN, **options) if (counts[one.group_id, 0, 0] or 200) < 30]
    assert 0 < len(early) < 6 and None in counts.values()
    steps = []
    generator.model.register_forward_hook(lambda *_: steps.append(1))
    run(generator, early)
    assert len(steps) < 60


def test_finish_reasons_and_the_stop_token(small_models):
    rollouts = run(EmbeddedGenerator(small_models["qwen2"], seed=2, batch_size=64), requests(8, max_new_tokens=10))
    reasons = [r.finish_reason for r in rollouts.values()]
    assert set(reasons) == {"stop", "length"}
    for rollout in rollouts.values():
        response = rollout.tokens[rollout.prompt_length :].tolist()
        assert len(response) == len(rollout.logprobs) == len(rollout.loss_mask) == rollout.response_length
        assert not set(response[:-1]) & set(STOPS)
        assert (response[-1] in STOPS) == (rollout.finish_reason == "stop")
        assert rollout.finish_reason == "stop" or len(response) == 10
        assert rollout.tokens.dtype == np.int32 and rollout.logprobs.dtype == np.float32
        assert rollout.loss_mask.all() and rollout.weight_version == 0


def test_requests_of_different_settings_share_a_batch(small_models):
    wanted = [
        request(0, [4, 5], max_new_tokens=3, stop_token_ids=()),
        request(1, [4, 5, 6], max_new_tokens=9, stop_token_ids=(8,), temperature=0.5),
        request(2, [4], max_new_tokens=20, stop_token_ids=(9, 10), top_p=0.7),
    ]
    generator = EmbeddedGenerator(small_models["llama"], seed=0, batch_size=64)
    together = responses(run(generator, wanted))
    assert max(len(t) for key, t in together.items() if key[0] == 0) == 3
    for one in wanted:
        alone = responses(run(generator, [one]))
        assert alone == {key: together[key] for key in alone}


def test_each_distinct_prompt_is_read_once(small_models, monkeypatch):
    generator = EmbeddedGenerator(small_models["qwen2"], seed=0, batch_size=64)
    rows = []
    forward = generator.model.base_model.forward
    monkeypatch.setattr(
        generator.model.base_model, "forward", lambda *a, **k: (rows.append(k["input_ids"].shape), forward(*a, **k))[1]
    )
    run(generator, [request(g, [4 + g, 5, 6], count=8) for g in range(2)])
    assert rows[0] == (2, 2)  # two prompts without their last tokens, not sixteen rows
    assert rows[1] == (16, 1)


def test_finished_rows_leave_the_batch(small_models, monkeypatch):
    calls = []
    generator = EmbeddedGenerator(small_models["qwen2"], seed=0, batch_size=64)
    original = generator.model.generate
    monkeypatch.setattr(generator.model, "generate", lambda **k: (calls.append(len(k["input_ids"])), original(**k))[1])
    rollouts = run(generator, [request(g, [4, 5], count=8, max_new_tokens=2 + 8 * (g % 2)) for g in range(4)])
    assert len(rollouts) == 32
    assert calls[0] == 32 and len(calls) > 1 and calls == sorted(calls, reverse=True)


def test_abort_keeps_what_was_generated_and_touches_no_other_group(small_models, monkeypatch):
    generator = EmbeddedGenerator(small_models["qwen2"], seed=0, batch_size=64)
    wanted = [request(g, [4 + g, 5], count=3, stop_token_ids=(), max_new_tokens=10) for g in range(3)]
    whole, signal = responses(run(generator, wanted)), AbortSignal()
    steps = []
    original = generator_module.TokenChooser.__call__

    def abort_in_step_4(self, input_ids, scores):
        steps.append(1)
        if len(steps) == 4:
            signal.abort({1})
        return original(self, input_ids, scores)

    monkeypatch.setattr(generator_module.TokenChooser, "__call__", abort_in_step_4)
    rollouts = {(r.group_id, 0, r.index): r for r in generator.generate_rows(generator.plan(wanted)[0], signal)}
    for key, rollout in rollouts.items():
        response = rollout.tokens[rollout.prompt_length :].tolist()
        assert rollout.finish_reason == ("abort" if key[0] == 1 else "length")
        assert response == (whole[key][:4] if key[0] == 1 else whole[key])
        assert len(rollout.logprobs) == len(response)


def named_weights(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def update(generator, buckets, version):
    stage = generator.stage_weights()
    for bucket in buckets:
        stage.add(bucket)
    generator.apply_weights(stage, version)


@pytest.mark.parametrize("tie", [False, True])
def test_updated_weights_answer_as_a_model_loaded_with_them(tie, tmp_path):
    save_small_model(tmp_path / "old", tie=tie, seed=0)
    new = save_small_model(tmp_path / "new", tie=tie, seed=1)
    generator = EmbeddedGenerator(tmp_path / "old", seed=0, batch_size=64)
    before = responses(run(generator, requests()))
    names = [name for name, _ in named_weights(new)]
    assert ("lm_head.weight" in names) == (not tie)
    update(generator, bucketize(named_weights(new), 5000), version=7)
    after = run(generator, requests())
    assert (
        responses(after)
        == responses(run(EmbeddedGenerator(tmp_path / "new", seed=0, batch_size=64), requests()))
        != before
    )
    assert {r.weight_version for r in after.values()} == {7}
    if tie:  # a stream that brings the tied matrix under both names is accepted too
        both = [*named_weights(new), ("lm_head.weight", new.lm_head.weight.detach())]
        update(generator, bucketize(both, 5000), version=8)
        assert responses(run(generator, requests())) == responses(after)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "qwen3_next"])
def test_experts_arrive_one_by_one_under_the_names_of_the_checkpoint(family, tmp_path):
    """As the actor exports them; transformers keeps all experts of a layer in one parameter."""
    save_small_model(tmp_path / "old", family, seed=0)
    save_small_model(tmp_path / "new", family, seed=1)
    stored = sorted(load_file(tmp_path / "new" / "model.safetensors").items())
    generator = EmbeddedGenerator(tmp_path / "old", seed=0, batch_size=64)
    before = responses(run(generator, requests()))
    some = next(i for i, (name, _) in enumerate(stored) if "experts.2." in name)
    with pytest.raises(EngineError, match=r"experts\.2\."):
        update(generator, bucketize([*stored[:some], *stored[some + 1 :]], 5000), version=6)
    assert responses(run(generator, requests())) == before
    update(generator, bucketize(stored, 5000), version=7)
    after = responses(run(generator, requests()))
    assert after == responses(run(EmbeddedGenerator(tmp_path / "new", seed=0, batch_size=64), requests())) != before


def test_the_sender_may_reuse_a_buckets_memory(tmp_path):
    save_small_model(tmp_path / "old", seed=0)
    new = save_small_model(tmp_path / "new", seed=1)

    def overwritten():
        for bucket in bucketize(named_weights(new), 10**6):  # larger than any tensor: those it would not copy
            yield bucket
            bucket.data[:] = 0

    generator = EmbeddedGenerator(tmp_path / "old", seed=0, batch_size=64)
    update(generator, overwritten(), version=1)
    for (name, expected), (_, got) in zip(named_weights(new), named_weights(generator.model), strict=True):
        assert torch.equal(got, expected), name


def broken(weights, how):
    if how == "missing":
        return weights[:-1]
    if how == "shape":
        return [*weights[:-1], (weights[-1][0], weights[-1][1][:-1])]
    if how == "unknown":
        return [*weights, ("model.extra.weight", torch.zeros(2))]
    return [*weights, weights[0]]


@pytest.mark.parametrize("how", ["missing", "shape", "unknown", "twice"])
def test_a_wrong_update_is_refused_and_the_old_weights_stay(how, tmp_path):
    save_small_model(tmp_path / "old", seed=0)
    new = save_small_model(tmp_path / "new", seed=1)
    generator = EmbeddedGenerator(tmp_path / "old", seed=0, batch_size=64)
    before = run(generator, requests())
    named = {"unknown": "model.extra.weight", "twice": "model.embed_tokens.weight"}.get(how, "lm_head.weight")
    with pytest.raises(EngineError, match=named):
        update(generator, bucketize(broken(named_weights(new), how), 5000), version=7)
    after = run(generator, requests())
    assert all(np.array_equal(after[key].logprobs, before[key].logprobs) for key in before)
    assert {r.weight_version for r in after.values()} == {0}


def test_bf16_generates_and_takes_fp32_weights(tmp_path):
    model = save_small_model(tmp_path)
    generator = EmbeddedGenerator(tmp_path, seed=0, batch_size=64, dtype="bf16")
    assert {p.dtype for p in generator.model.parameters()} == {torch.bfloat16}
    before = run(generator, requests())
    update(generator, bucketize(named_weights(model), 10**6), version=1)
    assert {p.dtype for p in generator.model.parameters()} == {torch.bfloat16}
    assert responses(run(generator, requests())) == responses(before)
    assert all(np.isfinite(r.logprobs).all() for r in before.values())


def test_text_comes_from_the_given_decoder_and_holds_the_response_only(small_models):
    generator = EmbeddedGenerator(
        small_models["qwen2"], seed=0, batch_size=64, decode=lambda ids: " ".join(map(str, ids))
    )
    for rollout in run(generator, requests(2)).values():
        assert rollout.text == " ".join(map(str, rollout.tokens[rollout.prompt_length :]))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (request(0, []), "p0"),
        (request(0, [VOCAB]), f"token {VOCAB}"),
        (request(0, [1], stop_token_ids=(VOCAB,)), f"token {VOCAB}"),
        (request(0, [1] * 250), "256"),
        (request(0, [1], max_new_tokens=0), "max_new_tokens 0"),
        (request(0, [1], temperature=float("nan")), "temperature nan"),
        (request(0, [1], top_p=0.0), "top_p 0.0"),
        (request(0, [1], count=0), "p0"),
        (request(0, [1], stop=("b",)), "stop"),
        (request(1, [1]), "twice"),
    ],
)
def test_requests_that_cannot_be_generated_are_refused(bad, named, small_models):
    with pytest.raises(EngineError, match=named):
        EmbeddedGenerator(small_models["qwen2"], seed=0, batch_size=64).plan([request(1, [1]), bad])


def test_a_checkpoint_that_is_not_whole_is_refused(small_models, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        EmbeddedGenerator(tmp_path / "nowhere", seed=0, batch_size=64)
    with pytest.raises(ModelError):
        EmbeddedGenerator(tmp_path, seed=0, batch_size=64)
    source = small_models["qwen2"]
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(ModelError):
        EmbeddedGenerator(tmp_path, seed=0, batch_size=64)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        EmbeddedGenerator(tmp_path, seed=0, batch_size=64)


def test_weights_that_are_pickles_are_not_read(small_models, tmp_path):
    source = small_models["qwen2"]
    torch.save(load_file(source / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ModelError):
        EmbeddedGenerator(tmp_path, seed=0, batch_size=64)


def test_weights_of_another_shape_are_refused(small_models, tmp_path):
    source = small_models["qwen2"]
    config = (source / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace(f'"vocab_size": {VOCAB}', f'"vocab_size": {VOCAB + 1}'))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(ModelError):
        EmbeddedGenerator(tmp_path, seed=0, batch_size=64)


@pytest.mark.parametrize(
    ("fault", "lower"), [("out of memory", True), ("can't allocate memory", True), ("index 8 is out of bounds", False)]
)
def test_a_failure_of_torch_says_what_to_lower_where_memory_was_short(small_models, monkeypatch, fault, lower):
    def fails(**options):
        raise RuntimeError(fault)

    generator = EmbeddedGenerator(small_models["qwen2"], seed=0, batch_size=64)
    monkeypatch.setattr(generator.model, "generate", fails)
    with pytest.raises(EngineError, match=fault) as failed:
        run(generator, [request(0, [1, 2])])
    assert ("engine.embedded.batch_size" in str(failed.value)) is lower


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(small_models, broken, temperature):
    generator = EmbeddedGenerator(small_models["qwen2"], seed=0, batch_size=64)
    generator.model.lm_head.weight[7] = broken
    with pytest.raises(EngineError, match="logits are NaN"):
        run(generator, [request(0, [1, 2], temperature=temperature)])


def test_the_growing_cache_holds_what_dynamic_cache_holds():
    own, theirs = growing_cache(SimpleNamespace(num_hidden_layers=2)), DynamicCache()
    generator = torch.Generator().manual_seed(0)
    for length, select in ((5, [0, 2, 2, 1]), (1, None), (30, [3, 0]), (1, [1, 1, 1]), (1, None)):
        rows = 3 if own.get_seq_length() == 0 else own.layers[0].keys.shape[0]
        for layer in range(2):
            keys, values = (torch.randn(rows, 2, length, 4, generator=generator) for _ in range(2))
            got, expected = own.update(keys, values, layer), theirs.update(keys, values, layer)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        if select:
            own.batch_select_indices(torch.tensor(select))
            theirs.batch_select_indices(torch.tensor(select))
        assert own.get_seq_length() == theirs.get_seq_length()
