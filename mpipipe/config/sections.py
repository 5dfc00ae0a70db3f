"""Every key of the configuration: its type, its default and what it means.

Invariants
  1. Every default constructs.
  2. A name with a colon is somebody's own: `package.module:name` is imported, `hf:<path>` is a
     configuration or a folder of Hugging Face. Nothing else in a config can name code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Strict, Tag
from pydantic_core import PydanticCustomError

from mpipipe.values import Window

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}


def _as_bytes(value: object) -> object:
    """`24 GiB` and 2.4e10 as integers; what is neither text nor a number is left to the check of the type."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if found is None or found[2] not in _UNITS:
        raise PydanticCustomError("size", "bytes, or a size such as 24 GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def _as_minutes(value: object) -> object:
    if isinstance(value, str):
        raise PydanticCustomError("minutes", "minutes as a number, such as 90")
    return value


def _expanded(path: str) -> str:
    """As a shell takes it: `run.dir=~/x` is no assignment to it, and a file of YAML goes through none."""
    found = os.path.expanduser(os.path.expandvars(path))
    if unset := re.search(r"\$(\w+|\{[^}]*\})", found):
        raise PydanticCustomError("path", "a path whose variables are set, not {name}", {"name": unset[0]})
    if found.startswith("~"):
        user = {"name": found.partition("/")[0]}
        raise PydanticCustomError(
            "path", "a path: {name} is the home of nobody; ./{name} is a file or folder here", user
        )
    return found


Positive = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1), BeforeValidator(_as_bytes)]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0.0)]
Minutes = Annotated[float, Field(gt=0.0), BeforeValidator(_as_minutes)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Classes = Annotated[int, Field(ge=2)]
Sizes = Annotated[tuple[Positive, ...], Strict(False), Field(min_length=1)]
PathText = Annotated[str, AfterValidator(_expanded)]
HfPath = Annotated[
    str, Field(pattern=r"^hf:."), AfterValidator(lambda name: f"hf:{_expanded(name.removeprefix('hf:'))}")
]
Patterns = Annotated[tuple[str, ...], Strict(False)]
Task = Literal["causal", "masked", "seq2seq", "image", "sequence"]
OrderFile = Annotated[str, Field(pattern=r"\.csv$")]  # one line per rank, as `0F0,0F1,0B0,0B1`
BuiltIn = Literal[
    "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-planned", "zb-v", "v-half", "v-planned",
    "interleaved-planned", "auto",
]  # fmt: skip
Watchdog = Annotated[  # YAML reads a bare off as false
    Literal["auto", "off"] | Above0, BeforeValidator(lambda value: "off" if value is False else value)
]
Dotted = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]  # package.module:name


