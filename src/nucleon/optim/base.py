"""The base class of Muon, Pion and Leon: the interface of a torch optimizer over a list of work.

A step checks the gradients, then passes each piece of work to its engine:

    for work in worklist:  work.engine.step(work, settings)

The mathematics of a step is in `engines.reference`; a subclass adds its `direction`. Groups with
route="adamw" are updated by AdamW.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from operator import is_, itemgetter
from typing import Any, ClassVar, Self, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from nucleon.certificate import Certificate
from nucleon.optim import groups, options, state, worklist
from nucleon.optim.average import Averaging
from nucleon.optim.engines.ranks import agreement, placement, wire
from nucleon.optim.engines.work import Context, Draws, Settings, State
from nucleon.optim.matrices.parameters import ParameterInfo
from nucleon.optim.routing import explanation, routing
from nucleon.optim.routing.explanation import Explanation, ParameterRow
from nucleon.optim.watch import certificates, diagnostics
from nucleon.optim.worklist import Worklist


class MatrixOptimizer(Optimizer, ABC):
    """Base class of an optimizer; a subclass defines `direction` and declares its options.

    Args:
        params: 2-D parameters and 3-D stacks of matrices, or groups of them.
        lr: learning rate, a number or a one-element tensor (0.02, usual in practice; the theory's
            is its radius D, see `nucleon.online.o2nc.plan`).
        given: `own_options` of the class, and those of `Options`.
    """

    name: ClassVar[str]
    """Name of the optimizer in states, reports and diagnostics."""
    own_options: ClassVar[Mapping[str, Any]] = {}
    """Options of the class itself with their defaults; those of its base classes are added."""
    has_gram: ClassVar[bool] = False
    """True if M̂ is stored; otherwise `direction` receives an empty Λ."""

    infos: dict[Tensor, ParameterInfo]
    """Name, axes and routing of each parameter."""
    _averaging: Averaging
    _routed: bool = False
    """True if `for_model` constructed the optimizer."""
    _left_out: tuple[ParameterRow, ...] = ()
    """Parameters of the model that routing left out."""
    # The attributes below are not copied with the optimizer.
    _model: Callable[[], nn.Module | None] = staticmethod(lambda: None)
    """The model of `for_model`, as long as it lives."""
    _settings: Sequence[Settings] = ()
    """Settings of each group at the last step."""
    _structure: Sequence[object] = ()
    """Structure for which the list of work was built."""
    _worklist: Worklist | None = None
    _agreed: bool = False
    """True after the ranks have compared parameters and options."""
    _warned: bool = False
    """True after the warning that AdamW has the rate of the matrices."""

    def __init__(self, params: Any, lr: float | Tensor = options.LR, **given: Any) -> None:
        defaults = self._option_defaults()
        accepted = {"lr", *defaults} - {"route"}
        options.check_names(type(self).__name__, given, accepted)
        defaults |= {"lr": lr, "nucleon": f"{self.name}/{state.VERSION}", **given}
        self.infos = {}
        self._averaging = Averaging(defaults.pop("average"), defaults.pop("average_dtype"))
        axes = defaults.pop("axes")  # a fact of each parameter, not an option of a group
        super().__init__(groups.as_groups(params, axes, type(self).__name__), defaults)

    @classmethod
    def _option_defaults(cls) -> dict[str, Any]:
        """Return all options but `lr` with their defaults: shared ones and those of the class."""
        defaults = dict(options.SHARED)
        for base in reversed(cls.__mro__):
            defaults |= vars(base).get("own_options", {})
        return defaults

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        lr: float | Tensor = options.LR,
        *,
        aux_lr: float | Tensor = routing.AUX_LR,
        aux: Mapping[str, Any] | None = None,
        head: options.Head = "auto",
        overrides: options.Overrides | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return one optimizer for a whole model: this one for matrices, AdamW for the rest.

        Args:
            model: its parameters are routed by the module that contains them, see `explain`.
            lr: learning rate of the matrices (0.02).
            aux_lr: learning rate of the parameters that go to AdamW: embeddings, output heads,
                norms, biases and scalars (1e-3).
            aux: other options of those parameters, see `AdamWOptions` (None).
            head: the output heads, which go to AdamW: a glob over module names or a list of them;
                None for no head; "auto" to find them by the methods of the model and by usual
                names, see `nucleon.optim.routing.heads` ("auto").
            overrides: routes, axes and options of single parameters, which precede all other rules
                (None): {glob over parameter names: override}, where the last match wins, key by
                key; or a function (name, module, parameter) → override, or None for no change. An
                override is a route, "matrix", "adamw" or "frozen" (left out), or a dict with any of
                "route", "axes" (see `nucleon.optim.matrices.axes`) and options, as
                {"axes": "(b=3 r) c", "lr": 0.01}.
            kwargs: options of the optimizer.
        """
        accepted = {"lr", *cls._option_defaults()} - {"route", "axes"}
        every = accepted | {*options.ModelOptions.__annotations__}
        options.check_names(f"{cls.__name__}.for_model", kwargs, every)
        parameters = routing.routed(
            model, aux=aux, head=head, overrides=overrides, matrix_options=accepted
        )
        param_groups = routing.groups(parameters, {"lr": lr}, {**(aux or {}), "lr": aux_lr})
        optimizer = cls(param_groups, lr=lr, **kwargs)
        optimizer._routed, optimizer._model = True, weakref.ref(model)
        optimizer._left_out = explanation.left_out(parameters)
        return optimizer

    def explain(self) -> Explanation:
        """Return a table of each parameter's route and the reason; it also exports to a dict."""
        return Explanation(self.name, (*explanation.rows(self), *self._left_out))

    def __repr__(self) -> str:
        """Return a line for each group; `explain` has the parameters."""
        lines = [
            f"  {group['route']}: {explanation.counted(len(group['params']), 'parameter')}, "
            f"lr={group['lr']}"
            for group in self.param_groups
        ]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])

    # ------------------------------------------------------------------ hooks of a subclass

    @abstractmethod
    def direction(self, total: Tensor, smoothing: Tensor, context: Context) -> Tensor:
        """Return P (b, m, n) from S (b, m, n) and Λ (b, m, m), m ≤ n, without host syncs.

        A weight with more rows than columns comes transposed: `context.stack.tall` says so.
        `of_potential` attaches a kernel, constants or a theorem to it.

        Args:
            total: S, in float32, or float64 for float64 parameters.
            smoothing: Λ, empty without a Gram.
            context: the options of the group, the `hyperparameters` derived from them, and seed,
                stream and step for noise.
        """

    def smoothing_scale(self, group: Mapping[str, Any], m: int, n: int) -> float:
        """Return the factor c = 1/η² in Λ = c(G²β₁⁻²I + M̂) for m×n matrices.

        Like `draws`, it is called when an option of the group has changed, not in every step.
        """
        return group.get("smoothing_scale", 1.0)

    def draws(self, group: Mapping[str, Any], m: int, n: int) -> Draws | None:
        """Return the noise in the direction of m×n matrices, m ≤ n, or None."""
        return None

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Check the options of the class itself; the shared ones are checked before."""

    # ------------------------------------------------------------------ parameters and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the options and parameters of a group, then add it with its state.

        The state of a frozen parameter is created with its first gradient. A group added to an
        optimizer of `for_model` needs a "route"; `nucleon.optim.param_groups(module)` returns
        such groups.
        """
        if self._routed and "route" not in param_group:
            raise ValueError(
                'a group added to an optimizer of for_model needs a route, as in {"params": '
                '[("extra.weight", parameter)], "route": "adamw"}, or "matrix"; '
                "nucleon.optim.param_groups(module) returns the groups of a module"
            )
        if self.param_groups:  # all matrices of a step share its random length
            param_group = {"seed": self.param_groups[0]["seed"], **param_group}
            if param_group["seed"] != self.param_groups[0]["seed"]:
                raise ValueError(
                    f"the groups have the seeds {self.param_groups[0]['seed']} and "
                    f"{param_group['seed']}; pass one seed to the constructor, and to no group"
                )
        group = options.filled(param_group, self.defaults, self.name)
        axes, reasons = (group.pop(fact, None) for fact in ("axes", "reasons"))
        self._check_group(group)
        super().add_param_group(group)
        try:
            infos = groups.infos(group, len(self.infos), axes, reasons, type(self).__name__)
            options.check_range([(info.name, param) for param, info in infos.items()], group)
            placement.check(group, infos)
        except Exception:
            self.param_groups.pop()
            raise
        self.infos |= infos
        self._agreed = False
        self.state.update(self._missing_states(group))
        if reason := certificates.unbounded(self, group):
            groups.warn(f"certify=True measures the regret beside no bound: {reason}")

    def _missing_states(self, group: dict[str, Any]) -> dict[Tensor, State]:
        """Return new states of parameters that lack one, or that were cast since it was created.

        Frozen parameters have none. Under "owner" every rank has an entry for every parameter.
        """
        states: dict[Tensor, State] = {}
        for param, owned in placement.kept(group, self.infos):
            present = self.state.get(param)
            if present is None and _may_have_gradient(param):
                states[param] = self._new_state(group, param, owned)
            elif present and not state.fits(present, param, group):
                template, name = self._new_state(group, param, owned), self.infos[param].name
                states[param] = state.loaded(name, param, present, template, group)
        return states

    def _new_state(self, group: Mapping[str, Any], param: Tensor, owned: bool) -> State:
        average = self._averaging.new_state(param, self.state)
        if group["route"] == "adamw":
            return state.new_adamw_state(param) | average
        # A late group starts at the step of the others, since all share the Exp(1) lengths.
        step = next((s["step"] for s in self.state.values() if "stream" in s), None)
        info, gram = self.infos[param], self.has_gram
        return (
            state.new_matrix_state(param, info, step, group, has_gram=gram, owned=owned) | average
        )

    def _check_group(self, group: dict[str, Any], params: Sequence[Tensor] = ()) -> None:
        options.check(group, self._option_defaults())
        if group["route"] == "matrix":
            self.check_options(group)
        options.check_range([(self.infos[p].name, p) for p in params], group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, see `nucleon.optim.checkpoints` and `consolidate`."""
        self._averaging.refuse("state_dict()")
        # It runs before the user's hooks, so that they see the state as it is saved.
        hook = self.register_state_dict_post_hook(state.pack, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same optimizer and shapes; raise on any other, before any change.

        Moments keep the dtype of a run of these parameters. torch would cast them to the dtype of
        the parameter, and so round the float32 moments of a bf16 parameter.
        """
        self._averaging.refuse("load_state_dict()")
        ours, states = self.param_groups, dict[Tensor, State]()

        # These hooks are outermost: `check` runs after the user's hooks, `restore` before them.
        def check(_: Optimizer, loading: dict[str, Any]) -> dict[str, Any]:
            aligned = state.aligned(loading, ours, self.infos, self.defaults["nucleon"])
            for saved, group in zip(aligned["param_groups"], ours, strict=True):
                self._check_group(saved, group["params"])
                owned_params = placement.kept(group, self.infos)
                for key, (param, owned) in zip(saved["params"], owned_params, strict=True):
                    if entries := aligned["state"].get(key):  # frozen parameters have none
                        template = self.state.get(param) or self._new_state(group, param, owned)
                        name = self.infos[param].name
                        states[param] = state.loaded(name, param, entries, template, saved)
            self._averaging.restart_missing(states, aligned["state"].values())
            return {**aligned, "state": {}}

        def restore(_: Optimizer) -> None:
            self.state.update(states)
            for old, group in zip(ours, self.param_groups, strict=True):
                group.update({name: old[name] for name in options.RUN})
                self.state.update(self._missing_states(group))  # of parameters frozen at saving

        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's entries, and the attributes that a copy needs."""
        copied = ("infos", "_averaging", "_routed", "_left_out")
        return super().__getstate__() | {name: getattr(self, name) for name in copied}

    # ------------------------------------------------------------------ the average

    def averaged(self) -> AbstractContextManager[None]:
        """Make the model its average W̄ inside a `with` block, in place.

        Leaving the block restores the weights exactly, also after an exception. Meanwhile they are
        stored in the memory of the average; half-precision weights in a copy of their own size.
        Inside the block `step`, `state_dict`, `load_state_dict` and a second `averaged` raise.
        Before the first step the model is its own average.

        With an optimizer of `for_model`, weights that FSDP2 has gathered are dropped on entry and
        exit; otherwise call `reshard()` of the modules that keep them.
        """
        return self._averaging.swapped(self.state, self._model())

    def averaged_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of `model.state_dict()` with W̄ for the parameters of this optimizer."""
        return self._averaging.state_dict(self.state, model)

    def restart_average(self) -> None:
        """Restart the average at the next step, for example after a change of data or rate."""
        self._averaging.restart(self.state)

    # ------------------------------------------------------------------ measurements

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """Return quantities of each matrix's update, as a flat dict; synchronizes once.

        Keys are "{optimizer}/{parameter}/{quantity}", with the name of the parameter, or its index
        if it has none, and "{parameter}.{matrix}" if it contains several matrices. The direction P
        is of the present state, S = Ĝ. If parameters or states are spread over ranks, every rank
        must call it, and each returns the whole dict.

        Quantities: `update_norm` ‖P‖_op, `smoothing_share` Tr Λ/Tr(ĜĜᵀ + Λ), `cosine_to_muon` of P
        and polar(Ĝ), `update_ratio` lr·scale·‖P‖_F/‖W‖_F with the present rate, `skipped` steps.
        """
        return diagnostics.collect(self, worklist.present(self), self._current_settings())

    @torch.no_grad()
    def certificates(self) -> dict[str, Certificate]:
        """Return the discounted regret of each parameter beside its bound, radius 1; synchronizes.

        Only parameters of groups with certify=True have a certificate, with one entry per matrix.
        With placement="owner" every rank must call it, and each returns all certificates.
        """
        return certificates.collect(self)

    # ------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo  # a compiled training loop calls the step untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return the loss of the closure, if any."""
        loss, averages = None, self._averaging.average is not None
        if averages:
            self._averaging.refuse("step()")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        settings = self._current_settings()
        worklist.check_inputs(self)
        if len(settings) > 1 and not self._warned:
            self._warned = groups.warn_of_equal_rates(self.param_groups, self.infos)
        current = self._current_worklist(settings)
        if current.sharded:
            wire.redistribute(current.sharded)
        for states in current.counted:
            torch._foreach_add_([*map(_STEP, states)], 1)
        try:
            for work in current.works:
                work.engine.step(work, settings[work.group_index])
        finally:
            if current.lanes.used:
                current.lanes.join()
        if averages:
            self._averaging.update(self.state, current)
        return loss

    def _current_settings(self) -> Sequence[Settings]:
        """Return the settings of each group, rebuilt and checked if an option has changed."""
        count = len(self.param_groups)
        last = self._settings if len(self._settings) == count else [None] * count
        current: list[Settings] = []
        for group, settings in zip(self.param_groups, last, strict=True):
            values = [*map(group.get, self._watched)]
            if (
                settings is None
                or settings.group is not group
                or not all(map(is_, values, settings.snapshot))
            ):
                self._check_group({**group, "lr": 0.0}, group["params"])  # lr may be on the device
                groups.check_certify(group, self.state)
                settings = Settings(self, group, values)
            current.append(settings)
        self._settings = current
        return current

    @cached_property
    def _watched(self) -> Sequence[str]:
        """Names of the options on which settings depend."""
        rates = options.RATES
        return [name for name in (*self.defaults, *options.ADAMW_DEFAULTS) if name not in rates]

    def _current_worklist(self, settings: Sequence[Settings]) -> Worklist:
        """Return the list of work for the present structure, nearly always that of the last step.

        It refers to the optimizer weakly, so that graphs and moments are freed with it.
        """
        current = self._worklist
        if (
            current is not None
            and self._structure == worklist.structure(self, settings)
            and not any(map(_may_have_gradient, current.stateless))
        ):
            return current
        added: dict[Tensor, State] = {}  # of parameters that were unfrozen or cast since
        for group in self.param_groups:
            added |= self._missing_states(group)
        self.state.update(added)  # after all of them, since a failing cast must change nothing
        current = worklist.build(weakref.proxy(self), settings)
        if not self._agreed and any(map(agreement.exchanges, self.param_groups)):
            names = [*self.defaults, *options.ADAMW_DEFAULTS]
            agreement.check_start(self.param_groups, self.infos, names)
            self._agreed = True
        # Assigned last, so that a step that raised raises again.
        self._structure, self._worklist = worklist.structure(self, settings), current
        return current


def _may_have_gradient(param: Tensor) -> bool:
    return param.requires_grad or param.grad is not None


_STEP = itemgetter("step")
