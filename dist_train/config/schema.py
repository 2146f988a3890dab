"""The configuration: frozen dataclasses, one per hydra group, without torch.

`configs/config.yaml` composes them; a preset or option file in `configs/<group>/` is only a set of values of the group's
dataclass, so any of them can be overridden on the command line. Every name carries its unit (`_tokens`, `_steps`,
`_bytes`, `_mb`, `_seconds`) unless its meaning leaves no choice: batch sizes are in sequences, degrees in ranks. Zero
turns a feature off where that makes sense. What values may be combined is decided in `check.py` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer; `configs/model/` holds published shapes."""

    family: str = "llama"  # llama: RMSNorm, rotary positions, SwiGLU | gpt: LayerNorm, learned positions, GELU or ReLU
    layers: int = 6
    hidden: int = 320
    heads: int = 4
    kv_heads: int = 4  # fewer than heads: grouped-query attention
    ffn: int = 864  # inner width of the feed-forward block
    vocab: int = 4096  # rows of the embedding; the tokenizer may use fewer
    max_positions: int = 2048  # rows of the learned position table (gpt); the longest context trained for (llama)
    tie_embeddings: bool = False
    bias: bool = False  # biases of linear layers and LayerNorm
    activation: str = "silu"  # silu (SwiGLU) | gelu | relu
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    init: str = "scaled_normal"  # scaled_normal (GPT-2: residual outputs divided by sqrt(2·layers)) | xavier | he
    init_std: float = 0.02


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from; `configs/data/` holds one file per source."""

    source: str = "stdlib"  # stdlib | text | jsonl | parquet | huggingface | tokens | synthetic
    path: str = ""  # file, folder or glob (text, jsonl, parquet, tokens); dataset name or folder (huggingface)
    split: str = "train"  # split of a Hugging Face dataset
    text_field: str = "text"  # field that holds the text (jsonl, parquet, huggingface)
    tokenizer: str = "bpe"  # bytes | bpe (trained on the corpus) | path of a tokenizer.json
    tokenizer_vocab: int = 4096  # vocabulary of a trained bpe; follows model.vocab
    eval_fraction: float = 0.02  # part of the documents held out for evaluation
    shuffle: bool = True
    workers: int = 0  # tokenizing processes; 0: one per core
    cache_dir: str = ""  # prepared token files; empty: the user's cache folder
    max_documents: int = 0  # stop after so many documents; 0: all
    synthetic_documents: int = 512
    synthetic_min_tokens: int = 4
    synthetic_max_tokens: int = 96
    blend: list[Any] = field(default_factory=list)  # [{source: text, path: a.txt, weight: 0.7}, {source: jsonl, …}]


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 250
    global_batch: int = 8  # sequences per optimizer step, over all ranks
    micro_batch: int = 2  # sequences per forward pass of one rank
    seq_len: int = 128  # tokens per sequence
    seed: int = 0
    clip_norm: float = 1.0  # global gradient norm; 0: no clipping
    z_loss: float = 0.0  # weight of mean(logsumexp(logits)^2) (PaLM, arXiv:2204.02311)
    eval_every: int = 50  # steps; 0: no evaluation during the run
    eval_batch: int = 0  # sequences per evaluation forward of one rank; 0: as train.micro_batch
    skip_steps: list[str] = field(default_factory=list)  # steps whose update is left out: ["100", "200-220"]
    gc_every: int = 100  # steps between garbage collections, on all ranks together; 0: leave Python's own
    deterministic: bool = True  # torch.use_deterministic_algorithms: reruns and resumes are bitwise equal


@dataclass(frozen=True)
class MeshConfig:
    """Degrees of parallelism; their product is the number of ranks."""

    pp: int = 1  # pipeline stages
    dp: int = -1  # data-parallel ranks; -1: as many as there are devices, one on CPU
    cp: int = 1  # context-parallel ranks
    tp: int = 1  # tensor-parallel ranks
    chunks: int = 1  # parts of the model on each pipeline rank: pipeline=interleaved, gpipe (any), zero_bubble_v (2)
    stage_layers: list[int] = field(default_factory=list)  # blocks of each pipeline stage; empty: balanced
    sequence: bool = True  # tp: also split tokens between matrix products (sequence parallelism, arXiv:2205.05198)


# Never a question, and the end of a connection that has said nothing for half a minute.
_SSH = ("ssh", "-T", "-oBatchMode=yes", "-oConnectTimeout=15", "-oServerAliveInterval=10", "-oServerAliveCountMax=3")
_FORWARDED = ("PYTHONPATH", "OMP_NUM_THREADS", "NCCL_*", "GLOO_*", "TORCH_*", "HF_*")


@dataclass(frozen=True)
class LaunchConfig:
    kind: str = "local"  # local: start the ranks of this node here; ssh: on the hosts of launch.hostfile
    hostfile: str = ""  # ssh: one `[user@]host [slots=ranks]` a line
    ssh_command: list[str] = field(default_factory=lambda: [*_SSH])  # ssh: what the host and a command are appended to
    forward_env: list[str] = field(default_factory=lambda: [*_FORWARDED])  # ssh: variables that hosts get, `*` stands for any
    nodes: int = 1
    ranks_per_node: int = 0  # 0: the product of the mesh degrees divided by nodes
    device: str = "auto"  # auto | cpu | cuda
    max_restarts: int = 0  # whole-group restarts after a failure
    port: int = 0  # rendezvous port; 0: a free one
    lost_seconds: float = 60.0  # several nodes: one that gives no sign of life for so long is lost, and the job with it
    timeout_seconds: float = 600.0  # of every collective on every group
    grace_seconds: float = 30.0  # between asking ranks to stop and killing them


@dataclass(frozen=True)
class SlurmConfig:
    """What `dist-train submit` asks of Slurm beside launch.nodes; an empty value leaves it to the cluster."""

    tasks: str = "node"  # node: one task on each node, which starts its ranks | rank: one task for each rank
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""  # features that nodes must have: h100, "a100|h100"
    time: str = ""  # limit, as Slurm writes it: minutes, HH:MM:SS, D-HH:MM:SS
    gpus_per_node: str = ""  # 8, or with their type h100:8
    cpus_per_task: int = 0  # 0: one for each rank of the task
    memory: str = ""  # of each node: 200G
    exclusive: bool = False  # no other jobs on the nodes
    container: list[str] = field(default_factory=list)  # [apptainer,exec,--nv,train.sif], or options of srun that start with --
    signal_seconds: int = 300  # before the limit the ranks are told to save and stop; 0: they are not
    requeue: bool = True  # after saving at the limit or a preemption, and when a node was lost, the job waits for its next turn
    extra: list[str] = field(default_factory=list)  # further options of sbatch, as ["--nice=100","--mail-type=END"]


@dataclass(frozen=True)
class ShardConfig:
    engine: str = "native"  # native | ddp | fsdp2 (torch's own data parallelism) | deepspeed: same recipe, data and checkpoints
    stage: int = 0  # ZeRO: 0 replicates all state, 1 shards optimizer state, 2 gradients too, 3 parameters too
    replicas: int = 1  # data ranks are cut in so many runs of neighbours, and state is sharded inside a run only
    bucket_mb: float = 25.0  # largest size of a gradient bucket in MB (1e6 bytes) of the reduce dtype
    overlap: bool = True  # reduce each bucket as it fills during backward, and let updated parameters arrive during forward
    reduce_dtype: str = "fp32"  # fp32 | bf16: what travels on the wire
    compress: str = "none"  # none | bf16 | int8 | topk: gradients on the wire, added up in fp32
    compress_fraction: float = 0.01  # topk: part of the gradient that is sent in a step; the rest waits
    compress_weights: str = "none"  # none | int8: parameters as they are gathered
    offload: str = "none"  # none | host | nvme: where masters and moments live; the CPU updates what is not on the device
    offload_params: str = "none"  # none | host | nvme: where the shards of parameters live (stage 3)
    offload_dir: str = ""  # an existing folder on a fast local disk, for nvme


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes by role, and the loss scale of fp16."""

    compute: str = "fp32"  # fp32 | bf16 | fp16: parameters and activations
    grad: str = "fp32"  # dtype in which micro-batch gradients accumulate
    master: str = "fp32"  # of the weights that the optimizer updates, and of its moments; split: fp32 as the weight + 16 bits
    loss_scale: float = 0.0  # initial dynamic loss scale; 0: no loss scaling
    loss_scale_growth_steps: int = 2000  # finite steps before the scale doubles
    loss_scale_hysteresis: int = 1  # non-finite steps before the scale halves
    loss_scale_min: float = 1.0


