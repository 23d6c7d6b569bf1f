"""Named GPUs: public data-sheet numbers, and the fractions of them that are assumed to be reached.

Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (40 GB and 80 GB, SXM) and "H100 Tensor Core GPU" (80 GB, SXM).
Rates with sparsity are not used. NVLink and PCIe are given by NVIDIA for both directions together; here they are per
direction.

The fractions below were set before the first run and are not fitted to anything: round numbers at the cautious side of
what well-written kernels reach.
"""

from __future__ import annotations

from dataclasses import dataclass

BANDWIDTH_FRACTION = 0.8  # of HBM, NVLink and PCIe bandwidth
COMPUTE_FRACTION = 0.5  # of dense bf16 FLOP/s
STEP_OVERHEAD = 1e-3  # seconds for each step: planning, launching, sampling
ALL_REDUCE_LATENCY = 10e-6  # seconds for each all-reduce, whatever its size
COPY_LAUNCH = 10e-6  # seconds for each copy between host and device, whatever its size
MEMORY_FRACTION = 0.9  # of the memory is for weights and KV; the rest is for activations
# Attention reads K (or V) of a block and layer as one run of bytes. Each run costs as much time as this many bytes
# more: the look-up in the block table and a DRAM page that is opened for less than its size.
RUN_OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator. Bytes, bytes per second and FLOP per second, as on the data sheet.

    Attributes:
        hbm_bandwidth: memory bandwidth.
        flops: dense bf16 with fp32 accumulation.
        nvlink_bandwidth, pcie_bandwidth: one direction.
    """

    name: str
    memory: float
    hbm_bandwidth: float
    flops: float
    nvlink_bandwidth: float
    pcie_bandwidth: float


A100_40GB = GPU("A100-40GB", 40e9, 1.555e12, 312e12, 300e9, 32e9)
A100_80GB = GPU("A100-80GB", 80e9, 2.039e12, 312e12, 300e9, 32e9)
H100_80GB = GPU("H100-80GB", 80e9, 3.35e12, 989.4e12, 450e9, 64e9)
