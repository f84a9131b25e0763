"""The table of checks: what an optimizer must do, why, and who says so. Adding one is a row and a wrong class that it fails.

Rows go from what others rest on to what rests on them: a row that fails because one that it `follows` fails is told as that one's
consequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from truestep.optimizers.conformance import continuing, kernels, precision, rules, settings, shapes, stepping
from truestep.optimizers.conformance.subject import Case
from truestep.words.finding import Law, Severity


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: A slug.
        law: Of the six, the one that it is a case of.
        severity: Of its findings.
        reason: What goes wrong where it does not hold.
        source: Who says that it must: documentation, a paper, a public report.
        function: ``case -> detail``; raises `Failed` or `NotApplicable`.
        follows: Checks whose failing explains this one's.
    """

    name: str
    law: Law
    reason: str
    source: str
    function: Callable[[Case], str] = field(repr=False)
    follows: tuple[str, ...] = ()
    severity: Severity = "error"

    @property
    def code(self) -> str:
        """Of its findings."""
        return f"{self.law}/{self.name}"


_OPTIM: Final = "torch.optim.Optimizer"
_LOAD: Final = "torch.optim.Optimizer.load_state_dict"
_FSDP2: Final = "torch.distributed.fsdp.fully_shard"
_KERNELS: Final = "torch.optim, section on foreach and fused implementations"
_STEP: Final = ("construction", "no-hidden-step", "counters")
_RUNS: Final = ("repeatable",)  # what compares two runs says nothing where two alike differ
_SAVED: Final = ("loaded", "keeps-dtype")

