"""The way of a call and of a backward through the code: the functions in the order in which they are entered, counted.

``python -m tests.walk`` (``make walk``) runs two worker processes, records one empty call, one call with a tensor in a
context, and one backward, and prints what each thread of both workers entered.  ``--write`` puts it into
``docs/design.md``; ``tests/test_walk.py`` holds the counts to ``bounds``.

    bounds      how many functions each of the three may enter: the table to edit when the code becomes shorter
    scenes      the three steps, and the functions that they call remotely
    recorder    a profile function for all threads of a process
    worker      one of the two processes; ``pair`` is the parent's side of both
    way         from the recorded events to a tree, and the typical one of several rounds
    show        the text, for the terminal and for the document

How it counts:

* Python functions of telegrad, each time that one is entered.  Those of torch and the standard library are one number
  beside it; functions of C and C++ are not counted.
* A comprehension is a part of the function that it stands in.  A generator counts when it begins, not when it resumes.
* A loop counts once: a function that is entered again from the same place of the same run of another.
* All that happens until both workers are quiet again counts, so the callee's way ends with its thread going back to
  sleep.  Both were quiet before, so it begins with a thread that wakes up.
* Each step is recorded in several rounds, and the way at the lower quartile of length is taken: whatever disturbs a
  round, such as a timer, makes it longer.
"""
