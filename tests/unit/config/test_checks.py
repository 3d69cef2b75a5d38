"""What the checks report of a configuration that is not refused: what they found fit, and warnings."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from megatron_daro.config import Hardware, check, detect, resolve, resolve_and_check
from megatron_daro.config.hardware import unknown
from megatron_daro.config.model_files import critic_shape
from megatron_daro.config.model_shape import read_model_shape

SERVERS = "engine.kind=sglang engine.sglang.python=/usr/bin/python3"
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"norm_topk_prob": True, "head_dim": 8}
CONFIGS = Path(__file__).resolve().parents[4] / "shared" / "data" / "configs"


def report(run_files, options: str = "", hardware: Hardware | None = None):
    return check(resolve(run_files.file, options.split()), hardware or Hardware("cpu", 4))


def test_a_good_run_passes_every_check_with_the_numbers_of_the_run(run_files, cpu):
    _, found = resolve_and_check(run_files.file, (), cpu)
    assert found.problems == found.warnings == ()
    run_files.set_shape(**EXPERTS)
    found = report(
        run_files,
        "actor.tensor_parallel=2 actor.pipeline_parallel=4 actor.data_parallel=4 actor.expert_parallel=2 "
        "trainer.minibatches_per_batch=4 engine.kind=sglang engine.sglang.urls=[http://h:1,http://h:2] trainer.steps=9 "
        "cluster.nodes=4 cluster.gpus_per_node=8 algorithm.name=grpo rollout.rollouts_per_prompt=4",
    )
    passed = {subject: set(re.findall(r"\w+", text)) for subject, text in found.passed}
    assert passed["world size"] >= {"TP", "2", "PP", "4", "CP", "1", "DP", "32", "EP"}
    assert passed["processes"] >= {"32", "2", "sglang"} and passed["model division"] >= {"4", "8", "2"}
    assert passed["batch"] >= {"256", "64"} and passed["sequence budget"] >= {"5120", "16384"}
    assert passed["precision"] >= {"bf16", "32"} and passed["algorithm"] == {"grpo"} and "9" in passed["run"]


@pytest.mark.parametrize(
    ("options", "sync"),
    [
        ("lora.rank=4", "adapters"),
        ("lora.rank=4 engine.sglang.sync=disk", "disk"),
        ("lora.rank=4 lora.targets=[k_proj]", "distributed"),
        ("", "distributed"),
    ],
)
def test_servers_get_adapters_alone_where_they_can_and_nothing_else_is_said(run_files, cpu, options, sync):
    config, _ = resolve_and_check(run_files.file, f"{SERVERS} {options}".split(), cpu)
    assert config.engine.sglang.sync == sync


def test_a_check_with_a_problem_is_not_among_those_that_passed(run_files):
    found = report(run_files, "rollout.temperature=0 model.path=/nowhere")
    assert {problem.field for problem in found.problems} == {"model.path", "rollout.temperature"}
    subjects = dict(found.passed).keys()
    assert "batch" in subjects and not {"model files", "sampling"} & subjects


# Options | the option that is warned of | what makes it right, where the fix does not name a value.
WARNED = f"""
lora.rank=4 | lora.rank | engine.kind=sglang engine.sglang.sync=adapters
{SERVERS} lora.rank=4 engine.sglang.sync=distributed | lora.rank | engine.sglang.sync=adapters
cluster.gpus_per_node=8 {SERVERS} actor.tensor_parallel=2 | actor | actor.data_parallel=3
cluster.gpus_per_node=8 actor.tensor_parallel=2 actor.data_parallel=2 | actor |
cluster.gpus_per_node=8 {SERVERS} engine.replicas=4 actor.data_parallel=2 | actor |
actor.data_parallel=5 | actor | actor.data_parallel=4
actor.fp8_recipe=mxfp8 | actor.fp8_recipe | actor.fp8_recipe=tensorwise
actor.num_layers_at_end_in_bf16=1 | actor.num_layers_at_end_in_bf16 | actor.num_layers_at_end_in_bf16=0
{SERVERS} engine.embedded.threads=2 | engine.embedded |
data.curriculum.start=0.5 | data.curriculum | data.order=curriculum
data.order=curriculum data.prioritised.floor=0.5 | data.prioritised |
data.order=curriculum data.shuffle=false | data.shuffle |
algorithm.sapo.positive=2 | algorithm.sapo |
algorithm.correction.cap=3 | algorithm.correction |
trainer.snapshot_gib=1 | trainer.snapshot_gib |
trainer.max_replacements=1 | trainer.max_replacements |
{SERVERS} trainer.hung_rank_s=20 | trainer.hung_rank_s |
rollout.max_staleness=1 | algorithm.correction.kind |
algorithm.trust_region=gspo algorithm.clip_high=0.011 | algorithm.trust_region |
  algorithm.clip_low=0.01 algorithm.clip_high=0.01
