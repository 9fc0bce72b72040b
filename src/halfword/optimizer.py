"""The optimizer: parameter groups, states, the step, and loading, for every rule and format."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from halfword import noise
from halfword.accumulate import Accumulation
from halfword.backends import Work, choose
from halfword.clip import clip_coefficient, is_finite, total_norm
from halfword.loading import merge_groups, warn_of_rounding
from halfword.member import Member
from halfword.memory import Memory, measure
from halfword.rules import Rule
from halfword.settings import check_group, check_supported, numbers
from halfword.stored import adopt, decode_all, write_all

logger = logging.getLogger(__name__)


class Optimizer(torch.optim.Optimizer):
    """What all optimizers of halfword share; a subclass names its rule and its arguments.

    States exist from construction, under keys with one dtype and meaning each: ``step`` (FP32
    scalar), each slot by its format (``exp_avg``, ``exp_avg_bf16``), and the planes of the master
    weight (``remainder`` int16, ``remainder8`` int8, ``master_weight`` FP32). They have the shape
    and strides of their parameter.

    Attributes:
        step_was_skipped: whether the last ``step`` wrote nothing since a gradient was not finite.
    """

    step_was_skipped: bool = False
    _clip_coefficient: float = 1.0
    _accumulation: Accumulation | None = None

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the rule that a parameter group is updated by."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, and make their states.

        Raises:
            ValueError: a setting or a parameter that cannot be honoured; nothing is added then.
        """
        before = sum(len(group["params"]) for group in self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._complete(group, before)
            members = list(self._members([group], before))
            states = [member.make_state() for member in members]
        except Exception:
            self.param_groups.pop()
            raise
        for member, state in zip(members, states, strict=True):
            self.state[member.parameter] = state
        if self._accumulation is not None and not self._accumulation.closed:
            self._accumulation.watch(group["params"])

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
            pending = list(self._pending())
            self.step_was_skipped = self._must_skip(pending)
            if not self.step_was_skipped:
                for backend, works in self._works(pending).items():
                    choose(backend)(works)
        finally:
            self._clip_coefficient = 1.0
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those accumulated in FP32 and a pending clip coefficient included."""
        super().zero_grad(set_to_none)
        self._clip_coefficient = 1.0
        if self._accumulation is not None:
            self._accumulation.clear()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Make the next step clip its gradients to a global 2-norm; no gradient is rewritten.

        Args:
            max_norm: the largest norm let through; ``inf`` only measures.

        Returns:
            The norm before clipping, a 0-dim float64 tensor on the CPU.
        """
        norm = total_norm(gradient for _, gradient in self._pending())
        self._clip_coefficient = clip_coefficient(norm, max_norm)
        return norm

    def accumulate_in_fp32(self) -> Accumulation:
        """Add up gradients of several backward passes in FP32 until ``zero_grad``.

        Returns:
            A handle whose ``close()`` ends it. 4 bytes a parameter while gradients are held.
        """
        if self._accumulation is None or self._accumulation.closed:
            self._accumulation = Accumulation(
                chain.from_iterable(group["params"] for group in self.param_groups)
            )
        return self._accumulation

    def parameters(self) -> dict[Tensor, str]:
        """Return every parameter held, with the label that errors call it by."""
        return {member.parameter: member.label for member in self._members()}

    def master_weight(self, parameter: Tensor) -> Tensor:
        """Return the master weight of a parameter, FP32, of its shape.

        Raises:
            ValueError: this optimizer does not hold the parameter.
        """
        return decode_all(self._member(parameter).weight())

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
        write_all(member.weight(member.step), values)

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Make every master weight what its parameter shows, dropping remainders and copies."""
        for member in self._members():
            self._ensure_state(member)
            adopt(member.weight())

    def memory(self) -> Memory:
        """Return what parameters, gradients and states hold now, by component and plane."""
        members = list(self._members())
        entries = (member.entries(self._gradient(member.parameter)) for member in members)
        count = sum(member.parameter.numel() for member in members)
        return measure(chain.from_iterable(entries), count)

    @_disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], convert: bool = False) -> None:
        """Restore states, hyper-parameters, seed and identities; formats stay this optimizer's.

        Load the model first: a remainder means nothing without the weight that it belongs to.
        States of the same format are copied bit for bit. Others are converted where the format here
        holds every value of the saved one (fp32 and split either way, split24 to split, BF16 to
        anything wider). The state dict of the ``torch.optim`` class of the same name loads too.

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
        groups = merge_groups(self.param_groups, state_dict["param_groups"])
        for group in groups:
            check_group(numbers(group), self.rule(group))
        members = list(self._members(groups))
        for member in members:
            if not member.state_fits():
                member.state = member.make_state()
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        plans = [
            plan
            for member, saved_id in zip(members, saved_ids, strict=True)
            for plan in member.plan_load(state_dict["state"].get(saved_id, {}), convert)
        ]
        for plan in plans:
            plan.write()
        for group, merged in zip(self.param_groups, groups, strict=True):
            group.update(merged)
        self.state.update((member.parameter, member.state) for member in members)
        self._clip_coefficient = 1.0
        warn_of_rounding(plans)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _complete(self, group: dict[str, Any], position: int) -> None:
        """Check a new group and give its parameters identities; the first has ``position``."""
        check_group(numbers(group), self.rule(group))
        if len(set(group["params"])) < len(group["params"]):
            raise ValueError("params: a parameter appears twice in one group; pass each once")
        policy = self.defaults["on_nonfinite"]
        if group["on_nonfinite"] != policy:
            raise ValueError(
                f"on_nonfinite={group['on_nonfinite']!r} in a group: a step is taken as a whole; "
                f"give it to the optimizer, which has {policy!r}"
            )
        if isinstance(group["lr"], Tensor):
            # Schedulers write into it: groups must not share one, nor round what is written.
            wide = group["lr"].dtype == torch.float64
            dtype = torch.float64 if wide else torch.float32
            group["lr"] = group["lr"].detach().to(dtype, copy=True)
        if "param_names" in group:
            earlier = chain.from_iterable(g["param_names"] for g in self.param_groups[:-1])
            group["identities"] = noise.identities_of_names(group["param_names"], earlier)
        else:
            positions = range(position, position + len(group["params"]))
            group["identities"] = [noise.identity_of_position(number) for number in positions]

    def _members(
        self, groups: list[dict[str, Any]] | None = None, position: int = 0
    ) -> Iterator[Member]:
        for group in self.param_groups if groups is None else groups:
            rule = self.rule(group)
            for index, parameter in enumerate(group["params"]):
                yield Member(group, index, position, rule, self.state.get(parameter, {}))
                position += 1

    def _member(self, parameter: Tensor) -> Member:
        for member in self._members():
            if member.parameter is parameter:
                self._ensure_state(member)
                return member
        raise ValueError(f"parameter of shape {tuple(parameter.shape)}: not in this optimizer")

    def _ensure_state(self, member: Member) -> None:
        member.ensure_state()
        self.state[member.parameter] = member.state

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        if self._accumulation is not None and parameter in self._accumulation.buffers:
            return self._accumulation.buffers[parameter]
        return parameter.grad

    def _pending(self) -> Iterator[tuple[Member, Tensor]]:
        for member in self._members():
            gradient = self._gradient(member.parameter)
            if gradient is not None:
                member.check_gradient(gradient)
                yield member, gradient

    def _must_skip(self, pending: list[tuple[Member, Tensor]]) -> bool:
        """Decide over all gradients, before anything is written, whether this step may write."""
        policy = self.defaults["on_nonfinite"]
        if policy == "propagate":
            return False
        found = next((member.label for member, grad in pending if not is_finite(grad)), None)
        if found is not None and policy == "raise":
            raise ValueError(
                f"{found} has a gradient that is not finite: lower lr, or use on_nonfinite='skip'"
            )
        if found is not None:
            logger.warning("step skipped: %s has a gradient that is not finite", found)
        return found is not None

    def _works(self, pending: list[tuple[Member, Tensor]]) -> dict[str, list[Work]]:
        """Count the step of each parameter and describe its update, by backend."""
        works: dict[str, list[Work]] = defaultdict(list)
        scalars: dict[tuple[int, int], tuple[float, ...]] = {}
        for member, gradient in pending:
            self._ensure_state(member)
            step = member.step + 1
            group = member.group
            if (id(group), step) not in scalars:
                check_supported(group)  # it may have been changed since construction
                scalars[id(group), step] = member.rule.scalars(numbers(group), step)
            scale = -self._clip_coefficient if group["maximize"] else self._clip_coefficient
            work = member.work(gradient, scale, scalars[id(group), step], step)
            works[group["backend"]].append(work)
        for member, _ in pending:
            member.state["step"] += 1
        return works
