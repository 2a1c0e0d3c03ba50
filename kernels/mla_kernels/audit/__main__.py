"""`python -m mla_kernels.audit`: does every kernel fit SM120? Compiles, needs no GPU."""

import argparse
import sys
from typing import Any

from mla_kernels.audit.listing import list_compilations
from mla_kernels.audit.record import CUDA_RECORD, RECORD, differences, read_record, write_record
from mla_kernels.audit.run import audit, source_of, summary, tools


def main(arguments: list[str] | None = None) -> int:
    """Run the command; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mla_kernels.audit", description=__doc__)
    parser.add_argument("--cuda", action="store_true", help="the CUDA kernels, not Triton's")
    parser.add_argument("--only", default="", help="audit those whose name holds this text")
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--write",
        action="store_true",
        help="bring the record up to date; what has not changed is not compiled again",
    )
    wanted.add_argument(
        "--check", action="store_true", help="fail if the record is not what comes out"
    )
    chosen = parser.parse_args(arguments)
    if chosen.write and chosen.only:
        parser.error("--write takes all kernels, so it cannot go with --only")
    if chosen.cuda:
        if chosen.only:
            parser.error("--cuda takes all kernels, so it cannot go with --only")
        return _cuda(write=chosen.write, check=chosen.check)
    compilations = [c for c in list_compilations() if chosen.only in c.name]
    if not compilations:
        parser.error(f"--only: no compilation's name holds {chosen.only!r}")
    if chosen.check and read_record()["tools"] != tools():
        print("Other tools than the record's: sources are compared, numbers are not.")
        now = {"tools": tools(), "compilations": {c.name: source_of(c) for c in compilations}}
    else:
        known = read_record() if chosen.write and RECORD.is_file() else None
        now = audit(
            compilations,
            known=known,
            progress=lambda name: print(f"{name} ...", file=sys.stderr),
        )
        print("\n".join(summary(now)))
    if chosen.write:
        write_record(now)
        return 0
    if chosen.check:
        return _compare(now, chosen.only)
    return 0


def _cuda(*, write: bool, check: bool) -> int:
    from mla_kernels.audit.cuda import audit_cuda

    now = audit_cuda(lambda name: print(f"{name} ...", file=sys.stderr))
    print("\n".join(summary(now)))
    if write:
        write_record(now, CUDA_RECORD)
    if not check:
        return 0
    then = read_record(CUDA_RECORD)
    lines = differences(now, then)
    if now["source_hash"] != then["source_hash"]:
        lines.append(f"the sources are {now['source_hash']}, the record has {then['source_hash']}")
    print("\n".join(lines) or f"{CUDA_RECORD.name} is up to date.")
    return 1 if lines else 0


def _compare(now: dict[str, Any], only: str) -> int:
    then = read_record()
    then["compilations"] = {n: e for n, e in then["compilations"].items() if only in n}
    lines = differences(now, then)
    print("\n".join(lines) or f"{RECORD.name} is up to date.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