algorithm.name=kimi | trainer.minibatches_per_batch |
algorithm.name=kimi trainer.minibatches_per_batch=4 algorithm.clip_high=0.3 | algorithm.clip_high |
algorithm.name=grpo_sequence algorithm.kl.coefficient=0.1 | algorithm.kl.mean |
algorithm.name=ha_dw trainer.minibatches_per_batch=2 | algorithm.options.every |
algorithm.name=dgpo reward.correct_reward=2 | algorithm.options.deviation |
algorithm.name=dgpo algorithm.overlong.kind=penalty reward.incorrect_reward=-1 | algorithm.options.deviation |
algorithm.name=dgpo algorithm.length_reward.weight=0.1 | algorithm.options.deviation |
algorithm.name=dgpo algorithm.kl.coefficient=0.1 algorithm.kl.place=reward | algorithm.options.deviation |
algorithm.overlong.kind=both | reward.incorrect_reward |
"""


@pytest.mark.parametrize("case", re.sub(r"\n +", " ", WARNED.strip()).splitlines())
def test_what_is_probably_not_meant_is_a_warning_and_its_fix_ends_it(run_files, case):
    options, field, right = (part.strip() for part in case.split("|"))
    found = report(run_files, options)
    assert found.problems == ()
    (warning,) = found.warnings
    assert warning.field == field and warning.got and warning.allowed
    right = right or " ".join(re.findall(r"[\w.]+=[^\s,;]+", warning.fix)[:1])
    assert "=" in right and report(run_files, f"{options} {right}").warnings == (), warning.fix


@pytest.mark.parametrize(
    "options",
    [
        "algorithm.name=dgpo",
        "algorithm.name=ha_dw",
        "algorithm.overlong.kind=filter",
        "rollout.max_staleness=1 algorithm.old_logprobs=rollout",
    ],
)
def test_options_that_are_as_published_are_not_warned_of(run_files, options):
    assert report(run_files, options).warnings == ()


@pytest.mark.parametrize(
    ("asked", "coefficient"),
    [
        ({"output_router_logits": True, "router_aux_loss_coef": 0.02}, "0.02"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, None),
        ({"router_aux_loss_coef": 0.02}, None),
    ],
)
def test_training_without_the_balancing_loss_of_a_model_is_a_warning(run_files, asked, coefficient):
    run_files.set_shape(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, **asked)
    warnings = report(run_files).warnings
    assert len(warnings) == (coefficient is not None)
    assert all(coefficient in warning.got for warning in warnings)


@pytest.mark.parametrize("layers", [0, 1])
def test_training_without_the_layers_that_predict_further_tokens_is_a_warning(run_files, layers):
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    run_files.set_shape(model_type="glm4_moe", **experts, num_nextn_predict_layers=layers)
    warnings = report(run_files).warnings
    assert [f"num_nextn_predict_layers {layers}" in warning.got for warning in warnings] == [True] * layers


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("actor.precision=fp8", "actor.precision"),
        ("actor.context_parallel=2", "actor.context_parallel"),
        ("actor.tensor_parallel=4", "actor.tensor_parallel"),
        ("engine.sglang.sync=shards", "engine.sglang.sync"),
        ("engine.sglang.fp8_blocks=true", "engine.sglang.fp8_blocks"),
    ],
)
def test_what_linear_attention_does_not_have_is_refused(run_files, option, field):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    run_files.set_shape(model_type="qwen3_next", **experts, linear_num_key_heads=2, linear_num_value_heads=4)
    gpus = Hardware("gpu", 8, capability=9.0)
    assert report(run_files, "engine.kind=sglang", gpus).problems == ()
    problems = report(run_files, f"engine.kind=sglang {option}", gpus).problems
    assert field in [problem.field for problem in problems if "linear attention" in problem.allowed]


LATENT = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 2,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 0,
}


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("actor.precision=fp8", "actor.precision"),
        ("actor.routing_replay=true", "actor.routing_replay"),
        ("engine.sglang.sync=shards", "engine.sglang.sync"),
        ("engine.sglang.fp8_blocks=true", "engine.sglang.fp8_blocks"),
        ("actor.context_parallel=2", "actor.context_parallel"),
    ],
)
def test_what_was_never_compared_with_latent_attention_is_refused(run_files, monkeypatch, option, field):
    core = ["0.16.1"]

    def version(name):
        if name != "megatron-core":
            raise metadata.PackageNotFoundError(name)
        return core[0]

    monkeypatch.setattr(metadata, "version", version)
    run_files.set_shape(**LATENT)
    gpus = Hardware("gpu", 8, capability=9.0)
    assert report(run_files, "engine.kind=sglang", gpus).problems == ()
    problems = report(run_files, f"engine.kind=sglang {option}", gpus).problems
    assert field in [problem.field for problem in problems if "latent attention" in problem.allowed]
    core[0] = "0.17.0"
    assert report(run_files, "actor.context_parallel=2", gpus).problems == ()


def test_a_run_that_goes_elsewhere_is_checked_against_what_is_there(run_files):
    cluster = Hardware("gpu", 12, capability=None, nodes=(6, 6), place="the Ray cluster at head:6379")
    assert report(run_files, "actor.data_parallel=12", cluster).problems == ()
    (problem,) = report(run_files, "actor.data_parallel=13", cluster).problems
    assert problem.field == "actor" and "head:6379" in problem.allowed
    assert detect().memory_bytes > 2**28


def test_nothing_is_refused_for_what_is_not_known(run_files):
    cluster = Hardware("gpu", 12, capability=None, nodes=(6, 6), place="the Ray cluster at head:6379")
    options = "engine.replicas=300 actor.precision=fp8 reward.workers=5000"
    assert report(run_files, options, cluster).problems == ()
    options += f" {SERVERS} engine.sglang.sync=tensor actor.data_parallel=99"
    assert report(run_files, options, unknown("a cluster that does not answer")).problems == ()


def test_fp8_needs_the_packages_of_this_machine_where_it_runs_here(run_files, monkeypatch):
    """Packages are those of this environment; on other machines one that is absent here says nothing."""
    versions = {"transformer_engine": "2.20.2", "megatron-core": "0.18.2"}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    here, fp8 = Hardware("gpu", 1, capability=9.0), "actor.precision=fp8"
    assert report(run_files, fp8, here).problems == ()
    run_files.set_shape(**EXPERTS)
    (problem,) = report(run_files, fp8, here).problems
    assert problem.field == "actor.precision" and "0.18.2" in problem.got and "2.20.2" in problem.got
    versions["megatron-core"] = "0.19.0"
    assert report(run_files, fp8, here).problems == ()
    del versions["transformer_engine"]
    (problem,) = report(run_files, fp8, here).problems
    assert problem.field == "actor.precision" and "Transformer Engine" in problem.got
    assert report(run_files, fp8, Hardware("gpu", 1, capability=9.0, place="there")).problems == ()


def test_real_model_shapes_divide_as_published(run_files):
    if not CONFIGS.is_dir():
        pytest.skip(f"{CONFIGS} is absent: no config.json of real models to look at")
    for name, tensor, fits in [("Qwen2.5-7B", 4, True), ("Qwen2.5-7B", 8, False), ("Llama-3.1-8B", 8, True)]:
        (run_files.model / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
        assert (report(run_files, f"actor.tensor_parallel={tensor}").problems == ()) == fits, (name, tensor)


@pytest.mark.parametrize(
    ("name", "path", "counted"),
    [
        ("grpo", False, False),
        ("ppo", False, True),
        ("ppo", True, True),
        ("my:Own", False, False),
        ("my:Own", True, True),
    ],
)
def test_a_critic_of_ones_own_is_counted_by_its_path(run_files, name, path, counted):
    policy, options = read_model_shape(run_files.model), [f"algorithm.name={name}"]
    if path:
        options.append(f"algorithm.critic.path={run_files.model}")
    assert critic_shape(resolve(run_files.file, options), policy) == (policy if counted else None)


def test_algorithms_and_their_traits_are_those_of_algo():
    pytest.importorskip("torch", reason="algo needs torch")
    from megatron_daro.algo import weighting
    from megatron_daro.config.algorithm import TRAITS, Traits

    assert list(TRAITS) == [*weighting.ALGORITHMS, *weighting.WITH_CRITIC]
    for name, cls in {**weighting.ALGORITHMS, **weighting.WITH_CRITIC}.items():
        assert TRAITS[name] == Traits(
            critic="values" in (cls.token_columns or ()),
            difficulty_weights=issubclass(cls, weighting.Daro),
            own_surrogate=cls.own_objective is not weighting.Algorithm.own_objective,
        ), name


def test_daro_defaults_are_those_of_algo():
    torch = pytest.importorskip("torch", reason="algo needs torch")
    difficulty = pytest.importorskip("megatron_daro.algo.difficulty_weights")
    from megatron_daro.config import DaroSection

    options = DaroSection().model_dump(exclude={"weights_by"})
    plain = difficulty.DifficultyWeights(8)
    configured = difficulty.DifficultyWeights(8, **options)
    sums, counts = torch.linspace(-1, 1, 9), torch.arange(1, 10)
    for weights in (plain, configured):
        weights.update(sums, counts, sums.abs())
    assert torch.equal(plain.weights, configured.weights)
