"""The typed sections of the configuration, and `Config`, which holds one of each.

Loading builds one Config; the composition root hands each component its own section and no
more. Refuses unknown keys and later writes. What spans two sections is in checks.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.base import ExpandedPath, OneOf, Section, Seed, filled

DataFormat = Literal["auto", "jsonl", "parquet", "gsm8k", "dapo"]
FieldName = Annotated[str, Field(min_length=1)]


class ModelSection(Section):
    """The model to train."""

    path: ExpandedPath
    """Local directory with config.json, *.safetensors and the tokenizer files (Hugging Face layout)."""
    megatron_weights: ExpandedPath | None = None
    """Megatron checkpoint (of `megatron-daro convert`, of a run, or torch_dist of Megatron-LM) whose weights training
    starts from. Unset: those in path."""
    trust_remote_code: bool = False
    """Allow Python code that lies beside the model to run. Off unless asked for."""


EvalTemplate = Literal["data", "chat", "qwen-math", "r1", "none"]
"""How an evaluation writes its problems."""


class EvalSet(Section):
    """One held-out set of problems."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    """Its name in metrics (eval/{name}/accuracy); letters, digits, _ . and -."""
    path: ExpandedPath
    """File of problems."""
    format: DataFormat = "auto"
    """Layout of the file; auto: recognised by its content."""
    problem_field: FieldName | None = None
    """Name of the field with the problem. Unset: as the format has it."""
    answer_field: FieldName | None = None
    """Name of the field with the answer. Unset: as the format has it."""
    rollouts_per_prompt: int = Field(default=1, ge=1, le=65536)
    """Answers per problem; accuracy is their mean. 1 to 65536."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    """Sampling temperature; 0: greedy, else 0.001 to 100."""
    top_p: float = Field(default=1.0, ge=1e-6, le=1)
    """Nucleus sampling, in [1e-6, 1]; 1: off."""
    template: EvalTemplate = "data"
    """How a problem is written. data: as data.prompt_template and data.template, like the training data; the others:
    templates that papers evaluate with (docs/evaluate.md has their texts)."""
    rows: int | None = Field(default=None, ge=1)
    """Rows that the file must have; another number is an error. Unset: any."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Only the first so many problems. Unset: all."""
    drop_unusable: bool = False
    """Leave out rows without problem or answer and prompts that are too long, and score the rest. Off: one such row is
    an error, since the accuracy would be that of another set."""


class CurriculumSection(Section):
    """Easy to hard, by the pass rates that the files store."""

    start: float = Field(default=0.2, ge=1e-6, le=1)
    """Share of the problems, the easiest ones, that is open at first, in [1e-6, 1]."""
    ramp_prompts: int | None = Field(default=None, ge=1)
    """Prompts drawn until all problems are open; the share grows linearly. Unset: half of the prompts that
    trainer.steps take. >= 1."""


class PrioritisedSection(Section):
    """More of what the run fails on."""

    by: Literal["failure", "signal"] = "failure"
    """failure: priority grows with the recent failure rate f; signal: with 4 f (1 - f), so that problems that are
    always failed come as seldom as solved ones."""
    exponent: float = Field(default=1.0, ge=1e-3, le=100)
    """Power of the failure rate (or signal), 0.001 to 100."""
    floor: float = Field(default=0.1, ge=0, le=1)
    """Priority of a problem that is always solved, beside 1, in [0, 1]."""
    memory: float = Field(default=1.0, ge=0, le=1e6)
    """Visits after which an earlier failure rate counts half; 0: only the last visit counts. 0 to 1e6."""


