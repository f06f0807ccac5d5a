"""For tests of programs that use telegrad: many workers in one process, and faults that a test declares."""

from telegrad.testing.cluster import Cluster, cluster
from telegrad.testing.faults import Fault, FaultyCarrier

__all__ = ["Cluster", "Fault", "FaultyCarrier", "cluster"]
