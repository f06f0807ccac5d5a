"""A worker under torchrun that fails once, as its arguments say, and else calls all others and leaves.

elastic.py <folder> <rank> before|after    rank <rank> fails once, before or after init_rpc
elastic.py <folder> alone                  the only worker fails once; started again, it waits to be joined
"""

import os
import signal
import sys
from pathlib import Path

from telegrad import rpc

if __name__ == "__main__":
    folder, failing, *when = sys.argv[1:]
    rank, world_size, restarts = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    failed = Path(folder, "failed")
    fails = not failed.exists() and failing in (str(rank), "alone")
    if fails and when != ["after"]:
        failed.touch()
        sys.exit("fails as asked")
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.RpcBackendOptions(init_timeout=25))
    if fails:
        failed.touch()
        os._exit(1)
    if world_size == 1:
        Path(folder, "alone").touch()
        signal.pause()  # until torchrun ends this attempt
    for other in range(world_size):
        assert rpc.rpc_sync(f"worker{other}", pow, args=(other, 2)) == other**2
    rpc.shutdown()
    print(f"worker{rank} of {world_size} after {restarts} restarts: all well", flush=True)