class DataSection(Section):
    """Prompts and how they are written for the model."""

    train: Annotated[tuple[ExpandedPath, ...], Field(min_length=1)]
    """Files of training problems, at least one."""
    format: DataFormat = "auto"
    """Layout of the training files; auto: recognised by their content."""
    problem_field: FieldName | None = None
    """Name of the field with the problem. Unset: as the format has it."""
    answer_field: FieldName | None = None
    """Name of the field with the answer. Unset: as the format has it."""
    prompt_template: Literal["chat", "plain"] = "chat"
    """chat: the tokenizer's chat template around the text; plain: the text alone."""
    template: Annotated[str, Field(pattern=r"\{prompt\}")] = "{prompt}"
    """Text of the prompt (the user's message with chat); must contain {prompt}, where the problem goes."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are dropped and counted; tokens, >= 1."""
    shuffle: bool = True
    """Shuffle in each epoch, from trainer.seed."""
    order: Literal["epochs", "curriculum", "prioritised"] = "epochs"
    """epochs: each problem once an epoch; curriculum: easy to hard, by the pass rates that the files store;
    prioritised: by how often the run failed lately, at first by stored pass rates where there are some."""
    curriculum: CurriculumSection = CurriculumSection()
    """Options of order curriculum."""
    prioritised: PrioritisedSection = PrioritisedSection()
    """Options of order prioritised."""
    eval: tuple[EvalSet, ...] = ()
    """Held-out sets."""


class RolloutSection(Section):
    """How much is sampled, and how."""

    prompts_per_step: int = Field(default=64, ge=1, le=65536)
    """Prompts (groups) in one training batch, 1 to 65536."""
    rollouts_per_prompt: int = Field(default=8, ge=2, le=65536)
    """Rollouts per prompt (K), 2 to 65536: a pass rate needs at least two answers, and every k has a bin."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Sampling temperature, > 0 for training (at least 0.001), at most 100."""
    top_p: float = Field(default=1.0, ge=1e-6, le=1)
    """Nucleus sampling, in [1e-6, 1]; 1: off."""
    max_response_tokens: int = Field(default=4096, ge=1)
    """Longest answer, in tokens, >= 1."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer; each must be one token of the tokenizer. The model's own end token always counts."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Token ids that end an answer."""
    max_staleness: int = Field(default=0, ge=0, le=1024)
    """Batches by which generation may run ahead of training; 0: synchronous, at most 1024."""
    oversampling: float = Field(default=1.0, ge=1, le=100)
    """Prompts requested at first, as a multiple of prompts_per_step; 1 to 100."""
    max_refill_rounds: int = Field(default=3, ge=0, le=1000)
    """Further rounds of prompts when too few groups were left; then the smaller batch is trained. 0 to 1000."""
    keep_surplus: bool = False
    """Keep groups beyond the batch for the next step instead of dropping them, unfinished ones with their tokens so
    far (finish_batch enough). They are a batch older when they are used, so generation runs ahead by one batch fewer
    than max_staleness, which must be >= 1."""
    finish_batch: Literal["auto", "all", "enough"] = "auto"
    """all: every round waits for all of its groups, so that a run repeats exactly; enough: a batch is complete as soon
    as prompts_per_step trainable groups are, the rest is aborted; auto: all with the embedded engine, else enough."""

    @property
    def batch_rollouts(self) -> int:
        """Samples of one training batch: prompts_per_step * rollouts_per_prompt."""
        return self.prompts_per_step * self.rollouts_per_prompt

    @property
    def prompts_requested(self) -> int:
        """Prompts of the first round of a step."""
        return math.ceil(self.prompts_per_step * self.oversampling)

    @property
    def batches_ahead(self) -> int:
        """Batches by which generation runs ahead: what is kept for the next one must not be too old for it."""
        return max(self.max_staleness - self.keep_surplus, 0)

    def finishes_early(self, engine_kind: str) -> bool:
        """Whether a batch ends before all of its groups do: `finish_batch`, with auto resolved for this engine."""
        return self.finish_batch == "enough" or (self.finish_batch == "auto" and engine_kind != "embedded")


