"""Starts the workers of a job.

=============== ==========================================================================
``local``       runs workers as processes of this host: what ``telegrad run`` does
``environment`` the environment variables of these workers, and a free port
``process``     one worker process
``lines``       splits its output into lines
=============== ==========================================================================
"""

from telegrad.launch.environment import free_port, job_environment, worker_environment
from telegrad.launch.local import run_workers

__all__ = ["free_port", "job_environment", "run_workers", "worker_environment"]
