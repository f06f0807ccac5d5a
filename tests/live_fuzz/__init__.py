"""Mutated frames of real traffic, fed to a live worker.

``workers`` records what real workers send, ``capture`` makes them send one of everything, ``mutate`` changes it,
``victim`` is the process that must stand it, ``attacker`` feeds it, ``growth`` judges its figures, and ``minimize``
finds the input that broke it.  ``python -m tests.live_fuzz`` runs all of it.
"""