@dataclass(frozen=True)
class OptimConfig:
    name: str = "adamw"  # sgd | momentum | adam | adamw | adamw8bit (one-byte moments) | lamb | muon (and AdamW for vectors)
    lr: float = 3e-3  # peak learning rate: right for the small default model, larger ones want less
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9  # momentum, muon
    weight_decay: float = 0.1  # not applied to norms, biases and other one-dimensional parameters


@dataclass(frozen=True)
class LrConfig:
    """Learning rate as a pure function of the step."""

    schedule: str = "cosine"  # constant | linear | cosine | wsd
    warmup_steps: int = 20
    min_ratio: float = 0.1  # final learning rate ÷ peak (linear, cosine, wsd)
    decay_steps: int = 0  # wsd: length of the final decay; 0: a tenth of train.steps


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 100  # steps; 0: only at the end and on demand
    keep: int = 2  # newest checkpoints kept; 0: all
    resume: str = "auto"  # auto: the newest whole checkpoint of run.dir, if any | never | path of a checkpoint or run
    weights_only: bool = False  # take only weights from the path in `resume`: optimizer, step and data begin anew
    same_data: bool = True  # refuse to go on with other data or another tokenizer than the checkpoint was made with


@dataclass(frozen=True)
class ObserveConfig:
    tensorboard: bool = True
    wandb: bool = False
    progress: bool = True  # live line on rank 0
    sample_tokens: int = 120  # length of the sample generated at each evaluation; 0: none
    sample_prompt: str = ""  # empty: the first tokens of the held-out text
    check_states: bool = False  # compare layers' values over tensor ranks with what the plan declares; slow
    peak_tflops: float = 0.0  # peak of one device for MFU; 0: from the table of known GPUs, else MFU is null


@dataclass(frozen=True)
class RunConfig:
    dir: str | None = None  # null: runs/<date>_<time>, made unique


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lr: LrConfig = field(default_factory=LrConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    run: RunConfig = field(default_factory=RunConfig)
    remat: str = "none"  # none | selective | full
    pipeline: str = "1f1b"  # gpipe | 1f1b | interleaved | zero_bubble | zero_bubble_v: the order of work with mesh.pp > 1
    context: str = "ring"  # ring | ulysses: how attention reaches tokens of other ranks with mesh.cp > 1
    ops: str = "fused"  # fused: the kernels of csrc/ where they are built | reference: plain torch, to compare
    attention: str = "auto"  # auto | flash | sdpa | math; dist-train doctor shows what runs
