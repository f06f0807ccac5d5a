"""Random distributed programs, and local autograd as their oracle.

``language`` (programs as data), ``operations`` (what they compute), ``generate`` (one from a seed), ``machine`` (runs
one), ``local`` (calls as plain calls, and what should happen), ``distributed`` (calls by telegrad), ``compare``,
``stage`` (workers in this process), ``shrink``, and ``python -m tests.random_programs --count 20000``.
"""
