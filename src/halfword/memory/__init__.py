"""Memory by component: measured by storage, at its peak, planned by arithmetic, and traced."""

from halfword.memory.arithmetic import Shape, Sharding, plan
from halfword.memory.measured import Memory, measure
from halfword.memory.peak import Peak

__all__ = ["Memory", "Peak", "Shape", "Sharding", "measure", "plan"]