class Section(BaseModel):
    """Base of all sections: no unknown keys, no silent conversions, no changes afterwards."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    def misfits(self) -> Iterator[str]:
        """Values of this section that are each legal and do not go together."""
        yield from ()


# -- model ------------------------------------------------------------------------------------


def _heads(d_model: int, heads: int) -> Iterator[str]:
    if d_model % heads:
        yield f"model.d_model = {d_model} is not a multiple of model.heads = {heads}; change one"


class GptConfig(Section):
    name: Literal["gpt"] = "gpt"
    vocab: Positive | None = None  # number of token ids; null = what the data needs
    layers: Positive = 4  # transformer blocks
    d_model: Positive = 256  # width of the residual stream; a multiple of heads
    heads: Positive = 4  # attention heads; 32 to 64 channels each is good
    context: Positive = 128  # tokens per sample
    tied: bool = True  # the head uses the token embedding's weight
    dropout: Share = 0.0  # share of activations dropped in training; 0 for short runs

    def misfits(self) -> Iterator[str]:
        yield from _heads(self.d_model, self.heads)


class LlamaConfig(Section):
    name: Literal["llama"] = "llama"
    vocab: Positive | None = None  # number of token ids; null = what the data needs
    layers: Positive = 4  # transformer blocks
    d_model: Positive = 256  # width of the residual stream; a multiple of heads
    heads: Positive = 4  # attention heads; a multiple of kv_heads
    kv_heads: Positive = 2  # heads of keys and values, shared by groups of queries
    d_ff: Positive = 704  # width inside the SwiGLU; 8/3 d_model is usual
    context: Positive = 128  # tokens per sample
    rope_base: Above0 = 10000.0  # of the rotary positions' wave lengths
    norm_eps: Above0 = 1e-5  # RMSNorm's guard against division by zero
    tied: bool = False  # the head uses the token embedding's weight

    def misfits(self) -> Iterator[str]:
        yield from _heads(self.d_model, self.heads)
        if self.heads % self.kv_heads:
            yield (
                f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}; "
                "change one"
            )


class LstmConfig(Section):
    name: Literal["lstm"] = "lstm"
    vocab: Positive | None = None  # number of token ids; null = what the data needs
    layers: Positive = 2  # stacked LSTM layers
    width: Positive = 128  # of the token embedding
    hidden: Positive = 256  # of the state of each layer
    context: Positive = 64  # tokens per sample
    tied: bool = False  # the head uses the embedding's weight; needs hidden = width
    dropout: Share = 0.0  # share of activations dropped between layers in training

    def misfits(self) -> Iterator[str]:
        if self.tied and self.hidden != self.width:
            yield (
                f"model.tied needs model.hidden = {self.hidden} to equal model.width = {self.width}; "
                "change one, or set model.tied to false"
            )


class EncoderDecoderConfig(Section):
    name: Literal["encoder_decoder"] = "encoder_decoder"
    vocab: Positive = 64  # number of token ids; 0 is padding
    layers: Positive = 2  # blocks in the encoder, and in the decoder
    d_model: Positive = 128  # width of the residual streams; a multiple of heads
    heads: Positive = 4  # attention heads
    context: Positive = 32  # tokens of the source, and of the target
    tied: bool = True  # source, target and head share one embedding
    dropout: Share = 0.0  # share of activations dropped in training

    def misfits(self) -> Iterator[str]:
        yield from _heads(self.d_model, self.heads)


class MlpConfig(Section):
    name: Literal["mlp"] = "mlp"
    inputs: Positive = 32  # features per sample
    hidden: Annotated[tuple[Positive, ...], Strict(False)] = (64, 64)  # width of each hidden layer
    classes: Classes = 10  # number of labels
    dropout: Share = 0.0  # share of activations dropped in training


def _levels(blocks: tuple[int, ...], widths: tuple[int, ...]) -> Iterator[str]:
    if len(blocks) != len(widths):
        yield f"model.blocks has {len(blocks)} values and model.widths {len(widths)}; give one each per level"


class VggConfig(Section):
    name: Literal["vgg"] = "vgg"
    channels: Positive = 1  # of the images; grey = 1, colour = 3
    size: Positive = 8  # side of the images in pixels
    classes: Classes = 10  # number of labels
    blocks: Sizes = (1, 1, 2)  # convolutions per block; a block ends by halving the side
    widths: Sizes = (32, 64, 128)  # channels in each block
    hidden: Positive = 256  # width of the two layers before the head
    dropout: Share = 0.0  # share of activations dropped in training

    def misfits(self) -> Iterator[str]:
        yield from _levels(self.blocks, self.widths)


class ResnetConfig(Section):
    name: Literal["resnet"] = "resnet"
    channels: Positive = 1  # of the images; grey = 1, colour = 3
    size: Positive = 8  # side of the images in pixels
    classes: Classes = 10  # number of labels
    blocks: Sizes = (2, 2, 2)  # residual blocks per level; a level after the first halves the side
    widths: Sizes = (32, 64, 128)  # channels in each level
    bottleneck: bool = False  # blocks of three convolutions, the output four times as wide
    stem: Literal["small", "imagenet"] = "small"  # imagenet starts with 7x7, stride 2 and pooling

    def misfits(self) -> Iterator[str]:
        yield from _levels(self.blocks, self.widths)


class UnetConfig(Section):
    name: Literal["unet"] = "unet"
    channels: Positive = 1  # of the images; grey = 1, colour = 3
    size: Positive = 32  # side of the images in pixels; a multiple of 2**depth
    classes: Classes = 3  # number of labels of a pixel
    width: Positive = 16  # channels at full size; doubled by each level down
    depth: Positive = 2  # levels below full size, each with a skip

    def misfits(self) -> Iterator[str]:
        if self.size % 2**self.depth:
            yield (
                f"model.size = {self.size} is not a multiple of 2**model.depth = {2**self.depth}; change one"
            )


class DlrmConfig(Section):
    name: Literal["dlrm"] = "dlrm"
    dense: Positive = 13  # numeric features per sample
    tables: Sizes = (1000, 1000, 100, 100)  # rows of each embedding table
    bag: Positive = 1  # categories per table and sample, summed
    width: Positive = 16  # of an embedding
    bottom: Sizes = (64, 32)  # hidden layers below the interactions
    top: Sizes = (64, 32)  # hidden layers above them


class HfConfig(Section):
    name: HfPath  # hf:config.json, or hf:folder of a saved model
    task: Task | None = None  # what it learns; null = as the config's `architectures` says
    freeze: Patterns = ()  # patterns of parameters that are not trained, such as "*.embed_tokens.*"
    fresh: Patterns = ()  # patterns of those that start from random values though the folder has them
    context: Positive = 128  # tokens per sample; at most the model's positions


class CustomModelConfig(Section):
    name: Dotted  # package.module:factory, which returns an nn.Module or a list of layers
    args: dict[str, Any] = {}  # keyword arguments of the factory
    loss: Dotted | None = None  # package.module:loss; null = cross entropy
    metrics: dict[str, Dotted] = {}  # name -> package.module:function, for evaluation
    context: Positive = 128  # tokens per sample, where the data are tokens


# -- data -------------------------------------------------------------------------------------


class TextConfig(Section):
    name: Literal["text"] = "text"
    path: PathText | None = None  # file or folder; null = the Python standard library's source
    val_fraction: Fraction = 0.05  # share kept for validation


class TokensConfig(Section):
    name: Literal["tokens"] = "tokens"
    path: PathText  # token file: out.bin of tokenize or nanoGPT, or Megatron's .bin beside its .idx
    val_path: PathText | None = None  # token file for validation; null = a share of path
    val_fraction: Fraction = 0.05  # share kept for validation where val_path is null
    dtype: Literal["auto", "uint16", "uint32"] = "auto"  # of a file that does not say so itself
    vocab: Positive | None = None  # number of token ids of a file that does not say so; null = the model's
    tokenizer: PathText | None = None  # tokenizer.json or its folder, for the sample at the end


class SyntheticConfig(Section):
    name: Literal["synthetic"] = "synthetic"
    samples: Positive = 4096  # size of the training set; tokens are endless
    varying: bool = False  # encoder_decoder: micro-batches of different lengths
    bucket: Positive = 8  # of which these lengths are multiples


class ImagesConfig(Section):
    name: Literal["images"] = "images"
    path: PathText  # .npz file, or folder with the four IDX files of MNIST
    val_fraction: Fraction = 0.2  # share kept for validation where the file has no test set


class DigitsConfig(Section):
    name: Literal["digits"] = "digits"  # 1,797 grey images of 8x8 pixels; needs scikit-learn
    val_fraction: Fraction = 0.2  # share kept for validation


class CustomDataConfig(Section):
    name: Dotted  # package.module:factory, which returns a data set
    args: dict[str, Any] = {}  # keyword arguments of the factory


# -- the rest ---------------------------------------------------------------------------------


class TrainConfig(Section):
    steps: Positive = 200  # optimizer steps
    batch: Positive = 16  # samples per step, over all micro-batches
    optimizer: Literal["adamw", "sgd"] = "adamw"  # sgd keeps less state, adamw needs less tuning
    lr: Above0 = 3e-4  # highest learning rate; adamw 3e-4 to 3e-3, sgd 1e-2 to 1e-1
    betas: Annotated[tuple[Share, Share], Strict(False)] = (0.9, 0.95)  # decays of adamw's two means
    eps: Above0 = 1e-8  # adamw's guard against division by zero
    momentum: Share = 0.9  # sgd's; 0 = none
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1  # adamw: per unit of lr; sgd: in the gradient
    warmup: Count = 20  # steps from rate 0 to lr; a tenth of steps is good
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1  # last rate / lr, reached by a cosine
    clip: Above0 | None = 1.0  # largest gradient norm; null = no limit
    precision: Literal["fp32", "bf16"] = "fp32"  # of the matrix products
    bits: Literal["torch", "fast"] = "torch"  # those of a plain torch loop, or of kernels of our own
    unused: Literal["error", "keep"] = "error"  # parameters that the loss does not depend on
    save_every: Count = 0  # steps between checkpoints; 0 = at the end only
    keep: Positive = 2  # newest checkpoints that are kept
    keep_every: Count = 0  # steps between checkpoints that are kept for ever; 0 = none
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of weights, data order and dropout


class EvalConfig(Section):
    every: Count = 50  # steps between evaluations; 0 = at the end only
    batches: Positive | None = None  # per evaluation; null = the validation set, of endless data 8
    batch: Positive | None = None  # samples per evaluation batch; null = train.batch


class CaptureConfig(Section):
    max_shapes: Positive = 8  # shapes of micro-batches, but for the number of samples


class PipelineConfig(Section):
    schedule: BuiltIn | Dotted | OrderFile = "auto"  # the fastest that fits; or one of these, or your own
    micro_batches: Positive | Literal["auto"] = 8  # parts of a batch, 4 per stage or more; auto = searched
    blocks: Positive | Literal["auto"] = 1  # equal blocks of additions, for replicas; auto = by max_ranks
    max_ranks: Positive | None = None  # that may ever come, as blocks: auto needs; null = those of the start
    replicas: Positive | Sizes | Literal["auto"] = "auto"  # of all stages, or by rank; auto = fastest
    reduce: Literal["exact", "fast"] = "exact"  # sums of replicas: the bits of one, or any number of replicas
    tied: Literal["per_use", "eager"] = "per_use"  # tied gradients merge per step; eager = as plain torch
    threads: Positive | Literal["auto"] = 1  # per rank; auto = cores of the node / its ranks
    bind: Literal["auto", "none"] = "auto"  # auto: each rank to cores of its own, where the launcher did not
    device: str = "cpu"  # or cuda, ...: an accelerator for each rank of a node; auto = where there is one
    receive_window: Window = 4  # receives posted ahead per rank
    recompute: Literal["auto", "none", "selective", "full"] = "auto"  # in backward; auto = where memory asks
    memory_bytes: Size | None = None  # limit per rank, such as 24 GiB; null = its share of the node
    cost_cache: bool = True  # use the costs of earlier runs, in ~/.cache/mpipipe, where they hold

    def misfits(self) -> Iterator[str]:
        count, blocks = self.micro_batches, self.blocks
        if count != "auto" and blocks != "auto" and count % blocks:
            dividing = [n for n in range(1, count + 1) if count % n == 0]
            near = [*[n for n in dividing if n < blocks][-1:], *[n for n in dividing if n > blocks][:1]]
            yield (
                f"pipeline.blocks = {blocks} does not divide pipeline.micro_batches = {count}; set the one "
                f"to {' or '.join(map(str, near))}, or the other to a multiple of {blocks}"
            )
        if self.reduce == "fast" and blocks not in ("auto", 1):
            yield f"pipeline.reduce = fast adds up in no blocks, but pipeline.blocks = {blocks}; leave it out"
        if self.max_ranks is not None and blocks != "auto":
            yield (
                f"pipeline.max_ranks = {self.max_ranks} is what pipeline.blocks=auto goes by, but "
                f"pipeline.blocks = {blocks}; set it to auto, or leave max_ranks out"
            )


class KernelsConfig(Section):
    compiled: bool = True  # false, or "kernels: off": torch and NumPy alone, with the same bits
    gemm: Literal["auto", "mkl", "onednn"] = "auto"  # library of fp32 products, or the faster; changes bits


class RunConfig(Section):
    dir: PathText | None = None  # run folder; null = runs/<UTC time>-<name>
    name: str | None = None  # short name of the run; null = the model's
    log_every: Positive = 10  # steps between lines of the log
    tensorboard: bool = False  # metrics also as scalars for TensorBoard, in the folder tensorboard
    time_limit: Minutes | None = None  # minutes from the start until it has saved and ended; null = the job's
    recover: Literal["restart", "mpi"] = "restart"  # when a rank is lost; mpi: in the job, under ULFM
    mirror_every: Count | Literal["auto"] = "auto"  # steps between copies on other ranks; 0 = none
    spares: Count = 0  # ranks that wait, and replace those that are lost; recover: mpi
    slow_rank: Literal["report", "replan"] = "report"  # replan: other stages for one that stays slow
    refine: bool = True  # plans anew from what the first steps took, where that pays off
    watchdog: Watchdog = "auto"  # seconds without progress that end a run; auto = 60, or 10 predicted steps


class SampleConfig(Section):
    length: Count = 200  # tokens written at the end; 0 = none
    temperature: Annotated[float, Field(ge=0.0)] = 0.8  # 0 = the likeliest token each time
    prompt: Annotated[str, Field(min_length=1)] = "\n"  # what the sample starts from


def _as_section(value: object) -> object:
    """`model: resnet` means its name."""
    return {"name": value} if isinstance(value, str) else value


def _kind(default: str) -> Discriminator:
    """Chooses a section's kind by its `name`; `default` has the say about all else."""

    def tag(section: object) -> object:
        if not isinstance(section, dict):
            name = getattr(section, "name", default)
        else:
            name = section.get("name", default)
        if isinstance(name, str) and ":" in name:
            return "hf:path" if name.startswith("hf:") else "package.module:name"
        return name

    return Discriminator(tag)


