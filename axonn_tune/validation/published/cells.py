"""Cells of rows that name their model, in the words of their sources: columns, models, formats, module lists, notes.

Such a row has experts, number formats or context parallelism, and says more than `rows.NEEDED` has columns for. What a
note says of a column that is empty is read as if it stood there. What cannot be read makes the row one that is not
predicted, with the reason; nothing is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

from axonn_tune.errors import UsageError, suggest
from axonn_tune.frameworks.step import LossKind, StepOptions
from axonn_tune.ranking.inputs import step_setting
from axonn_tune.recompute import MODULES
from axonn_tune.specs.catalog import available, load_model, spelt_name
from axonn_tune.specs.document import LARGEST_SIZE
from axonn_tune.specs.lengths import Lengths, read_lengths
from axonn_tune.specs.model import Model
from axonn_tune.specs.sections import expand
from axonn_tune.vocabulary import PACKINGS, TUNES

ALSO = {
    **{"gpus": "n_gpus", "num_gpus": "n_gpus", "vp": "vpp", "step_time_s": "step_s", "memory_gib": "mem_gib"},
    **{"source_ref": "source_loc", "global_batch": "gbs", "batch": "gbs", "micro_batch": "mbs"},
    "sequence_length": "seq",
}
"""Columns by other names."""

MORE = (
    *("ep", "etp", "fsdp", "dispatcher", "ep_overlap", "routing", "recipe", "pipeline_layout", "cuda_graphs", "mtp"),
    *("offload", "software", "assumed", "async_tp", "param_format", "grad_dtype", "state_bytes", "memory_kind"),
    *("loss", "lengths", "packing", "adapters"),
    *("tokens_per_s_per_gpu", "mfu_percent", "mfu_of_tflops", "blind_family", "dense_layers", "micro_batches"),
    *(f"step.{one.name}" for one in fields(StepOptions)),
)
"""Columns of rows that name their model alone; of options of the step as `--set step.KEY` has them."""

NAMED = ("id", "framework", "model", "seq", "gbs")
"""Columns that a file of them must have, beside GPUs and what they are."""

_BLANK = ("n/a", "na", "nan", "unknown", "unstated", "not stated", "not printed")
"""Words of a cell that does not say, as one without a letter or digit: dashes, `?`, the rest of a cut expression."""
_NOTES: tuple[tuple[str, str, str], ...] = (
    ("cuda_graphs", r"cuda graphs?:? ((?:(?:attn|mamba|mlp|moe\w*|full\w*),? ?(?:and )?)+)", r"\1"),
    ("cuda_graphs", r"cuda graphs", "full_iteration"),
    ("pipeline_layout", r"layout (?:string )?(?:of gb200 )?(e[et|()*\d,m]*\|[t|()*\d,m]*l)\b", r"\1"),
    ("mtp", r"\bno mtp|without mtp", "0"),
    ("mtp", r"\bmtp depth (\d)", r"\1"),
    ("offload", r"offloads? ([\w ,]+)|(?:with|fine-grained) [\w -]*offloading", r"\1"),
    ("async_tp", r"async tp", "1"),
    ("async_tp", r"vanilla tp", "0"),
    ("dense_layers", r"(\d+) dense layers?", r"\1"),
    ("micro_batches", r"(\d+) micro-batches", r"\1"),
    ("mfu_of_tflops", r"mfu of ([\d.]+) tflop", r"\1"),
    ("seq", r"sequence (?:by tokens/s is|not printed \()\s*([\d,]+)", r"\1"),
    ("state_bytes", r"(?:bf16|low-precision adam) moments", "8"),
    ("param_format", r"fp8 primary weights", "fp8"),
    ("memory_kind", r"\b(allocated|reserved|device)\b", r"\1"),
    ("ep_overlap", r"delayed weight gradients", "on, delayed"),
    ("loss", r"loss not compiled", "eager"),
    ("step.expert_kernels", r"fused grouped mlp", "fused"),
    ("step.paged_stash", r"paged stash", "true"),
    ("step.optimizer", r"optimizer is (\w+)", r"\1"),
    ("step.offloaded", r"moments of ([\d.]+) of the parameters on the host", "moments"),
    ("step.offloaded_states", r"moments of ([\d.]+) of the parameters on the host", r"\1"),
    ("step.offload_overlap", r"copies beside updates", "true"),
    ("step.fused_hyper_connections", r"hyper-connections operator by operator", "false"),
)
"""Column, what a note says of it where it is empty, and the cell that this means."""

_SWITCH = "on|off|yes|no|none|true|false|1|0"
_GRAPHS = r"(?:attn|mamba|mlp|moe\w*|full|full_iteration|shared_experts|and)"
_OFFLOADED = r"(?:activations?|optimizer|states|param(?:eter)?s?|weights?|expert_fc1|moe_act|\w*attn\w*|\w*norm|and)"
_DISPATCHERS = (
    (r"uccl", "deepep-uccl"),
    (r"nvshmem", "deepep-nvshmem"),
    (r"hybrid[ _-]?ep", "hybridep"),
    (r"deep[ _-]?ep|flex", "deepep"),
    (r"all[ _-]?gather|^ag$", "allgather"),
    # `moe_flex_dispatcher_backend = None` of Bridge's recipes leaves Megatron-Core's own.
    (r"all[ _-]?to[ _-]?all|a2a|nccl|standard|default|^none$", "alltoall"),
)
_ROUTINGS = (
    (r"forc|fake|(?<!im)balanced?\b(?! loss)|uniform", "forced"),
    (r"drop(?!less)|capacity", "drop"),
    (r"natural|dropless|aux|free|learned", "natural"),
)


def _meanings(patterns: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    return f".*(?:{'|'.join(one for one, _ in patterns)}).*", ", ".join(dict.fromkeys(word for _, word in patterns))


WORDS: Mapping[str, tuple[str, str]] = {
    "dispatcher": _meanings(_DISPATCHERS),
    "routing": _meanings(_ROUTINGS),
    "fsdp": (rf"\d{{1,9}}|{_SWITCH}|dp_shard \d{{1,9}}|(?:torch |megatron-)?fsdp2?\b.*", "on, off, a number of ranks"),
    "cuda_graphs": (rf"no|off|none|{_GRAPHS}(?:[\s,]+{_GRAPHS})*", "none, attn, mamba, mlp, moe, full, full_iteration"),
    "param_format": (r"(?:bf16|fp16|fp32|fp8|mxfp8|fp4|nvfp4)\b.*|none", "bf16, fp8, fp4"),
    "grad_dtype": (r"bf16|fp16|fp32", "bf16, fp32"),
    "ep_overlap": (rf"(?:{_SWITCH}|dualpipe)(?:[\s,].*)?", "on, off, on with delayed weight gradients"),
    "offload": (
        rf"no|off|none|{_OFFLOADED}(?:[\s,]+{_OFFLOADED})*",
        "none, activations, optimizer, parameters, expert_fc1",
    ),
    "async_tp": (rf"{_SWITCH}|async|vanilla", "on, off"),
    "memory_kind": (r"allocated|reserved|device|active|unstated", "allocated, reserved, device"),
    "overlap": (
        r".*(?:overlap|compile|eager|none|off|async|prefetch|\btp\b|\bdp\b).*",
        "none, tp-comm-overlap, overlap-grad-reduce",
    ),
    "loss": ("|".join(get_args(LossKind)), ", ".join(get_args(LossKind))),
    "attn": (r".*(?:flash|fused|softmax|sdpa|cudnn|math|eager|local|none|no\b|te\b).*", "flash, cudnn, sdpa, unfused"),
    "recipe": (
        r".*(?:mx|nvfp4|tensorwise|current|rowwise|blockwise|subchannel|delayed).*",
        "delayed, current, rowwise, blockwise, mxfp8, nvfp4",
    ),
    "mtp": (rf"\d|{_SWITCH}", "0 to 9, on, off"),
    "packing": ("|".join(PACKINGS), ", ".join(PACKINGS)),
    "adapters": (
        rf"(?:{'|'.join(TUNES[1:])}) r\d{{1,6}}(?: dropout 0?\.\d+)?(?: a2a)?(?: [\w,-]+)?",
        "lora r16, lora r16 dropout 0.1 a2a linear_qkv,linear_proj",
    ),
}
"""Columns with few possible words: what a cell may hold, and the words that are named where it holds another."""


_READ_HERE = tuple(name for name in WORDS if name not in ("overlap", "recipe"))
"""Those of a row whose cell may hold nothing else: `recipe` may name a whole one."""


def _blank(text: str) -> bool:
    return text.lower() in _BLANK or not any(map(str.isalnum, text))


def odd_word(column: str, text: str) -> str:
    """What is wrong with a cell whose word is none of those known; "" where nothing is."""
    pattern, known = WORDS.get(column, ("", ""))
    if not pattern or _blank(text) or re.fullmatch(pattern, text.lower()):
        return ""
    return f"{column} is {text!r}{suggest(text, known.split(', '))}; known: {known}"


_NO_FORMAT = r"config|train|tun(?:e|ing)|(?<![a-z])(?:sft|peft|q?lora)(?![a-z])|\.(?:sh|ya?ml|toml|py)\b"
"""What a cell `recipe` has that is the name of a whole recipe: it may have a format in it, as a name."""
_UNPRICED = (
    # Steps that train part of the weights.
    (r"(?<![a-z])(q?lora|peft)(?![a-z])", "fine-tuning is not priced"),
    (r"\b(zb[bv]\w*|v-(?:half|min)|zero-bubble|dualpipev?)\b", "this pipeline schedule is not priced"),
    (r"(?<![a-z])(vl|vision[\w-]*|mockvlm|images?)(?![a-z])", "a model beside the language model is not priced"),
    # Steps that cannot all have been measured.
    (r"\bone figure for runs that differ: ([^;]*)", "the source prints one figure for runs that differ"),
)
"""Words of a row's software, model, recipe and notes by which its step is not one that is priced, and why."""

