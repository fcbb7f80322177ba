"""The real worker, no step of which takes less than STEP_SECONDS of its environment. Knows neither load nor model.

It computes what it always does and then waits for the rest of the time, so that its capacity is known, and a machine of
few cores has the rest to itself.
"""

import os
import sys
import time

from blockplane.data_plane import __main__ as entry
from blockplane.data_plane.runner import Runner
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.protos.process import run_process

STEP_SECONDS = float(os.environ["STEP_SECONDS"])


def paced_step(runner: Runner, plan: StepPlan) -> StepResult:
    ends = time.perf_counter() + STEP_SECONDS
    result = step(runner, plan)
    time.sleep(max(0.0, ends - time.perf_counter()))
    return result


step, Runner.step = Runner.step, paced_step  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(run_process("worker", "Loads the model and takes its time.", entry.serve))
