"""A watcher in small, for `test_launch.py`: starts its arguments armed; prints its folder, and last the rings as JSON.

Both go to stderr. Run as `python -I watcher.py COMMAND...`: it finds eroica in the checkout, the job has to by itself.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

# isort: split

from eroica import launch, ring


def main(command: list[str]) -> int:
    with launch.Workspace.create(os.environ) as workspace:
        environment = launch.environment_for(workspace.path, {}, base=os.environ)
        try:
            job = launch.start(command, environment=environment)
        except launch.NotStartedError as error:
            print(error, file=sys.stderr)
            return error.status
        print(workspace.path, job.pid, file=sys.stderr, flush=True)
        while (status := job.wait(1.0)) is None:
            pass
        seen = []
        for path in workspace.path.glob("*.ring"):
            flight = ring.read_flight(path)
            placed = [note["placed"] for note in flight.notes if "placed" in note][-1]
            words = flight.words
            seen.append(
                {
                    "rank": words[ring.RANK],
                    "of": words[ring.WORLD_SIZE],
                    "steps": words[ring.NUM_STEPS],
                    "by": placed,
                    "start": flight.identity.generation,
                    "ended": words[ring.STATE] == ring.ENDED,
                }
            )
        print(json.dumps(sorted(seen, key=lambda rank: (rank["start"], rank["rank"]))), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