ModelConfig = Annotated[
    Annotated[GptConfig, Tag("gpt")]
    | Annotated[LlamaConfig, Tag("llama")]
    | Annotated[LstmConfig, Tag("lstm")]
    | Annotated[EncoderDecoderConfig, Tag("encoder_decoder")]
    | Annotated[MlpConfig, Tag("mlp")]
    | Annotated[VggConfig, Tag("vgg")]
    | Annotated[ResnetConfig, Tag("resnet")]
    | Annotated[UnetConfig, Tag("unet")]
    | Annotated[DlrmConfig, Tag("dlrm")]
    | Annotated[HfConfig, Tag("hf:path")]
    | Annotated[CustomModelConfig, Tag("package.module:name")],
    _kind("gpt"),
    BeforeValidator(_as_section),
]
_Source = (
    Annotated[TextConfig, Tag("text")]
    | Annotated[TokensConfig, Tag("tokens")]
    | Annotated[SyntheticConfig, Tag("synthetic")]
    | Annotated[ImagesConfig, Tag("images")]
    | Annotated[DigitsConfig, Tag("digits")]
    | Annotated[CustomDataConfig, Tag("package.module:name")]
)
SourceConfig = Annotated[_Source, _kind("text"), BeforeValidator(_as_section)]


class MixtureConfig(Section):
    name: Literal["mixture"] = "mixture"
    sources: Annotated[tuple[SourceConfig, ...], Strict(False), Field(min_length=1)]  # data sections
    weights: Annotated[tuple[Above0, ...], Strict(False)]  # share of the samples of each source

    def misfits(self) -> Iterator[str]:
        if len(self.sources) != len(self.weights):
            yield (
                f"data.sources has {len(self.sources)} entries and data.weights {len(self.weights)}; "
                "give one weight per source"
            )


DataConfig = Annotated[
    _Source | Annotated[MixtureConfig, Tag("mixture")], _kind("text"), BeforeValidator(_as_section)
]