class EmbeddedSection(Section):
    """The engine that runs in a process of the job."""

    batch_size: int = Field(default=64, ge=1, le=65536)
    """Rows generated together, 1 to 65536."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of each replica, at most 1024. Unset: torch's default."""


CPU_BUCKET_MIB, GPU_BUCKET_MIB = 64, 256
"""engine.sglang.bucket_mib where it is unset, by what the servers run on."""
SHARED_FRACTION = 0.6
"""mem_fraction_static of servers that take turns with ranks, where it is unset: for weights and cache."""


class SGLangSection(Section):
    """SGLang servers: how they are started, fed, kept in step with the policy, and given up."""

    python: ExpandedPath | None = None
    """Python interpreter that has sglang, with which servers are started. Unset: the one of the trainer."""
    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+$")], ...] = ()
    """Servers that run already, as http://host:port; then none is started and engine.replicas is not used."""
    arguments: dict[str, Any] = {}
    """Server arguments under their upstream names, such as mem_fraction_static or attention_backend."""
    env: dict[str, str] = {}
    """Environment variables of the servers."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs (on a CPU: ranks) of each server, >= 1."""
    nodes: int = Field(default=1, ge=1)
    """Places that each server is spread over, each whole on one node, with an equal part of its GPUs: for a model too
    large for the GPUs of a node. >= 1."""
    sync: Literal["distributed", "disk", "tensor"] = "distributed"
    """How weights reach the servers. distributed: broadcast in a process group (NCCL, or gloo on CPU); disk: files in
    sync_dir, which trainer and servers must both see; tensor: CUDA IPC, to each server from a rank of
    its host."""
    fp8_blocks: bool = False
    """Matrices of the layers are sent as fp8 blocks of 128 x 128 with their scales, and servers compute with these.
    Needs GPUs of compute capability 8.9 or 9.0, and SGLang 0.5.23."""
    sync_dir: ExpandedPath | None = None
    """Directory of the weight files of sync disk. Unset: RUN/sync."""
    bucket_mib: int | None = Field(default=None, ge=1, le=65536)
    """Weights are sent in buckets of at most this many MiB, or one larger tensor; the sender holds two. Unset: 64 to
    servers on a CPU, else 256. 1 to 65536."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """Requests that run while weights change. retract: go on under the new weights with their cache computed anew;
    in_place: go on with the old cache; abort: end, and are requested again."""
    verify: bool = True
    """After each update compare log-probs of a fixed prompt, and checksums of some tensors where servers have them."""
    answer_workers: int | None = Field(default=None, ge=1, le=4096)
    """Processes that ask the servers, parse what they say and turn tokens into text, spread over the Ray nodes. Unset:
    one on each node. 1 to 4096."""
    max_tokens_in_flight: int | None = Field(default=None, ge=1)
    """Tokens (prompt and expected answer) that one server is given at once. Unset: twice what its cache holds."""
    start_timeout_s: float = Field(default=1800.0, ge=0.01, le=1e6)
    """Until a server generates its first token, in seconds, 0.01 to 1e6."""
    request_timeout_s: float = Field(default=3600.0, ge=0.01, le=1e6)
    """Until the answers of one group arrive, in seconds; then it is requested elsewhere. 0.01 to 1e6."""
    stall_timeout_s: float = Field(default=60.0, ge=0.01, le=1e6)
    """Time without any progress after which a server is given up, in seconds, 0.01 to 1e6."""
    sync_timeout_s: float = Field(default=300.0, ge=0.01, le=1e6)
    """Each call of a weight update, and each broadcast, in seconds, 0.01 to 1e6."""
    max_restarts: int = Field(default=20, ge=0)
    """Times that each server is started again after it failed, >= 0."""

    @property
    def named_arguments(self) -> dict[str, Any]:
        """`arguments`, however they were spelled, with underscores in their names."""
        return {name.replace("-", "_"): value for name, value in self.arguments.items()}


class EngineSection(Section):
    """The rollout engine."""

    kind: Annotated[str, OneOf(("embedded", "sglang"))] = "embedded"
    """embedded: transformers in a process of the job; sglang: SGLang servers; module:Class: an engine of your own."""
    options: dict[str, Any] = {}
    """Options of an engine of your own: keyword arguments of its constructor."""
    replicas: int = Field(default=1, ge=1, le=65536)
    """Engines that share the prompts, 1 to 65536."""
    seed: Seed | None = None
    """Seed of sampling. Unset: trainer.seed."""
    colocate: bool = False
    """SGLang servers and the actor's ranks share GPUs in turns: servers give their memory back while a batch is
    trained, and ranks move theirs to the host while one is generated. Off: each has GPUs of its own."""
    embedded: EmbeddedSection = EmbeddedSection()
    """Options of the embedded engine."""
    sglang: SGLangSection = SGLangSection()
    """Options of SGLang servers."""

    @property
    def is_own(self) -> bool:
        """Whether `kind` is module:Class."""
        return ":" in self.kind

    @property
    def own_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the constructor of an engine of one's own, beside model_path."""
        return {"replicas": self.replicas, "seed": filled(self.seed), **self.options}