_RATIOS_ONLY = r"power-limited|blackwell-4gpu|\bor\b|not stated"
"""Words of a system whose GPUs nobody names, or that run slower than their kind."""

MODELS = Path(__file__).parent
"""Models of published rows that are none of those that ship for searches."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """What such a row says beside the columns of all rows; None or empty where it does not.

    model: with the layers that it trains. expert, expert_tensor: sizes of those axes. routing: forced, natural or drop.
    mlperf: fields that are not stated are those of its configs. ratios_only: why its step is compared with those of
    others alone; functional: it checks that a recipe works, which is not tuned; lacking: why it has no prediction.
    adapters: mode, rank, dropout, exchange and targets.
    state_bytes: optimizer states of a parameter. step: options of the step by their names. assumed: cells that the
    source does not print, with the place that they are from. mfu: share of mfu_of, FLOP/s.
    """

    model: Model | None = None
    expert: int = 1
    expert_tensor: int | None = None
    shards: int | None = None
    sharded: bool = False
    dispatcher: str = ""
    expert_overlap: bool | None = None
    delayed: bool = False
    routing: str = ""
    layout: str = ""
    cuda_graphs: tuple[str, ...] = ()
    async_tp: bool | None = None
    gradient_bytes: int | None = None
    state_bytes: int | None = None
    quantized_weights: bool | None = None
    loss: str = ""
    lengths: Lengths | None = None
    adapters: str = ""
    step: Mapping[str, object] = field(default_factory=dict)
    offload: str = ""
    software: str = ""
    assumed: str = ""
    memory_kind: str = "unstated"
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    mfu_of: float | None = None
    open_recompute: bool = False
    open_graphs: bool = False
    mlperf: bool = False
    open_expert: bool = False
    ratios_only: str = ""
    functional: bool = False
    lacking: str = ""
    blind: bool = False


def names_model(record: Mapping[str, object]) -> bool:
    """Whether a record names its model in place of sizes, or says what only such rows do."""
    return (bool(record.get("model")) and not record.get("hidden")) or any(record.get(name) for name in MORE)


def named(record: Mapping[str, str]) -> tuple[dict[str, str], Named]:
    """A record with the columns of all rows, and what else it says."""
    cells = {ALSO.get(name, name): value.strip() for name, value in record.items()}
    blank = {name for name, value in cells.items() if _blank(value)}
    printed = cells.get("vpp", "").lower() in ("n/a", "na", "-", "/")
    cells |= dict.fromkeys(blank, "")
    for column, pattern, meaning in _NOTES:
        found = re.search(pattern, cells.get("notes", ""), re.IGNORECASE)
        if found and not cells.get(column):
            cells[column] = found.expand(meaning) if "\\" in meaning else meaning
    reader = _Reader(cells)
    return reader.columns(interleaved=not printed), reader.named()


class _Reader:
    """Reads the cells of one record; `lacking` collects why it has no prediction."""

    def __init__(self, cells: dict[str, str]) -> None:
        self.cells, self.lacking = cells, list[str]()
        stated = [name for name in ("tp", "pp", "cp", "ep", "fsdp", "dp") if cells.get(name)]
        self.gpus, self.model = self.count("n_gpus"), self._model()
        if self.gpus is None:
            self.lacking.append("GPUs are not stated")
        elif not stated and self.gpus > 1:
            self.lacking.append("degrees of parallelism are not stated")
        if self.count("seq") is None:
            self.lacking.append("the sequence length is not stated")
        names = " ".join(self.text(name) for name in ("framework", "model", "recipe", "notes"))
        patterns = _UNPRICED[bool(self.text("adapters")) :]
        found = ((re.search(pattern, names), why) for pattern, why in patterns)
        self.lacking += [f"{why}: {word[1]}" for word, why in found if word]
        self.lengths = self._lengths()
        if self.lengths is None and re.search(r"(?<![a-z])sft(?![a-z])", names):
            self.lacking.append("the lengths of its sequences are not stated")

    def _lengths(self) -> Lengths | None:
        """Lengths of sequences, by a data set's name or its mean and 90th percentile."""
        if not self.text("lengths"):
            return None
        try:
            packing: Any = self.text("packing") or None
            return read_lengths(self.text("lengths"), packing)
        except UsageError as error:
            self.lacking.append(str(error).removeprefix("--"))
            return None

    def text(self, name: str) -> str:
        return self.cells.get(name, "").lower()

    def count(self, name: str) -> int | None:
        """A whole number such as `4096`, `4,096`, `4k` or `128.0`; None for an empty cell."""
        text = self.text(name).replace(",", "").replace("_", "").removeprefix("~")
        if not text:
            return None
        found = re.fullmatch(r"(\d{1,12})(?:\.0*)?( ?k)?(?: ?(?:tokens|gpus?|nodes?))?", text)
        if not found or not 1 <= int(found[1]) <= LARGEST_SIZE:
            self._odd(name, "a whole number")
            return None
        return int(found[1]) * (1024 if found[2] else 1)

    def measure(self, name: str) -> float | None:
        """A number above 0, with its thousands between commas or not."""
        text = self.text(name).replace(",", "").lstrip("~≈ ")
        found = re.fullmatch(r"([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*(?:s|tflops?|%|gib|gb)?", text)
        number = float(found[1]) if found else 0.0
        if text and not 0.0 < number < 1e15:
            self._odd(name, "a number above 0 and below 1e15")
        return number if 0.0 < number < 1e15 else None

    def _odd(self, name: str, wanted: str) -> None:
        words = f"{name} is {self.cells[name]!r}, not {wanted}"
        if words not in self.lacking:
            self.lacking.append(words)

    def _model(self) -> Model | None:
        name = self.cells.get("model", "")
        if self.text("hidden"):
            return None
        # Such as `llama3-70b (4 layers)`.
        remark = re.search(r"\s*\((?:(\d{1,4}) layers|[^)]*)\)", name)
        name = name[: remark.start()] + name[remark.end() :] if remark else name
        document = model_named(name)
        layers, dense, mtp = self.count("layers"), self.count("dense_layers"), self.text("mtp")
        layers = int(remark[1]) if layers is None and remark and remark[1] and int(remark[1]) else layers
        if document is None:
            self.lacking.append(f"model {name!r} is not known, and no sizes are given")
            return None
        if layers is not None and layers != document.layers:
            try:
                document = cut(document, layers, dense=dense)
            except ValueError:
                self.lacking.append(f"layers are {layers}, which no {document.name} can have")
        if mtp and not odd_word("mtp", mtp):
            count = int(mtp) if mtp.isdecimal() else int(mtp in ("on", "yes", "true"))
            document = document.model_copy(update={"mtp_layers": count})
        return document

    def columns(self, *, interleaved: bool) -> dict[str, str]:
        """The columns that all rows have; interleaved: an empty `vpp` says nothing."""
        cells, model = self.cells, self.model
        numbers = {name: self.count(name) for name in ("tp", "pp", "cp", "vpp", "mbs", "seq", "dp")}
        data = numbers["dp"] or max(
            1, (self.gpus or 1) // ((numbers["tp"] or 1) * (numbers["pp"] or 1) * (numbers["cp"] or 1))
        )
        batch = self.count("gbs") or self._batch(numbers["mbs"], data)
        if batch is None:
            self.lacking.append("the global batch is not stated")
        memory = self.measure("mem_gib")
        if memory and re.search(r"memory in gb\b", self.text("notes")):
            memory *= 1e9 / 2**30
        several = (numbers["pp"] or 1) > 1 and interleaved and not cells.get("pipeline_layout")
        sizes = dict.fromkeys(("layers", "hidden", "heads", "ffn", "vocab"), "1")
        if model is not None:
            sizes = {name: str(getattr(model, name)) for name in (*sizes, "kv_heads")}
        return {
            **cells,
            **(sizes if not self.text("hidden") else {}),
            **{name: str(value or "") for name, value in numbers.items()},
            "vpp": str(numbers["vpp"] or ("unknown" if several and model is not None else "")),
            "seq": str(numbers["seq"] or 1),
            "dp": str(data),
            "gbs": str(batch or 1),
            "n_gpus": str(self.gpus or 1),
            "gpu": cells.get("gpu", "") or cells.get("system", ""),
            "dataset": cells.get("dataset", "") or cells.get("source", ""),
            "family": cells.get("family", "") or f"{cells.get('model')}|{self.gpus}|{cells.get('precision')}",
            "precision": self._format(),
            "recompute": self._recompute(),
            **({} if model is None else {"gated_mlp": str(int(model.gated))}),
            "step_s": str(self.measure("step_s") or ""),
            "mem_gib": str(memory or ""),
            "tflops_per_gpu": str(self.measure("tflops_per_gpu") or ""),
        }

    def _format(self) -> str:
        """The number format, by the precision and words of its recipe; the name of a whole recipe says none."""
        precision, recipe = self.cells.get("precision", ""), self.cells.get("recipe", "")
        if not re.search(_NO_FORMAT, recipe.lower()) and re.fullmatch(WORDS["recipe"][0], recipe.lower()):
            return f"{precision} {recipe}".strip()
        if suggest(recipe, WORDS["recipe"][1].split(", ")):
            self.lacking.append(odd_word("recipe", recipe))
        if recipe and not precision:
            self.lacking.append("the number format is not stated")
        return precision

    def _batch(self, micro_batch: int | None, data: int) -> int | None:
        """The global batch by the number of micro-batches, by a local batch, or without accumulation."""
        local = re.search(r"local batch (\d+)", self.text("notes"))
        if local:
            return int(local[1]) * data
        batches = self.count("micro_batches")
        if micro_batch and batches:
            return micro_batch * batches * data
        sharded = any(word in self.text("framework") for word in ("torchtitan", "fsdp"))
        return micro_batch * data if micro_batch and sharded and (self.count("pp") or 1) == 1 else None

    def _recompute(self) -> str:
        """A recompute set by our names, `layernorm,moe_act`; empty where the row does not say."""
        text = self.text("recompute").split(";")[0]
        text = re.sub(r"\((?:appendix|table|section)[^)]*\)", "", text).strip()
        if not text:
            return ""
        if text in ("none", "no", "off", "disabled", "false", "0"):
            return "none"
        if found := re.match(r"full\b.*?(?:(?:block|first|on)\D*(\d+))?\D*$", text):
            return f"full on {found[1]}" if found[1] and "uniform" not in text else "full"
        listed = re.sub(r"^(?:selective|modules?)\b[\s:(]*", "", text).rstrip(")")
        if not listed or listed in ("on", "default"):
            return "selective"
        names = list(self._modules(listed))
        return ",".join(names)

    def _modules(self, text: str) -> Iterator[str]:
        for word in filter(None, re.split(r"[\s,+&/]+|\band\b", text)):
            name = _MODULES.get(word.strip("()[]'\""), word)
            if name not in MODULES:
                self._odd("recompute", f"a set of {', '.join(MODULES)}: {word}")
                return
            yield name

    def named(self) -> Named:
        """What the row says beside the columns of all rows."""
        fsdp, overlap, graphs = self.text("fsdp"), self.text("ep_overlap"), self.text("cuda_graphs")
        shards = int(fsdp) if fsdp.isdecimal() else None
        asynchronous = self.text("async_tp")
        mfu, peak = self.measure("mfu_percent"), self.measure("mfu_of_tflops")
        states = self.measure("state_bytes")
        system = f"{self.text('system')} {self.text('gpu')}"
        if (part := re.search(r"(linears|grouped gemms) only", self.text("notes"))) and self.model:
            self.lacking.append(f"a format of {part[1]} alone is not modelled")
        self.lacking += filter(None, (odd_word(name, self.cells.get(name, "")) for name in _READ_HERE))
        kind = self.text("memory_kind")
        found = Named(
            model=self.model,
            expert=self.count("ep") or 1,
            expert_tensor=self.count("etp"),
            shards=shards,
            sharded=fsdp not in ("", "off", "no", "0", "1", "none"),
            dispatcher=self._word("dispatcher", _DISPATCHERS),
            expert_overlap=None if not overlap else overlap.startswith(("on", "yes", "1", "true", "dualpipe")),
            delayed="delay" in overlap or "wgrad" in overlap,
            routing=self._word("routing", _ROUTINGS),
            layout=re.sub(r"[elt]", _letter, self.text("pipeline_layout")),
            cuda_graphs=tuple(re.findall(r"[a-z_]+", graphs)) if graphs not in ("no", "off", "none") else (),
            async_tp=None if not asynchronous else asynchronous in ("1", "on", "yes", "true", "async"),
            gradient_bytes={"bf16": 2, "fp32": 4}.get(self.text("grad_dtype")),
            state_bytes=None if states is None else int(states),
            quantized_weights=re.search("fp[48]", formats) is not None
            if (formats := self.text("param_format"))
            else None,
            loss=self.text("loss"),
            lengths=self.lengths,
            adapters=self.cells.get("adapters", ""),
            step=self._step(),
            offload=self.text("offload"),
            software=self.cells.get("software", ""),
            assumed=self.cells.get("assumed", ""),
            memory_kind=kind if kind in ("allocated", "reserved", "device") else "unstated",
            tokens_per_s_per_gpu=self.measure("tokens_per_s_per_gpu"),
            mfu=None if mfu is None else mfu / 100.0,
            mfu_of=None if peak is None else 1e12 * peak,
            open_recompute=not self.text("recompute"),
            open_graphs=not graphs,
            mlperf="mlperf" in f"{self.text('framework')} {self.text('recipe')}",
            open_expert=bool(self.model and self.model.has_experts and fsdp and not self.text("ep")),
            ratios_only="the GPU is not named, or slower than its kind" if re.search(_RATIOS_ONLY, system) else "",
            functional=bool(re.search(r"\bfunctional\b", self.text("notes"))),
            blind=self.text("blind_family") in ("yes", "1", "true"),
        )
        return found if not self.lacking else Named(**{**vars(found), "lacking": "; ".join(self.lacking)})

    def _step(self) -> dict[str, Any]:
        """Options of the step that columns of their own state."""
        found = dict[str, Any]()
        for column in (name for name, text in self.cells.items() if name.startswith("step.") and text):
            try:
                stated: dict[str, Any] = dict([step_setting(f"{column}={self.cells[column].lower()}")])
                StepOptions(**stated)
                found |= stated
            except UsageError as error:
                self.lacking.append(str(error).removeprefix("--set "))
        return found

    def _word(self, name: str, known: tuple[tuple[str, str], ...]) -> str:
        """What the first pattern means that is in a cell."""
        return next((meaning for pattern, meaning in known if re.search(pattern, self.text(name))), "")


