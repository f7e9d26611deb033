"""The kernels of a true-size round compile for GPUs that are not here, and fit their shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.kernels import needs_triton

PROGRAM = Path(__file__).parents[1] / "support" / "compile_round.py"
# bytes of shared memory that a block may take: least on 8.6 and 8.9 of what the kernels support
SHARED = {86: 99 << 10, 90: 227 << 10}
DENSE_ONLY, MOE_ONLY = (
    {"_swiglu_linear_kernel"},
    {"_moe_route_kernel", "_moe_experts_kernel", "_moe_combine_norm_kernel"},
)
EVERYWHERE = {
    "_accept_greedy_kernel", "_add_rms_norm_kernel", "_attention_combine_kernel", "_attention_partial_kernel",
    "_attention_store_kernel", "_embed_rms_norm_kernel", "_fix_length_kernel", "_gated_linear_kernel",
    "_gdn_commit_kernel", "_gdn_project_kernel", "_gdn_verify_kernel", "_head_argmax_kernel", "_head_draft_kernel",
    "_linear_kernel", "_select_length_kernel", "_select_ratio_kernel",
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("shape, capability", [("35b", 86), ("122b", 90), ("27b", 86)])
def test_rounds_compile_and_fit(shape, capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # compiled anew, whatever lies in the user's cache
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), shape, str(capability)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    names = {kernel["kernel"] for kernel in kernels}
    assert names >= EVERYWHERE | (DENSE_ONLY if shape == "27b" else MOE_ONLY)
    assert max(kernel["shared"] for kernel in kernels) <= SHARED[capability]
