"""Checks across sections, files and hardware: each bad input once, with the words of its message."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from megatron_daro.config import Hardware, check, check_passthrough, detect, precision, resolve, resolve_and_check
from megatron_daro.config.model_files import _tensor_names
from megatron_daro.errors import ConfigError

GPUS = Hardware("gpu", 8, capability=9.0)
SGLANG = ["engine.kind=sglang", 'engine.sglang.urls=["http://h:1"]']
SERVERS = ["engine.kind=sglang", "engine.sglang.python=/usr/bin/python3"]
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"norm_topk_prob": True}
CONFIGS = Path(__file__).resolve().parents[4] / "shared" / "data" / "configs"


def problems(run_files, *overrides: str, hardware: Hardware | None = None) -> list[str]:
    report = check(resolve(run_files.file, overrides), hardware or Hardware("cpu", 4))
    return [str(problem) for problem in report.problems]


def warnings(run_files, *overrides: str, hardware: Hardware | None = None) -> list[str]:
    report = check(resolve(run_files.file, overrides), hardware or Hardware("cpu", 4))
    return [str(warning) for warning in report.warnings]


def test_a_good_run_passes_every_check_without_warnings(run_files, cpu):
    _, report = resolve_and_check(run_files.file, (), cpu)
    assert report.problems == report.warnings == ()
    assert {subject for subject, _ in report.passed} >= {"world size", "batch", "sequence budget", "model files"}


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (
            ["trainer.updates_per_batch=7"],
            "trainer.updates_per_batch",
            "prompts_per_step 64 * rollouts_per_prompt 8 = 512",
        ),
        (
            ["actor.data_parallel=3", "rollout.prompts_per_step=1", "rollout.rollouts_per_prompt=2"],
            "actor.data_parallel",
            "got 3, but an update has 2 samples",
        ),
        (["actor.micro_batch_tokens=5000"], "actor.micro_batch_tokens", "set actor.micro_batch_tokens=5120"),
        (["rollout.max_response_tokens=8000"], "rollout.max_response_tokens", "at most 8192, the model's max_position"),
        (
            ["actor.tensor_parallel=16"],
            "actor.tensor_parallel",
            "model's 8 attention heads; allowed: one of 1, 2, 4, 8;",
        ),
        (["actor.pipeline_parallel=3"], "actor.pipeline_parallel", "model's 4 layers; allowed: one of 1, 2, 4;"),
        (["actor.sequence_parallel=true"], "actor.sequence_parallel", "true only with tensor_parallel > 1"),
        (
            ["actor.context_parallel=2", "actor.tensor_parallel=2", "actor.micro_batch_tokens=16386"],
            "actor.micro_batch_tokens",
            "set actor.micro_batch_tokens=16392",
        ),
        (["actor.precision=fp8"], "actor.precision", "fp8 (tensorwise), but there is no GPU; allowed: fp32, bf16"),
        (["rollout.temperature=0"], "rollout.temperature", "8 rollouts per prompt, which would all be equal"),
        (["rollout.keep_surplus=true"], "rollout.keep_surplus", "true only with max_staleness >= 1"),
        (
            ["rollout.segment_tokens=1000", "rollout.max_staleness=3"],
            "rollout.max_staleness",
            "got 3, but an answer of 4096 tokens takes 5 batches of segment_tokens 1000; allowed: at least 5",
        ),
        (
            ["rollout.segment_tokens=1000", "rollout.max_staleness=5", "engine.kind=toy_engine:Toy"],
            "rollout.segment_tokens",
            "1000 with engine.kind of your own, whose answers begin anew",
        ),
        (
            ["rollout.repetition={tokens: 64, period: 33}"],
            "rollout.repetition.period",
            "set rollout.repetition.period=32",
        ),
        (["algorithm.repetition_penalty=0.5"], "algorithm.repetition_penalty", "0.5 without rollout.repetition.tokens"),
        (["rollout.stop_token_ids=[5,100]"], "rollout.stop_token_ids", "got [100]; allowed: ids below 100"),
        (["data.prompt_template=none", "data.template='{prompt}?'"], "data.template", "which is the whole text"),
        (
            ["data.prompt_template=r1", "reward.verifier=integer"],
            "data.prompt_template",
            "got r1 with reward.verifier=integer; allowed: r1 with the verifier math",
        ),
        (["algorithm.daro.clamp=[2,10]"], "algorithm.daro.clamp", "0 < lower <= 1 <= upper"),
        (["algorithm.daro.clamp=[10,0.1]"], "algorithm.daro.clamp", "0 < lower <= 1 <= upper"),
        (["algorithm.daro.clamp=[0,10]"], "algorithm.daro.clamp", "0 < lower <= 1 <= upper"),
        (
            ["algorithm.correction={kind: mis, low: 3}"],
            "algorithm.correction.low",
            "got 3 with high 2; allowed: below algorithm.correction.high",
        ),
        (
            ["algorithm.correction.kind=tis", "algorithm.old_logprobs=rollout"],
            "algorithm.correction.kind",
            "whose ratio to the engine is always 1",
        ),
        (
            ["algorithm.trust_region=reinforce", "trainer.epochs_per_batch=2"],
            "trainer.epochs_per_batch",
            "got 2 with trust_region reinforce, which has no ratio to the old policy; allowed: 1",
        ),
        (
            ["algorithm.old_logprobs=forward", "trainer.epochs_per_batch=2"],
            "algorithm.old_logprobs",
            "got forward with 2 updates per batch",
        ),
        (
            ["algorithm.old_logprobs=forward", "trainer.updates_per_batch=2"],
            "algorithm.old_logprobs",
            "got forward with 2 updates per batch",
        ),
        (
            ["algorithm.overlong={kind: penalty, max_tokens: 20480, cache_tokens: 4096}"],
            "algorithm.overlong.max_tokens",
            "whose penalty begins at 16384 tokens; allowed: a penalty that begins below max_response_tokens 4096",
        ),
        (
            ["algorithm.overlong={kind: penalty, max_tokens: 100, cache_tokens: 100}"],
            "algorithm.overlong.cache_tokens",
            "got 100 with max_tokens 100",
        ),
        (["engine.sglang.arguments={dtype: float32}"], "engine.sglang", "got arguments with engine.kind embedded"),
        ([*SGLANG, "engine.sglang.python=p"], "engine.sglang.urls", "and python for servers to be started"),
        ([*SGLANG, "engine.sglang.sync=tensor"], "engine.sglang.sync", "got tensor"),
        (
            [*SGLANG, "engine.sglang.sync=shards", "engine.sglang.urls=['http://h:1']"],
            "engine.sglang.sync",
            "shards with servers that run already",
        ),
        (
            [*SGLANG, "engine.sglang.sync=shards", "engine.sglang.fp8_blocks=true"],
            "engine.sglang.sync",
            "shards with fp8 blocks",
        ),
        ([*SGLANG, "engine.sglang.shards_over=rdma"], "engine.sglang.shards_over", "rdma with sync distributed"),
        ([*SGLANG, "engine.sglang.sync_dir=d"], "engine.sglang.sync_dir", "only with sync disk"),
        (["reward.correct_reward=-1"], "reward.correct_reward", "got -1 with incorrect_reward 0"),
        (["actor.optimizer.warmup_steps=101"], "actor.optimizer.warmup_steps", "the run has 100 optimizer steps"),
        (
            ["actor.optimizer.warmup_steps=101", "trainer.updates_per_batch=2"],  # steps are optimizer steps already
            "actor.optimizer.warmup_steps",
            "the run has 100 optimizer steps",
        ),
        (["trainer.eval_every_steps=5"], "trainer.eval_every_steps", "got 5 without a set in data.eval"),
        (["data.train=[/nowhere.jsonl]"], "data.train.0", "'/nowhere.jsonl', which is not there"),
        (["data.train=[/]"], "data.train.0", "'/', which is not a file"),
        (["model.path=/nowhere"], "model.path", "'/nowhere', which is not there"),
    ],
)
def test_a_bad_combination_is_refused_in_words(run_files, overrides, field, words):
    found = problems(run_files, *overrides)
    assert any(line.startswith(f"{field}: got ") and words in line for line in found), found
    assert all("; allowed: " in line and "; fix: " in line for line in found)


def test_all_failed_checks_are_reported_together(run_files, cpu):
    overrides = [
        "rollout.temperature=0",
        "trainer.updates_per_batch=7",
        "actor.pipeline_parallel=3",
        "actor.precision=fp8",
    ]
    with pytest.raises(ConfigError, match="4 problems") as caught:
        resolve_and_check(run_files.file, overrides, cpu)
    for field in ("rollout.temperature", "trainer.updates_per_batch", "actor.pipeline_parallel", "actor.precision"):
        assert f"  {field}: got " in str(caught.value)


def test_a_world_larger_than_the_gpus_is_refused(run_files):
    layout = [
        "actor.tensor_parallel=2",
        "actor.pipeline_parallel=2",
        "actor.context_parallel=2",
        "actor.data_parallel=2",
    ]
    (line,) = problems(run_files, *layout, hardware=GPUS)
    assert "TP 2 * PP 2 * CP 2 * DP 2 = 16 ranks; allowed: at most 8 ranks" in line
    assert not problems(run_files, *layout[:2], hardware=GPUS)
    assert not problems(run_files, *layout)  # processes on a CPU are free


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            [*SERVERS, "actor.data_parallel=8"],
            "engine.replicas: got 1, with which actor and engine need 9 GPUs; allowed: what this machine can hold (8 "
            "x tensor-parallel group of 1 and 1 x server of 1 need 9 GPUs, each of them whole on one node; 1 node of ",
        ),
        ([*SERVERS, "engine.replicas=2", "engine.sglang.tensor_parallel=4"], "need 9 GPUs"),
        ([*SERVERS, "engine.replicas=7"], None),
        ([*SGLANG, "actor.data_parallel=8"], None),
        (["engine.replicas=8", "actor.data_parallel=8"], None),  # the embedded engine computes on the CPU
    ],
)
def test_ranks_and_servers_have_gpus_together_as_the_start_asks_for_them(run_files, overrides, says):
    found = problems(run_files, *overrides, hardware=GPUS)
    assert says in found[0] if says else not found


TWO_NODES = Hardware("gpu", 12, capability=None, nodes=(6, 6), place="the Ray cluster at head:6379")


def test_what_counts_is_the_cluster_that_will_run_it(run_files):
    assert not problems(run_files, "actor.data_parallel=12", hardware=TWO_NODES)
    (line,) = problems(run_files, "actor.data_parallel=13", hardware=TWO_NODES)
    assert "at most 12 ranks: one per GPU of the Ray cluster at head:6379" in line
    assert not problems(run_files, "engine.replicas=300", hardware=TWO_NODES)  # whose memory is not known here
    assert not problems(run_files, "actor.precision=fp8", hardware=TWO_NODES)  # nor its GPUs' type


def test_a_tensor_parallel_group_must_find_room_on_one_node(run_files):
    (line,) = problems(run_files, "actor.tensor_parallel=2", "actor.data_parallel=4", hardware=GPUS_OF_3)
    assert line.startswith("actor.tensor_parallel: got TP 2")
    assert "need 8 GPUs, each of them whole on one node; 3 nodes of 3 with 9 GPUs in all: no room for 1 of them" in line
    assert not problems(run_files, "actor.tensor_parallel=2", "actor.data_parallel=3", hardware=GPUS_OF_3)


GPUS_OF_3 = Hardware("gpu", 9, capability=9.0, nodes=(3, 3, 3))


def test_the_section_cluster_stands_for_machines_that_are_not_here(run_files):
    nodes = ["cluster.nodes=16", "cluster.gpus_per_node=8", "actor.data_parallel=128"]
    assert not problems(run_files, *nodes)
    (line,) = problems(run_files, *nodes[1:])
    assert "at most 8 ranks: one per GPU of the nodes of the section cluster" in line
    fp8 = [*nodes, "actor.precision=fp8"]
    assert not problems(run_files, *fp8, "cluster.gpu=H100")
    assert not problems(run_files, *fp8)
    assert not problems(run_files, *fp8, "cluster.gpu=X1")  # a type that nobody knows
    assert "capability 8, it needs 8.9" in problems(run_files, *fp8, "cluster.gpu=A100-80G")[0]
    (line,) = problems(run_files, *fp8, "actor.fp8_recipe=mxfp8", "cluster.gpu=H200")
    assert "fix: set actor.fp8_recipe=" in line


def test_servers_that_share_gpus_may_be_on_many_nodes_with_weights_by_handles(run_files):
    turns = [*SERVERS, "engine.colocate=true", "rollout.max_staleness=0", "engine.sglang.sync=tensor"]
    nodes = ["cluster.nodes=4", "cluster.gpus_per_node=8", "cluster.gpu=H100"]
    sizes = [
        "actor.tensor_parallel=4",
        "actor.data_parallel=8",
        "engine.replicas=16",
        "engine.sglang.tensor_parallel=2",
    ]
    assert not [line for line in problems(run_files, *turns, *nodes, *sizes) if "node" in line]
    apart = [word for word in turns if "colocate" not in word]
    assert "all of them on one node" in " ".join(problems(run_files, *apart, *nodes, *sizes))


def test_three_hundred_engines_do_not_fit_into_this_machine(run_files):
    small = Hardware("cpu", 4, memory_bytes=64 * 2**30)
    (line,) = problems(run_files, "engine.replicas=300", hardware=small)
    assert "301 processes of at least 256 MiB each; allowed: what fits into 64 GiB" in line
    assert not problems(run_files, "engine.replicas=200", hardware=small)
    assert "reward.workers: got 1025" in problems(run_files, "reward.workers=1025", hardware=small)[0]
    assert detect().memory_bytes > 2**28


def test_servers_get_seeds_that_numpy_takes(run_files):
    servers = ["engine.kind=sglang", "engine.replicas=2"]
    assert not problems(run_files, *servers, f"trainer.seed={2**32 - 2}")
    assert "SGLang servers" in problems(run_files, *servers, f"trainer.seed={2**32 - 1}")[0]
    assert not problems(run_files, f"trainer.seed={2**63 - 1}")


def test_idle_gpus_and_crowded_cores_are_warnings(run_files):
    (line,) = warnings(run_files, *SERVERS, "actor.tensor_parallel=2", hardware=GPUS)
    assert "set actor.data_parallel=3, or more engine.replicas" in line
    (line,) = warnings(run_files, "actor.data_parallel=8")
    assert "4 CPU cores are on this machine" in line


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        ([], "engine.kind", "set engine.kind=sglang"),
        ([*SGLANG, "actor.megatron.moe_router_fusion=true"], "actor.megatron.moe_router_fusion", "chooses by itself"),
    ],
)
def test_replayed_routing_needs_servers_that_tell_it_and_a_router_that_can_be_told(run_files, overrides, field, words):
    run_files.set_shape(**EXPERTS)
    found = problems(run_files, "actor.routing_replay=true", *overrides)
    assert any(field in text and words in text for text in found), found
    assert not any(words in text for text in problems(run_files, *overrides))


def test_routing_is_replayed_only_where_there_are_experts(run_files):
    found = problems(run_files, "actor.routing_replay=true", *SGLANG)
    assert any("actor.routing_replay" in text and "the model has no experts" in text for text in found), found


def test_fp8_is_accepted_where_gpus_and_libraries_have_it(run_files, monkeypatch):
    fp8 = "actor.precision=fp8"
    monkeypatch.setattr(precision, "_version", {"transformer_engine": (2, 20, 2)}.get)
    assert not problems(run_files, fp8, hardware=GPUS)
    assert "capability 8.6" in problems(run_files, fp8, hardware=Hardware("gpu", 8, capability=8.6))[0]
    both = {"transformer_engine": (2, 20, 2), "megatron-core": (0, 18, 2)}
    monkeypatch.setattr(precision, "_version", both.get)
    assert not problems(run_files, fp8, hardware=GPUS)
    run_files.set_shape(**EXPERTS)
    (line,) = problems(run_files, fp8, hardware=GPUS)
    assert "Megatron-core 0.18.2 with Transformer Engine 2.20.2 cannot save them" in line
    run_files.set_shape()
    monkeypatch.setattr(precision, "_version", lambda name: None)
    (line,) = problems(run_files, fp8, hardware=GPUS)
    assert "Transformer Engine is not installed" in line and "fix: install it (docs/gpu.md), or set" in line


def test_options_of_fp8_without_fp8_are_warnings(run_files):
    (line,) = warnings(run_files, "actor.fp8_recipe=mxfp8")
    assert line.startswith("actor.fp8_recipe: got mxfp8 with precision bf16; allowed: no effect")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.max_staleness=1"], "algorithm.correction.kind: got none with rollout.max_staleness 1"),
        (
            ["algorithm.trust_region=gspo"],
            "algorithm.trust_region: got gspo with clip_low 0.2 and clip_high",
        ),
    ],
)
def test_a_doubtful_combination_is_a_warning_only(run_files, overrides, words):
    assert any(words in line for line in warnings(run_files, *overrides))
    assert not problems(run_files, *overrides)


def _torn(run_files):
    path = run_files.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _shard_missing(run_files):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (run_files.model / "model.safetensors").rename(run_files.model / "model-1.safetensors")
    (run_files.model / "model.safetensors.index.json").write_text(json.dumps(index))


def _index(run_files, **weight_map):
    whole = (run_files.model / "model.safetensors").rename(run_files.model / "model-00001-of-00002.safetensors")
    (run_files.model / "model-00002-of-00002.safetensors").write_bytes(whole.read_bytes())
    (run_files.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _shard_unnamed(run_files):
    _index(run_files, w="model-00001-of-00002.safetensors")


def _tensor_unnamed(run_files):
    _index(run_files, w="model-00001-of-00002.safetensors", v="model-00002-of-00002.safetensors")


def _pickled(run_files):
    (run_files.model / "model.safetensors").rename(run_files.model / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda r: (r.model / "config.json").unlink(),
            "config.json does not exist. model.path must be a directory with a config.json",
        ),
        (lambda r: (r.model / "config.json").write_text('{"model_type'), "config.json cannot be read as JSON"),
        (lambda r: (r.model / "config.json").write_text("[]"), "config.json holds a JSON list, not an object"),
        (lambda r: r.set_shape(num_hidden_layers=None), "num_hidden_layers is missing"),
        (
            lambda r: r.set_shape(model_type="gpt2"),
            "model_type 'gpt2' is not supported; allowed: llama, mistral, mixtral, ",
        ),
        (lambda r: r.set_shape(eos_token_id=None), "the model's files name no end token"),
        (lambda r: r.set_shape(rope_scaling={"rope_type": "su"}), "rope type 'su' is not supported"),
        (lambda r: r.set_shape(quantization_config={"bits": 4}), "convert the checkpoint to bf16 first"),
        (lambda r: (r.model / "model.safetensors").unlink(), "no *.safetensors in"),
        (_pickled, "(only *.bin); allowed: model.safetensors"),
        (_torn, "model.safetensors: torn: "),
        (lambda r: (r.model / "model.safetensors").write_bytes(b"abc"), "too few for its header"),
        (lambda r: (r.model / "model.safetensors").write_bytes(b"\xff" * 7 + b"\0{}"), "10 bytes are too few for its"),
        (_shard_missing, "model-2.safetensors: missing"),
        (_shard_unnamed, "model-00002-of-00002.safetensors, which model.safetensors.index.json does not name"),
        (_tensor_unnamed, "model-00002-of-00002.safetensors with w, which model.safetensors.index.json does not name"),
        (lambda r: (r.model / "model.safetensors.index.json").write_text("{}"), "an index without weight_map"),
        (lambda r: (r.model / "tokenizer.json").unlink(), "no tokenizer in"),
        (lambda r: (r.model / "tokenizer.json").write_text('{"a'), "an unreadable tokenizer.json"),
        (lambda r: (r.root / "train.jsonl").write_text(" \n\n"), "an empty file"),
        (lambda r: (r.root / "train.jsonl").write_bytes(b"PAR1 torn"), "a torn Parquet file"),
    ],
)
def test_missing_and_torn_files_are_refused_in_words(run_files, spoil, words):
    assert not problems(run_files)
    spoil(run_files)
    found = problems(run_files)
    assert any(words in line for line in found), found


def test_a_data_file_of_another_container_is_refused(run_files):
    assert "no Parquet file, with format parquet" in problems(run_files, "data.format=parquet")[0]
    (run_files.root / "train.jsonl").write_bytes(b"PAR1 whole PAR1")
    assert not problems(run_files)
    assert "a Parquet file, with format jsonl" in problems(run_files, "data.format=jsonl")[0]


def test_evaluation_sets_are_checked_too(run_files):
    train = str(run_files.root / "train.jsonl")
    sets = [{"name": "a", "path": train}, {"name": "a", "path": "/nowhere", "rollouts_per_prompt": 4}]
    found = "\n".join(problems(run_files, f"data.eval={json.dumps(sets)}"))
    assert "data.eval: got the name 'a' 2 times" in found
    assert "data.eval.1.path: got '/nowhere', which is not there" in found
    assert "data.eval.1.temperature: got 0 with 4 rollouts per prompt" in found


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed: nothing to refuse")
def test_wandb_must_be_installed(run_files):
    assert 'pip install "megatron_daro[wandb]"' in problems(run_files, "observe.wandb.enabled=true")[0]


def test_real_model_shapes_divide_as_published(run_files):
    if not CONFIGS.is_dir():
        pytest.skip(f"{CONFIGS} is absent: no config.json of real models to look at")
    for name, tensor, fits in [("Qwen2.5-7B", 4, True), ("Qwen2.5-7B", 8, False), ("Llama-3.1-8B", 8, True)]:
        (run_files.model / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
        found = problems(run_files, f"actor.tensor_parallel={tensor}")
        assert (found == []) == fits, (name, tensor, found)


def test_a_safetensors_file_of_the_library_is_whole_until_cut(tmp_path):
    numpy = pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "m.safetensors"
    library.save_file({"a": numpy.zeros((3, 5), "float32"), "b": numpy.ones(7, "int64")}, path, metadata={"x": "y"})
    names, why = _tensor_names(path)
    assert sorted(names) == ["a", "b"] and why == ""
    path.write_bytes(path.read_bytes() + b"x")
    assert "its header promises" in _tensor_names(path)[1]


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed: no names")
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("use_precision_aware_optimizer=true", "clipping"),
        ("fp8_recipe=mxfp8", "set by actor.fp8_recipe; fix: remove it here"),
        ("fp8_param=true", "would begin from what the layers held before the model's files were loaded"),
        ("virtual_pipeline_model_parallel_size=2", "set by actor.virtual_pipeline_parallel; fix: remove it here"),
        ("clip_grad=1", "set by actor.optimizer.grad_clip; fix: remove it here"),
        ("bucket_sise=1000", "did you mean bucket_size"),
    ],
)
def test_options_of_megatron_are_looked_at_before_anything_starts(run_files, option, words):
    (problem,) = problems(run_files, f"actor.megatron.{option}")
    assert problem.startswith(f"actor.megatron.{option.split('=')[0]}: got ")
    assert words in problem


def test_good_options_of_megatron_pass(run_files):
    assert problems(run_files, "actor.megatron.overlap_grad_reduce=true", "actor.megatron.bucket_size=1000") == []


def test_unknown_passthrough_names_get_the_nearest():
    known = ["num_layers_in_first_pipeline_stage", "attention_dropout"]
    (problem,) = check_passthrough("actor.megatron", {"attention_drop": 0.1, "attention_dropout": 0.1}, known)
    assert str(problem).startswith("actor.megatron.attention_drop: got the unknown key 'attention_drop' with value 0.1")
    assert "did you mean attention_dropout?" in str(problem)


def test_algorithm_names_are_those_of_algo():
    pytest.importorskip("torch", reason="algo needs torch")
    from megatron_daro.algo.weighting import ALGORITHMS, WITH_CRITIC
    from megatron_daro.config.algorithm import ALGORITHM_NAMES

    assert (*ALGORITHMS, *WITH_CRITIC) == ALGORITHM_NAMES


def test_daro_defaults_are_those_of_algo():
    torch = pytest.importorskip("torch", reason="algo needs torch")
    difficulty = pytest.importorskip("megatron_daro.algo.difficulty_weights")
    from megatron_daro.config import DaroSection

    options = DaroSection().model_dump()
    plain = difficulty.DifficultyWeights(8)
    configured = difficulty.DifficultyWeights(8, **options)
    sums, counts = torch.linspace(-1, 1, 9), torch.arange(1, 10)
    for weights in (plain, configured):
        weights.update(sums, counts, sums.abs())
    assert torch.equal(plain.weights, configured.weights)
