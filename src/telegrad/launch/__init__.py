"""Starts the workers of a job.

local     workers as processes of this host: what ``telegrad run`` does
process   one worker process
lines     its output, cut into lines
"""

from telegrad.launch.local import free_port, job_environment, run_workers, worker_environment

__all__ = ["free_port", "job_environment", "run_workers", "worker_environment"]
