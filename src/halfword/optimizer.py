"""The optimizer: parameter groups, states, the step, and loading, for every rule and format."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from halfword.accumulate import Accumulation
from halfword.backends import choose
from halfword.capture import Pending, decide_skip, norm_of, works_of
from halfword.clip import clip_coefficient
from halfword.diagnostics import Diagnostics
from halfword.groups import complete_group
from halfword.loading import warn_of_rounding
from halfword.member import Member
from halfword.members import Members, make_members, make_states, plan_load, report_exceptions
from halfword.memory import Memory, measure
from halfword.release import GLOBAL_CLIPPING, Release, check_release
from halfword.rules import Rule
from halfword.shards import part_of, wrap
from halfword.stored import adopt, decode_all, write_all


class Optimizer(torch.optim.Optimizer):
    """What all optimizers of halfword share; a subclass names its rule and its arguments.

    States exist from construction, under keys with one dtype and meaning each, which
    docs/optimizers.md lists: ``step``, each slot by its format (``exp_avg``, ``exp_avg_bf16``,
    ``exp_avg_code``), and the planes of the master weight (``remainder``, ``master_weight``).
    """

    process_group: "torch.distributed.ProcessGroup | None" = None
    """Ranks of other parameters, to count in clipping and finiteness; meshes do so anyway."""
    _skipped: bool | Tensor = False
    _clip_coefficient: float | Tensor = 1.0
    _accumulation: Accumulation | None = None
    _released: Release | None = None
    _diagnostics: Diagnostics | None = None

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the rule that a parameter group is updated by."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"state": Members.with_own_counters(state["state"])}

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step wrote nothing, a gradient not being finite; may have to wait."""
        return bool(self._skipped)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, and make their states.

        Raises:
            ValueError: a setting or a parameter that cannot be honoured; nothing is added then.
        """
        before = sum(len(group["params"]) for group in self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            policy = self.defaults["on_nonfinite"]
            complete_group(group, self.param_groups[:-1], self.rule(group), policy)
            members = list(make_members([group], self.rule, {}, before))
            states = make_states(members)
        except Exception:
            self.param_groups.pop()
            raise
        for member, state in zip(members, states, strict=True):
            self.state[member.parameter] = state
        report_exceptions(members)
        for handle in (self._accumulation, self._released):
            if handle is not None and not handle.closed:
                handle.watch(group["params"])

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss, as in ``torch.optim``.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            ValueError: a sparse gradient, or one that is not finite under ``on_nonfinite="raise"``;
                nothing is written then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            pending = self._pending()
            if release := self._release():
                for member, _ in pending:
                    release.update(member.parameter, is_fresh=True)
                return loss
            policy, group = self.defaults["on_nonfinite"], self.process_group
            self._skipped = decide_skip(policy, pending, self._kept_members, group)
            if isinstance(self._skipped, Tensor) or not self._skipped:
                self._update(pending, self._clip_coefficient)
        finally:
            self._clip_coefficient = 1.0
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those accumulated in FP32 and a pending clip coefficient included."""
        super().zero_grad(set_to_none)
        self._clip_coefficient = 1.0
        if self._accumulation is not None:
            self._accumulation.clear()
        if self._released is not None:
            self._released.total_norm()  # of a pass that was broken off

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Make the next step clip its gradients to a global 2-norm; no gradient is rewritten.

        Args:
            max_norm: the largest norm let through; ``inf`` only measures.

        Returns:
            The norm before clipping, 0-dim, float64, on the CPU; where all is ``capturable`` not.

        Raises:
            ValueError: gradients are released.
        """
        if self._release():
            raise ValueError(GLOBAL_CLIPPING)
        norm = norm_of(self._pending(), self.parameters(), self.process_group)
        self._clip_coefficient = clip_coefficient(norm, max_norm)
        return norm

    def accumulate_in_fp32(self) -> Accumulation:
        """Add up gradients of several backward passes in FP32 until ``zero_grad``.

        Returns a handle whose ``close()`` ends it. 4 bytes a parameter while gradients are held.
        """
        if self._accumulation is None or self._accumulation.closed:
            self._accumulation = Accumulation(self.parameters())
        return self._accumulation

    def release_gradients(self, max_norm: float | None = None) -> Release:
        """Update each parameter when its gradient arrives in the backward pass, and free that.

        ``step`` updates what is left. With several micro-batches, run all but the last inside the
        handle's ``hold()``. Checkpointing must be of the kind ``use_reentrant=False``.

        Args:
            max_norm: clips each parameter's gradient to this 2-norm; ``inf`` only measures.

        Returns:
            A handle whose ``close()`` ends it.

        Raises:
            ValueError: a policy or a pending clipping that decides over all gradients at once.
        """
        policy = self.defaults["on_nonfinite"]
        check_release(self._release(), policy, self._clip_coefficient, max_norm)
        self._released = Release(self.parameters(), self._update_one, max_norm)
        return self._released

    def diagnostics(self) -> Diagnostics:
        """Count stalled updates in every step until the returned handle, a context, is closed.

        Raises ValueError where another handle is open.
        """
        if self._diagnostics is not None:
            raise ValueError("diagnostics: is on already; close its handle first")
        self._diagnostics = Diagnostics(partial(setattr, self, "_diagnostics", None))
        return self._diagnostics

    def parameters(self) -> dict[Tensor, str]:
        """Return every parameter held, with the label that errors call it by."""
        return {member.parameter: member.label for member in self._members()}

    @torch.no_grad()
    def master_weight(self, parameter: Tensor) -> Tensor:
        """Return the master weight of a parameter, FP32, of its shape; ValueError: none held."""
        return wrap(decode_all(self._member(parameter).weight()), parameter)

    @torch.no_grad()
    def set_master_weight(self, parameter: Tensor, values: Tensor) -> None:
        """Write FP32 ``values`` into a parameter and its master weight.

        Raises:
            ValueError: this optimizer does not hold the parameter, or the shapes differ.
        """
        member = self._member(parameter)
        if values.shape != parameter.shape:
            raise ValueError(
                f"{member.label} has shape {tuple(parameter.shape)}, values {tuple(values.shape)}"
            )
        write_all(member.weight(), part_of(values, parameter), member.step)

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Make every master weight what its parameter shows, dropping remainders and copies."""
        members = self._members()
        members.ensure_states(self.state, list(members))
        for member in members:
            adopt(member.weight())

    def memory(self) -> Memory:
        """Return what parameters, gradients and states hold now, by component and plane."""
        entries = (member.entries(self._gradient(member)) for member in self._members())
        return measure(chain.from_iterable(entries), sum(p.numel() for p in self.parameters()))

    @_disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], convert: bool = False) -> None:
        """Restore states, hyper-parameters, seed and identities; formats stay this optimizer's.

        Load the model first: a remainder means nothing without the weight that it belongs to.
        States of the same format are copied bit for bit, others converted where the format here
        holds every value of the saved one. A state dict of its ``torch.optim`` namesake loads too.

        Args:
            state_dict: from ``state_dict()`` of this class or of its ``torch.optim`` namesake.
            convert: also convert where values must be rounded, with a warning that lists them.

        Raises:
            ValueError: groups or shapes that differ, a setting that cannot be honoured, or a
                conversion that would round; nothing is changed then.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        groups, members, plans = plan_load(
            self.param_groups, self.rule, self.state, state_dict, convert
        )
        for plan in plans:
            plan.write()
        for group, merged in zip(self.param_groups, groups, strict=True):
            group.update(merged)
        self.state.update((member.parameter, member.state) for member in members)
        self._clip_coefficient = 1.0
        warn_of_rounding(plans)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @cached_property
    def _kept_members(self) -> Members:
        return Members()

    def _members(self) -> Members:
        return self._kept_members.refreshed(self.param_groups, self.rule, self.state)

    def _member(self, parameter: Tensor) -> Member:
        members = self._members()
        member = members.find(parameter)
        members.ensure_states(self.state, [member])
        return member

    def _gradient(self, member: Member) -> Tensor | None:
        parameter = member.parameter
        buffers = self._accumulation.buffers if self._accumulation else None
        gradient = buffers.get(parameter, parameter.grad) if buffers else parameter.grad
        return None if gradient is None else member.usable(gradient)

    def _pending(self) -> list[tuple[Member, Tensor]]:
        """Return the members that have a gradient, with it."""
        found = [(member, self._gradient(member)) for member in self._members()]
        return [(member, gradient) for member, gradient in found if gradient is not None]

    def _update(self, pending: Pending, coefficient: float | Tensor) -> None:
        members = self._kept_members
        members.ensure_states(self.state, [member for member, _ in pending])
        for backend, works in works_of(members, pending, coefficient, self._skipped).items():
            if self._diagnostics is not None:
                self._diagnostics.watch(works)
            choose(backend)(works)

    def _release(self) -> Release | None:
        return None if self._released is None or self._released.closed else self._released

    @torch.no_grad()
    def _update_one(self, parameter: Tensor, release: Release, is_fresh: bool) -> None:
        """Update a parameter if it has a gradient, and free that."""
        if self._accumulation is not None and not self._accumulation.closed:
            self._accumulation.collect(parameter)
        members = self._kept_members if is_fresh else self._members()
        member = members.find(parameter)
        gradient = self._gradient(member)
        if gradient is not None:
            self._update([(member, gradient)], release.clip(gradient))
            parameter.grad = None
            if self._accumulation is not None:
                self._accumulation.buffers.pop(parameter, None)
