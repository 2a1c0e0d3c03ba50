"""What is claimed of each device, and what stands behind it: a test that exists, or a receipt."""

from page_table import table
from receipts_page import FOLDER, receipt_files

# device, what it is for, kind of claim, the test behind it.
CLAIMS = (
    ("any CPU", "rungs in torch", "runs", "tests/attention/test_sparse.py"),
    ("any CPU", "Triton kernels in the interpreter", "computes right",
     "tests/kernels/test_triton_attention.py"),
    ("any CPU", "CUDA C++ built for the host", "computes right",
     "tests/kernels/test_cuda_emulation.py"),
    ("SM120", "Triton kernels: do they fit?", "compiled only", "tests/kernels/test_audit.py"),
    ("SM120", "CUDA kernels: do they fit?", "compiled only", "tests/kernels/test_cuda_compile.py"),
    ("SM120", "times", "predicted only", "tests/bench/test_roofline_kernels.py"),
    ("other NVIDIA, AMD, Intel and Apple GPUs", "everything", "untested", ""),
)  # fmt: skip


def claims(env) -> str:
    """A row a claim. A receipt is a claim by itself: it ran there."""
    from mla_ref.bench import read_receipt

    rows = [["device", "what", "claim, and what holds it"], ["---"] * 3]
    for path in receipt_files():
        receipt = read_receipt(path)
        passed = sum(kinds.get("passed", 0) for kinds in receipt.check.values())
        name = f"{receipt.machine.device} ({receipt.machine.sm})"
        claim = f"**ran**, {passed} conformance cases passed"
        where = f"`{path.relative_to(FOLDER.parents[1]).as_posix()}`"
        rows.append([name, f"{receipt.backend} kernels, with times", f"{claim}<br>{where}"])
    for device, what, claim, test in CLAIMS:
        rows.append([device, what, f"**{claim}**" + (f"<br>`{test}`" if test else "")])
    return table(rows)


FUNCTIONS = (claims,)