_ALL: Final = (
    # -- A step
    Check(
        "construction",
        "params",
        "an optimizer that changes weights when it is built changes a model that was just loaded",
        _OPTIM,
        stepping.construction,
    ),
    Check(
        "no-hidden-step",
        "update",
        "a step taken to create state makes the first real one the second: bias corrections are off for good",
        "torch.distributed.checkpoint.state_dict, whose _init_optim_state takes one",
        stepping.no_hidden_step,
        ("construction",),
    ),
    Check(
        "counters",
        "update",
        "a counter raised once a tensor, not once a step, ages with the number of params, and with how they are sharded",
        "D. P. Kingma, J. Ba, Adam, ICLR 2015, algorithm 1: t <- t + 1",
        stepping.counters,
        ("no-hidden-step",),
    ),
    Check(
        "gradients-unaltered",
        "gradient",
        "hooks, clipping, logging and a second optimizer read the gradient after the step",
        _OPTIM,
        stepping.gradients_unaltered,
    ),
    Check(
        "absent-gradient",
        "update",
        "a param that no loss reached must not decay, nor coast on its momentum",
        "torch.optim.Optimizer.zero_grad, on set_to_none",
        stepping.absent_gradient,
        ("counters",),
    ),
    Check(
        "zero-gradient",
        "update",
        "a zero gradient is an observation: skipped, moments stay too large, and ranks that skip it age otherwise",
        "torch.optim.Optimizer.zero_grad, on set_to_none",
        stepping.zero_gradient,
        ("counters", "late-updates", "young-updates"),
    ),
    Check(
        "repeatable",
        "update",
        "without it no replica agrees with another, and no resumed run with the first",
        "torch notes on reproducibility",
        stepping.repeatable,
    ),
    Check(
        "in-place",
        "params",
        "FSDP's views, tied params, EMA copies and CUDA graphs hold the memory, not the name",
        _FSDP2,
        stepping.in_place,
    ),
    Check(
        "closure",
        "update",
        "Lightning and L-BFGS loops run forward and backward inside step(closure), and read the loss that it returns",
        "torch.optim.Optimizer.step",
        stepping.closure,
        ("repeatable",),
    ),
    Check(
        "zero-grad",
        "gradient",
        "a gradient that stays is added to the next one",
        "torch.optim.Optimizer.zero_grad",
        stepping.zero_grad,
    ),
    Check("maximize", "update", "a flag that is taken must act", "torch.optim.SGD, on maximize", stepping.maximize, _RUNS),
    Check(
        "hooks",
        "update",
        "schedulers, profilers, DCP and guards hang on step hooks",
        "torch.optim.Optimizer.register_step_post_hook",
        stepping.hooks,
    ),
    # -- The rule
    Check(
        "young-updates",
        "update",
        "bias corrections that are off by one scale the first hundred updates",
        "the reference; D. P. Kingma, J. Ba, Adam, ICLR 2015, section 3",
        rules.young_updates,
        (*_STEP, "gradients-unaltered", "late-updates"),
    ),
    Check(
        "late-updates",
        "update",
        "the rule itself, once its moments are old",
        "the reference",
        rules.late_updates,
        (*_STEP, *_RUNS, "gradients-unaltered"),
    ),
    Check(
        "eps-place",
        "update",
        "eps inside the root is 1e4 times as large: params with small gradients stand still",
        "the reference; D. P. Kingma, J. Ba, Adam, ICLR 2015, algorithm 1",
        rules.eps,
        (*_STEP, "gradients-unaltered", "late-updates", "young-updates"),
    ),
    Check(
        "decay-place",
        "update",
        "coupled decay is divided by the second moment: another regularizer",
        "the reference; I. Loshchilov, F. Hutter, ICLR 2019, algorithm 2",
        rules.decay,
        (*_STEP, "gradients-unaltered", "late-updates"),
    ),
    # -- Params, groups, settings
    Check(
        "order",
        "update",
        "FSDP, ZeRO and pipeline stages hand params over in orders of their own",
        _FSDP2,
        settings.order,
        ("counters", "equal-shapes"),
    ),
    Check(
        "grouping",
        "update",
        "every trainer makes two groups, one without decay",
        "transformers.Trainer.create_optimizer",
        settings.grouping,
        ("counters", "equal-shapes"),
    ),
    Check(
        "equal-shapes",
        "state",
        "layers repeat: state keyed by shape, or by name alone, is shared by all of them",
        "torch.optim.Optimizer.state, keyed by the param",
        settings.equal_shapes,
        ("counters",),
    ),
    Check(
        "added-group",
        "update",
        "layers unfrozen in training are added as a group, and must then train",
        "torch.optim.Optimizer.add_param_group",
        settings.added_group,
        ("no-hidden-step", "counters", "absent-gradient"),
    ),
    Check(
        "lr-acts",
        "update",
        "a schedule writes group['lr']: a step that does not read it trains at another rate",
        "torch.optim.lr_scheduler",
        settings.lr_acts,
    ),
    Check(
        "lr-tensor",
        "update",
        "compiled steps and CUDA graphs need the rate in a tensor that is written to",
        "torch.optim.Adam, on lr",
        settings.lr_tensor,
        ("lr-acts",),
    ),
    Check(
        "rebuilt",
        "update",
        "DeepSpeed makes Adagrad anew from its defaults; tools copy optimizers so",
        "deepspeed.runtime.zero.stage_1_and_2, initialize_optimizer_states",
        settings.rebuilt,
        _RUNS,
        severity="warning",
    ),
    # -- Shapes
    Check(
        "zero-size",
        "update",
        "shards of small params are empty on some ranks",
        _FSDP2,
        shapes.zero_size,
        ("counters", "equal-shapes"),
    ),
    Check(
        "empty-shard",
        "update",
        "a rank may hold nothing of any param, and must neither raise nor wait",
        _FSDP2,
        shapes.empty_shard,
    ),
    Check("zero-dim", "update", "scales and temperatures are 0-d", "torch.nn.Parameter", shapes.zero_dim),
    Check(
        "non-contiguous",
        "update",
        "channels_last, transposed and tied weights have strides of their own",
        "torch.memory_format",
        shapes.non_contiguous,
    ),
    Check(
        "fused-strides",
        "update",
        "a kernel that walks flat memory pairs each element with another one's gradient",
        "torch.memory_format; measured here",
        shapes.fused_strides,
    ),
    # -- Kernels
    Check("kernels-float32", "update", "the kernel is a matter of speed, not of the result", _KERNELS, kernels.in_float32),
    Check("kernels-float64", "update", "the kernel is a matter of speed, not of the result", _KERNELS, kernels.in_float64),
    Check(
        "kernels-bfloat16",
        "update",
        "fused SGD left 947 of 1,000 elements as they were",
        "pytorch #191763",
        kernels.in_bfloat16,
        ("kernels-float32",),
    ),
    Check("kernels-float16", "update", "as in bfloat16", "pytorch #191763", kernels.in_float16, ("kernels-float32",)),
    # -- Going on elsewhere
    Check(
        "keeps-dtype",
        "state",
        "state cast when it is loaded is another state, and casts add up over resumes",
        _LOAD,
        continuing.keeps_dtype,
    ),
    Check(
        "loaded",
        "drift",
        "a resumed run must be the run",
        _LOAD,
        continuing.loaded,
        ("repeatable", "keeps-dtype"),
    ),
    Check(
        "keeps-dtype-16",
        "state",
        "the default load casts floating state to the param's dtype: what is finer than it is lost",
        "torch.optim.Optimizer._process_value_according_to_param_policy",
        continuing.keeps_dtype_16,
        _SAVED,
    ),
    Check(
        "loaded-over",
        "drift",
        "a rollback loads into an optimizer that has stepped: nothing of it may stay",
        _LOAD,
        continuing.loaded_over,
        _SAVED,
    ),
    Check("pickled", "drift", "checkpoints go through pickle", "torch.save", continuing.pickled, _SAVED),
    Check(
        "through-cpu", "drift", "checkpoints are moved to the CPU and loaded from there", _LOAD, continuing.through_cpu, _SAVED
    ),
    Check(
        "copied",
        "drift",
        "EMA, sweeps and fault-tolerant loops deep-copy optimizers: what __getstate__ drops is lost",
        "torch.optim.Optimizer.__getstate__",
        continuing.copied,
        _RUNS,
    ),
    Check(
        "weights-only",
        "state",
        "torch.load reads no objects unless it is told to trust the file",
        "torch.load, on weights_only",
        continuing.weights_only,
        severity="warning",
    ),
    Check(
        "moved-state",
        "drift",
        "offloading moves state away and back between steps",
        "deepspeed, ZeRO-Offload",
        continuing.moved_state,
        _RUNS,
    ),
    # -- State
    Check("state-apart", "state", "shared memory is written twice a step", "truestep, law of state", precision.state_apart),
    Check(
        "state-size",
        "state",
        "state that grows runs out of memory late",
        "truestep, law of state",
        precision.state_size,
        severity="warning",
    ),
    Check(
        "dtype-stays",
        "state",
        "a dtype that changes as steps are taken breaks checkpoints, kernels and memory plans",
        "truestep, law of state",
        precision.dtype_stays,
    ),
    Check(
        "state-tracks",
        "state",
        "a bfloat16 second moment at beta2 = 0.999 cannot decay: updates stay too small",
        "truestep, docs/worked_case.md",
        precision.tracks,
        severity="warning",
    ),
    Check(
        "state-tracks-bf16",
        "state",
        "in pure bfloat16 most small updates, of moments and of params, are rounded away",
        "truestep, docs/worked_case.md",
        precision.tracks_16,
        severity="warning",
    ),
    # -- Gradients of other kinds
    Check(
        "sparse-gradient",
        "gradient",
        "embeddings with sparse=True give sparse gradients",
        "torch.nn.Embedding, on sparse",
        precision.sparse,
    ),
    Check(
        "complex-params",
        "update",
        "a rule that squares a complex gradient, or drops its imaginary part, is another rule",
        "torch.view_as_real",
        precision.complex_params,
    ),
)

# In order of running: `late-updates` before what follows it, and so on.
CHECKS: Final[Mapping[str, Check]] = MappingProxyType({check.name: check for check in _ALL})
