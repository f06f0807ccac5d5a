"""The benchmark: telegrad and ``torch.distributed`` side by side, in one run, next to what the machine can do.

    row         what a row is: a timed operation, how often it runs, and the speed-up it must reach
    library     the two libraries as namespaces with the same names
    rows/       one small file per row, written once and run unchanged on both libraries
    by_hand     the passes of the context rows without any library: sockets, torch and nothing else
    limits      the raw figures of the same run: a Unix-socket round trip, a memcpy, a pass by hand,
                ``torch.autograd.grad``
    measure     the timing loop; every reply is checked, outside the timed region
    results     the samples of a run: row, side, round
    protocol    the messages between the parent and its workers
    ablations   parts of telegrad's data plane, each with what switches it off
    worker      ``python -m bench.worker``: one caller or callee
    side        the parent's end of one caller and its callees; every wait has a timeout
    schedule    the interleaving of rows, sides and rounds
    stats       medians, percentiles, ratios
    verdict     the samples against the floors and goals
    machine     where it was measured
    units       figures as people read them
    table       the tables as strings
    terminal, markdown, picture, record     four ways to show or keep a verdict (``record`` is the JSON)
    compare     ``python -m bench.compare``: versions of telegrad against each other

A module imports only what stands above it.  Only ratios within one run mean anything: the machine's speed changes
from hour to hour, but it is the same for both libraries within one round.
"""
