"""Run by vLLM's own Python, in vLLM's process group, so that nothing of it outlives lowroll.

    python reaper.py ARGUMENTS OF vllm serve

When standard input, a pipe of lowroll's, closes, vLLM is terminated, and after `GRACE` seconds
killed. When its first process ends, so do the others. vLLM's environment has no lowroll: standard
library only.
"""

import os
import select
import signal
import subprocess
import sys

GRACE = 10.0
LOOK = 0.1  # seconds between two polls of vLLM


def main() -> None:
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *sys.argv[1:]]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while child.poll() is None:
        readable_files, _, _ = select.select([0], [], [], LOOK)
        if readable_files and not os.read(0, 1):
            child.terminate()
            try:
                child.wait(timeout=GRACE)
            except subprocess.TimeoutExpired:
                pass
            break
    print(f"vLLM has ended with status {child.poll()}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)  # this process too


if __name__ == "__main__":
    main()
