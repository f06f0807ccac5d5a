"""For tests of programs that use telegrad: many workers in one process, and faults that a test declares."""

from telegrad.testing.cluster import Cluster, cluster
from telegrad.testing.faults import Fault

__all__ = ["Cluster", "Fault", "cluster"]