def _letter(match: re.Match[str]) -> str:
    return {"e": "E", "l": "L"}.get(match[0], match[0])


_MODULES = {
    **dict.fromkeys(("norm", "norms", "rmsnorm", "layer_norm"), "layernorm"),
    **dict.fromkeys(("act", "swiglu", "moe_activation", "activation"), "moe_act"),
    **dict.fromkeys(("attn", "attention", "sdpa", "core_attention"), "core_attn"),
    **dict.fromkeys(("up_proj", "mla_up", "mla", "mla_up_projection"), "mla_up_proj"),
    **dict.fromkeys(("shared_expert", "shared"), "shared_experts"),
    **dict.fromkeys(("experts", "moe_layer"), "moe"),
    "dense_mlp": "mlp",
}


@cache
def _models() -> dict[str, str | Path]:
    """Each model, by its name if it ships for searches, else its file."""
    shipped: dict[str, str | Path] = {name: name for name in available("model")}
    return {path.stem: path for path in sorted(MODELS.glob("*.yaml"))} | shipped


def model_named(name: str) -> Model | None:
    """The model that a name means, however it is spelt: `Qwen3_30B_a3B`, `meta-llama/Llama-3.1-70B`, `DeepSeekV3`."""
    known = _models()
    spelt = spelt_name(name, known, begun=True)
    return None if spelt is None else load_model(known[spelt]).document


def cut(model: Model, layers: int, *, dense: int | None = None) -> Model:
    """A model with its first layers alone; dense: so many of its first type and else its last, as in SimuMax's."""
    stated = model.model_dump(by_alias=True) | {"layers": layers, "pattern": None}
    if model.pattern is not None:
        names = expand(model.pattern)
        kept = names[:layers] if dense is None else [names[0]] * dense + [names[-1]] * (layers - dense)
        kept += [names[-1]] * (layers - len(kept))
        types = {name: kind for name, kind in stated["layer_types"].items() if name in kept}
        stated |= {"layers": " ".join(kept), "layer_types": types}
        del stated["pattern"]
    return Model.model_validate(stated)
