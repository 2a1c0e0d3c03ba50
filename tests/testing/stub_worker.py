"""A worker without torch, that does by a case's name what code under test may do to a process."""

import json
import os
import sys
import time


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    if setup["target"] == "broken":
        print(json.dumps({"error": "no module named broken"}), flush=True)
        return
    if setup["target"] == "aborts":
        sys.stderr.write("a line\nlast words of the import\n")
        os.abort()
    print(json.dumps({"kinds": ["decode"]}), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        name = case["name"]
        if name == "heads-9":
            sys.stderr.write("first line\nan illegal address\n")
            sys.stderr.flush()
            os.abort()
        if name == "heads-12":
            time.sleep(600)
        answer = {"status": "passed", "seconds": 0.1, "reason": str(os.getpid())}
        if name == "heads-16":
            answer |= {"status": "crashed", "lost": True}
        print(json.dumps(answer), flush=True)
        if name == "heads-24":
            return


if __name__ == "__main__":
    main()