class RewardSection(Section):
    """The verifier and its worker processes."""

    verifier: Annotated[str, OneOf(("math", "integer", "exact"))] = "math"
    """math: math-verify on the last boxed answer; integer: DAPO's last `Answer:` line; exact: equal text;
    module:Class: a verifier of your own."""
    options: dict[str, Any] = {}
    """Options of a verifier of your own: keyword arguments of its constructor."""
    workers: int = Field(default=2, ge=1, le=65536)
    """Worker processes in sum, spread over the Ray nodes with at least one on each; 1 to 65536."""
    timeout_s: float = Field(default=5.0, ge=0.01, le=1e5)
    """Longest time for one answer, in seconds; the worker is then killed and replaced. 0.01 to 1e5."""
    memory_mib: int = Field(default=1024, ge=64, le=2**20)
    """Most memory one answer may take beyond the idle worker, in MiB, 64 to 1048576."""
    strict: bool = True
    """Accept only an answer in the asked form (a box, an Answer line, the marker); off: also a trailing number."""
    marker: Annotated[str, Field(min_length=1)] = "####"
    """exact: the text before the answer."""
    refuse_restated: bool = False
    """math: an expression that stands in the problem's statement is no answer (numbers and words always are one)."""
    correct_reward: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Reward of a correct answer; above incorrect_reward, at most 1e6."""
    incorrect_reward: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Reward of a wrong answer (DAPO uses -1), at least -1e6."""

    @property
    def is_own(self) -> bool:
        """Whether `verifier` is module:Class."""
        return ":" in self.verifier


class EnvironmentSection(Section):
    """What happens between a prompt and its verdict."""

    kind: Annotated[str, OneOf(("single_turn",))] = "single_turn"
    """single_turn: one answer, judged by reward.verifier; module:Class: an environment of your own, with `reset` and
    `step` in worker processes, or with `rollout`, which asks the model as often as it wants and judges."""
    options: dict[str, Any] = {}
    """Options of an environment of your own: keyword arguments of its constructor."""
    timeout_s: float = Field(default=300.0, ge=0.01, le=1e6)
    """Longest time that one conversation may spend outside the engine and the verifiers, in seconds, 0.01 to 1e6; then
    it is ended, counted and begun again."""
    workers: int = Field(default=2, ge=1, le=65536)
    """Worker processes of an environment with `step`, beside the driver; 1 to 65536."""
    step_timeout_s: float = Field(default=30.0, ge=0.01, le=1e6)
    """Longest time of one `reset` or `step` in a worker, in seconds, 0.01 to 1e6; then the worker is ended, and the
    conversation begun again."""
    memory_mib: int = Field(default=1024, ge=64, le=2**20)
    """Resident memory of one worker and all that it starts, in MiB, 64 to 2^20."""
    max_turns: int = Field(default=16, ge=1, le=10000)
    """Most answers of the model in a conversation of an environment with `step`, 1 to 10000."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one of its answers. Unset: what rollout.max_response_tokens leaves."""
    strict: bool = False
    """Compare each finished conversation of an environment with `step` with the text that the chat template writes of
    its whole history; a difference ends the run."""

    @property
    def is_own(self) -> bool:
        """Whether `kind` is module:Class."""
        return ":" in self.kind


