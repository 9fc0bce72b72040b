"""`halfword plan`: what a run will hold, before it runs."""

from halfword.planning.command import plan

__all__ = ["plan"]
