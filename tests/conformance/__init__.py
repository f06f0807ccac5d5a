"""PyTorch's own tests of RPC and distributed autograd, unmodified, run against telegrad.

They are in the torch wheel.  ``python -m tests.conformance`` (``make conformance``) runs them; ``README.md`` tells what
the results mean.

    suites      which classes of torch are suites
    table       every test and its group (``tests.txt``), and which ones a run wants (``fast.txt``)
    exceptions  the tests that need not pass, each with its reason (``exceptions.toml``)
    library     puts telegrad in the place of torch's modules; ``seal`` breaks torch's own C++
    cases       torch's suites as test classes, in the process of a test and in its children
    worker      runs one test after the other, as the driver says
    driver      starts workers, gives them tests, ends those that hang
    compare     the same tests on torch and telegrad in turns, for their times
    verdict     what the results mean; ``report`` prints it

    names       writes the table of public names in ``docs/migration.md``
    tutorials   runs PyTorch's example programs on both libraries, and compares what they print
"""