class TrainerSection(Section):
    """The run."""

    run_dir: ExpandedPath | None = None
    """Directory of the run. Unset: runs/ and the name of the configuration file without its ending."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run, >= 1; a batch of prompts_per_step prompts gives updates_per_batch of them."""
    seed: Seed = 0
    """Seed of everything random, in [0, 2^63)."""
    save_every_steps: int = Field(default=20, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that stay on disk, >= 1."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Checkpoints of multiples of this many optimizer steps stay for good; 0: none do."""
    export_hf: bool = False
    """When all steps are done, write the model to RUN/hf as a Hugging Face directory (weights in bf16 or fp32, config,
    tokenizer) for transformers, vLLM and SGLang. With --resume also afterwards: a finished run only writes it."""
    eval_every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations on data.eval; also before the first step and after the last. 0: never."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """NaN or infinity in loss or gradient: stop (exit code 3), or skip the step and count it. The batch is written
    out either way."""
    deadline_scale: float = Field(default=1.0, ge=1e-3, le=1000)
    """Factor of the limit of every wait in the loop (an optimizer step 4 h, a sync 30 min, ...), 0.001 to 1000."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps (mini-batches) per batch, >= 1; divides the samples of a batch."""

    @property
    def hf_dir(self) -> Path:
        """Where the trained model goes if it is exported."""
        return filled(self.run_dir) / "hf"


class ClusterSection(Section):
    """The nodes that the run will get, for checks on a machine that is not one of them; a start asks Ray itself."""

    nodes: int = Field(default=1, ge=1)
    """Nodes, >= 1."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs of each node, >= 1. Unset: what the Ray cluster of RAY_ADDRESS has, or this machine."""
    gpu: Annotated[str, Field(min_length=1)] | None = None
    """Their type, such as H100, as Ray calls it. Unset: not known; whether it has fp8 shows at the start."""


class WandbSection(Section):
    """Weights & Biases."""

    enabled: bool = False
    """Send metrics to Weights & Biases (needs the extra `wandb`)."""
    project: Annotated[str, Field(min_length=1)] = "megatron-daro"
    """Project name."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the run. Unset: the name of the run directory."""


class ObserveSection(Section):
    """What is shown and written."""

    progress: bool = True
    """Show progress on the terminal."""
    tensorboard: bool = True
    """Write TensorBoard events to RUN/tensorboard."""
    save_rollouts: bool = True
    """Write every batch of rollouts to RUN/rollouts (needed for replay and for samples in the report)."""
    wandb: WandbSection = WandbSection()
    """Weights & Biases."""


class Config(Section):
    """The whole configuration. Only the composition root holds it."""

    model: ModelSection
    """The model to train."""
    data: DataSection
    """Prompts."""
    rollout: RolloutSection = RolloutSection()
    """Sampling."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """The loss."""
    actor: ActorSection = ActorSection()
    """The policy under training."""
    engine: EngineSection = EngineSection()
    """The rollout engine."""
    environment: EnvironmentSection = EnvironmentSection()
    """What happens between a prompt and its verdict."""
    reward: RewardSection = RewardSection()
    """The verifier."""
    trainer: TrainerSection = TrainerSection()
    """The run."""
    cluster: ClusterSection = ClusterSection()
    """The nodes that the run will get."""
    observe: ObserveSection = ObserveSection()
    """What is shown and written."""
