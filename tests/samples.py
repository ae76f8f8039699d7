"""Diagnoses with their details as tests of reports need them: realistic numbers, any number of ranks, seeded.

Made by hand, not by `diagnose`: they show what a report must cope with, not what the rules would say.
"""

# ruff: noqa: E501 - sentences stand here as people will read them

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eroica.findings import (
    Consequence,
    Coverage,
    Detail,
    Diagnosis,
    Evidence,
    Finding,
    FunctionName,
    Impact,
    Iteration,
    PatternValues,
    Role,
    Verdict,
    Window,
)

Sample = tuple[Diagnosis, Detail]
CREATED = "2025-01-31T12:00:00Z"
NO_VALUES = PatternValues()

FUNCTIONS = (
    FunctionName("collective", "nccl:all_reduce"),
    FunctionName("kernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1"),
    FunctionName("kernel", "flash_fwd_kernel"),
    FunctionName("kernel", "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"),
    FunctionName("collective", "nccl:reduce_scatter_tensor"),
    FunctionName("collective", "nccl:all_gather_into_tensor"),
    FunctionName("host", "TokenDataset.__getitem__", "train/data.py:41", "train/data.py:41"),
    FunctionName("kernel", "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"),
    FunctionName("host", "zlib.decompress", None, "train/data.py:41", "TokenDataset.__getitem__"),
    FunctionName("host", "AdamW.step", "torch/optim/adamw.py:220", "train/loop.py:88"),
    FunctionName("copy", "Memcpy HtoD (Pinned -> Device)"),
    FunctionName("host", "cudaStreamSynchronize", None, "train/loop.py:91"),
    FunctionName("kernel", "multi_tensor_apply_kernel"),
    FunctionName("host", "gc.collect generation 2"),
    FunctionName("copy", "Memset (Device)"),
    FunctionName("host", "aten::linear", None, "train/model.py:57"),
)
_BETA = (0.0, 0.24, 0.11, 0.14, 0.0, 0.05, 0.006, 0.06, 0.003, 0.03, 0.012, 0.01, 0.04, 0.004, 0.003, 0.006)
_MU = (0.62, 0.83, 0.71, 0.66, 0.55, 0.58, 0.92, 0.44, 0.97, 0.88, 0.79, 0.06, 0.38, 0.95, 0.5, 0.9)


def _detail(num_ranks: int, iterations: int, gpus: int, seed: int, num_functions: int | None = None) -> Detail:
    """A healthy job; the faults below change its arrays."""
    rng = np.random.default_rng(seed)
    functions = list(FUNCTIONS)
    beta, mu = list(_BETA), list(_MU)
    for index in range(len(functions), num_functions or 0):
        functions.append(FunctionName("kernel", f"triton_poi_fused_add_mul_native_layer_norm_{index}"))
        beta.append(0.002 / index)
        mu.append(0.5)
    functions = functions[: num_functions or len(functions)]
    shape = (num_ranks, len(functions))
    betas = np.array(beta[: shape[1]]) * rng.normal(1, 0.02, shape)
    betas[:, 0] = 0.09 * rng.normal(1, 0.05, num_ranks)
    betas[betas < 1e-3] = np.nan
    steps = 0.118 * rng.normal(1, 0.008, (num_ranks, iterations))
    return Detail(
        ranks=np.arange(num_ranks, dtype=np.int32),
        hosts=tuple(f"gpu-node-{rank // gpus:02d}" for rank in range(num_ranks)),
        roles=("R0",) * num_ranks,
        functions=tuple(functions),
        beta=betas.astype(np.float32),
        mu=np.clip(np.array(mu[: shape[1]]) * rng.normal(1, 0.015, shape), 0, 1).astype(np.float32),
        own_s=np.median(steps, axis=1),
        wait_s=np.abs(rng.normal(0.004, 0.001, num_ranks)),
        transfer_s=0.011 * rng.normal(1, 0.01, num_ranks),
        idle_s=np.abs(rng.normal(0.003, 0.0005, num_ranks)),
        own_by_step_s=steps.astype(np.float32),
        first_step=100,
        groups=("all_reduce in all ranks (default_pg)", "reduce_scatter in 0-7 (mesh_fsdp)"),
        group_transfer_s=np.array([0.008, 0.003]),
        group_wait_s=np.array([0.004, 0.0004]),
        group_ranks=(f"0-{num_ranks - 1}", "0-7"),
    )


def _diagnosis(detail: Detail, observed_s: float, baseline_s: float | None = 0.134) -> Diagnosis:
    num_ranks = len(detail.ranks)
    placement: dict[str, list[int]] = {}
    for rank, host in zip(detail.ranks.tolist(), detail.hosts, strict=True):
        placement.setdefault(host, []).append(rank)
    return Diagnosis(
        job="llama-8b-pretrain",
        created=CREATED,
        kind="slow",
        window=Window("slowdown", "2025-01-31T11:59:40Z", "2025-01-31T11:59:45Z", 100, 20, 20 * observed_s),
        coverage=Coverage(num_ranks, num_ranks, "", "", 0.968, ("21,904 events read, 0 lost",)),
        iteration=Iteration(observed_s, baseline_s, observed_s / baseline_s if baseline_s else None),
        roles=(Role("R0", f"0-{num_ranks - 1}", "groups"),),
        hosts={host: f"{found[0]}-{found[-1]}" for host, found in placement.items()},
        verdict=Verdict("none", "none", "", (), "established", ""),
        findings=(),
        consequences=(),
        evidence={},
        environment={
            "torch": "2.13.0",
            "cuda": "12.8",
            "nccl": "2.27.3",
            "device": "NVIDIA H200",
            "omp_num_threads": 8,
        },
        producer={"name": "eroica", "version": "0.1.0"},
    )


def slow_input(num_ranks: int = 8, num_functions: int | None = None) -> Sample:
    """Rank 3 decodes its own batches for 121 ms of every iteration."""
    detail = _detail(num_ranks, 20, 8, 3, num_functions)
    beta, mu = detail.beta.copy(), detail.mu.copy()
    beta *= 0.53
    beta[:, 0] = 0.44 + (beta[:, 0] - 0.09) * 0.2
    beta[3, 0], beta[3, 6], beta[3, 8] = 0.016, 0.312, 0.118
    mu[3, 6], mu[3, 8] = 0.07, 0.99
    extra = np.zeros(num_ranks)
    extra[3] = 0.121
    own = detail.own_by_step_s + extra[:, None].astype(np.float32)
    others = detail.ranks != 3
    detail = replace(
        detail,
        beta=beta,
        mu=mu,
        own_by_step_s=own,
        own_s=np.median(own, axis=1),
        wait_s=detail.wait_s + np.where(others, 0.121, -0.003),
        group_wait_s=np.array([0.106, 0.002]),
    )
    waiting = "0-2" if num_ranks == 4 else f"0-2,4-{num_ranks - 1}"
    finding = Finding(
        id="F1", cause="input_pipeline", scope="rank", ranks="3", hosts=("gpu-node-00",), steps="stable",
        function=FUNCTIONS[6],
        pattern=PatternValues(0.312, 0.07, 0.04, "thread CPU time"),
        peers=PatternValues(0.003, 0.92, 0.03, "thread CPU time"),
        expected=PatternValues(0.01, None, None),
        distance=0.302, delta=47.8,
        impact=Impact(0.121, 0.4745, "ledger"),
        confidence="established",
        evidence=("E1", "E2", "E3"),
        ruled_out=("gpu_compute: kernels of rank 3 take as long as those of its peers", "gpu_throttle: clocks are alike"),
        advice="Raise num_workers of the DataLoader on rank 3, or move the decompression in train/data.py:41 out of the step.",
    )  # fmt: skip
    evidence = {
        "E1": Evidence("own time of rank 3 is 239 ms per iteration, its peers' median 118 ms", "ledger",
                       {"own_s": 0.239, "peers_s": 0.118, "steps_above": 20}),
        "E2": Evidence("TokenDataset.__getitem__ owns 31 % of rank 3's critical path and 0.3 % of its peers'", "pattern",
                       {"beta": 0.312, "peers_beta": 0.003}),
        "E3": Evidence("rank 3 arrives last at 20 of 20 all_reduce of default_pg", "ledger", {"last": 20, "of": 20}),
    }  # fmt: skip
    base = _diagnosis(detail, 0.255)
    return (
        replace(
            base,
            verdict=Verdict(
                "rank", "input_pipeline", "3", ("gpu-node-00",), "established",
                "rank 3 (gpu-node-00) loads its input too slowly: TokenDataset.__getitem__, train/data.py:41, costs 121 ms of 255 ms per iteration",
            ),
            findings=(finding,),
            consequences=(Consequence(waiting, "nccl:all_reduce", "wait 121 ms per iteration for rank 3 in all_reduce (default_pg)"),),
            evidence=evidence,
        ),
        detail,
    )  # fmt: skip


def throttled_gpu(num_ranks: int = 1024, victim: int = 5, num_functions: int | None = None) -> Sample:
    """The GPU of one rank runs at 61 % of its clock: every kernel of it is longer."""
    detail = _detail(num_ranks, 24, 8, 5, num_functions)
    beta, mu = detail.beta.copy(), detail.mu.copy()
    beta *= 0.72
    beta[:, 0] = 0.31 + (beta[:, 0] - 0.065) * 0.3
    kernels = np.array([f.kind == "kernel" for f in detail.functions])
    beta[victim, kernels] *= 1.5
    beta[victim, 0] = 0.012
    mu[victim, kernels] *= 0.62
    own = detail.own_by_step_s.copy()
    own[victim] *= 1.44
    own[:, 13] += np.float32(0.01)
    others = detail.ranks != victim
    detail = replace(
        detail,
        beta=beta,
        mu=mu,
        own_by_step_s=own,
        own_s=np.median(own, axis=1),
        wait_s=detail.wait_s + np.where(others, 0.0519, -0.003),
        group_wait_s=np.array([0.0518, 0.0065]),
    )
    host = f"gpu-node-{victim // 8:02d}"
    finding = Finding(
        id="F1", cause="gpu_throttle", scope="rank", ranks=str(victim), hosts=(host,), steps="stable",
        function=FUNCTIONS[1],
        pattern=PatternValues(0.26, 0.51, 0.02, "NVML SM clock"),
        peers=PatternValues(0.173, 0.83, 0.02, "NVML SM clock"),
        expected=NO_VALUES,
        distance=None, delta=18.4,
        impact=Impact(0.0519, 0.2785, "replay"),
        confidence="established",
        evidence=("E1", "E2"),
        ruled_out=("load_imbalance: launch grids are equal on all ranks",),
        advice=f"Check cooling and power limit of {host}/gpu{victim % 8} (nvidia-smi -q -d PERFORMANCE), or drain {host}.",
        device=f"{host}/gpu{victim % 8}",
    )  # fmt: skip
    evidence = {
        "E1": Evidence(f"7 of 7 kernels of rank {victim} take 1.5 times as long as its peers' at equal launch grids",
                       "pattern", {"ratio": 1.5, "kernels": 7}),
        "E2": Evidence(f"SM clock of {host}/gpu{victim % 8} is 1,210 MHz, its peers' 1,980 MHz; reason: hardware thermal slowdown",
                       "counters", {"sm_clock_mhz": 1210, "peers_sm_clock_mhz": 1980}),
    }  # fmt: skip
    rest = f"0-{victim - 1},{victim + 1}-{num_ranks - 1}"
    return (
        replace(
            _diagnosis(detail, 0.1863),
            verdict=Verdict(
                "rank", "gpu_throttle", str(victim), (host,), "established",
                f"rank {victim} ({host}/gpu{victim % 8}) runs at 61 % of its clock (thermal) and costs all {num_ranks:,} ranks 52 ms of 186 ms per iteration",
            ),
            findings=(finding,),
            consequences=(Consequence(rest, "nccl:all_reduce", f"wait 52 ms per iteration for rank {victim} in all_reduce (default_pg)"),),
            evidence=evidence,
        ),
        detail,
    )  # fmt: skip


def rotating_gc(num_ranks: int = 8) -> Sample:
    """A full garbage collection of 90 ms hits another rank in every step; mu is not measured."""
    detail = _detail(num_ranks, 40, 4, 7)
    rng = np.random.default_rng(11)
    own = detail.own_by_step_s.copy()
    hit = rng.integers(0, num_ranks, 40)
    own[hit, np.arange(40)] += np.float32(0.09)
    beta = detail.beta.copy()
    beta[:, 13] = 0.05 * rng.normal(1, 0.15, num_ranks)
    detail = replace(
        detail,
        beta=beta,
        mu=np.full_like(detail.mu, np.nan),
        own_by_step_s=own,
        own_s=np.median(own, axis=1),
        wait_s=detail.wait_s + 0.078,
        group_wait_s=np.array([0.077, 0.001]),
    )
    finding = Finding(
        id="F1", cause="host_gc", scope="rotating", ranks=f"0-{num_ranks - 1}", hosts=(), steps="rotating",
        function=FUNCTIONS[13],
        pattern=PatternValues(0.05), peers=NO_VALUES, expected=PatternValues(0.01),
        distance=0.04, delta=None,
        impact=Impact(0.079, 0.368, "ledger"),
        confidence="supported", evidence=("E1", "E2"), ruled_out=("a slow rank: medians over steps are alike within 2 %",),
        advice="Call gc.freeze() after set-up and collect at the same step on every rank (gc.disable(), gc.collect() every N steps).",
    )  # fmt: skip
    evidence = {
        "E1": Evidence(
            "in 40 of 40 steps one rank, another each time, is 90 ms above its own median", "ledger", {"steps": 40}
        ),
        "E2": Evidence("38 of 40 excesses lie inside of gc.collect generation 2", "trace", {"inside": 38, "of": 40}),
    }
    summary = "garbage collection hits another rank in every step and costs 79 ms of 215 ms per iteration; no rank is to blame"
    return (
        replace(
            _diagnosis(detail, 0.2147, None),
            verdict=Verdict("rotating", "host_gc", "", (), "supported", summary),
            findings=(finding,),
            consequences=(
                Consequence(f"0-{num_ranks - 1}", "nccl:all_reduce", "wait in turn for the rank that collects"),
            ),
            evidence=evidence,
        ),
        detail,
    )


def healthy(num_ranks: int = 8) -> Sample:
    """Nothing wrong; no counters, so mu is not measured for half of the functions."""
    detail = _detail(num_ranks, 20, 8, 1)
    mu = detail.mu.copy()
    mu[:, ::2] = np.nan
    base = _diagnosis(detail, 0.136)
    summary = f"nothing wrong in 20 iterations of {num_ranks} ranks; own times are alike within 2 %"
    return replace(base, kind="healthy", verdict=replace(base.verdict, summary=summary)), replace(detail, mu=mu)


def partial() -> Sample:
    """Two ranks of 128 sent their traces, one of them cut: a hypothesis is all that can be had."""
    diagnosis, detail = slow_input(8)
    keep = np.array([2, 3])
    detail = replace(
        detail,
        ranks=detail.ranks[keep],
        hosts=("", ""),
        roles=("R0", "R0"),
        beta=detail.beta[keep],
        mu=np.full((2, len(detail.functions)), np.nan, dtype=np.float32),
        own_s=detail.own_s[keep],
        wait_s=detail.wait_s[keep],
        transfer_s=np.full(2, np.nan),
        idle_s=detail.idle_s[keep],
        own_by_step_s=detail.own_by_step_s[keep],
        groups=(),
        group_transfer_s=np.zeros(0),
        group_wait_s=np.zeros(0),
        group_ranks=(),
    )
    finding = replace(diagnosis.findings[0], hosts=(), confidence="hypothesis", evidence=("E1",), impact=Impact())
    return (
        replace(
            diagnosis,
            job="job [with] {odd} | name",
            coverage=Coverage(
                128, 2, "0-1,4-127", "3", 0.71,
                ("rank 3: file cut at byte 1,048,576, 312 events lost", "default_pg: not joinable, 2 of 128 members"),
            ),
            hosts={},
            verdict=replace(diagnosis.verdict, hosts=(), confidence="hypothesis", summary=""),
            findings=(finding,),
            consequences=(),
            evidence={"E1": diagnosis.evidence["E1"]},
            iteration=Iteration(0.255, None, None),
        ),
        detail,
    )  # fmt: skip


def no_data() -> Diagnosis:
    """No trace could be read."""
    return Diagnosis(
        job="empty", created=CREATED, kind="no_data", window=Window(),
        coverage=Coverage(4, 0, "0-3", "", 0.0, ("rank0.json: empty file", "rank1.json.gz: not a gzip stream")),
        iteration=Iteration(), roles=(), hosts={}, verdict=Verdict("none", "unknown", "", (), "unknown", ""),
        findings=(), consequences=(), evidence={}, producer={"name": "eroica", "version": "0.1.0"},
    )  # fmt: skip


def hostile(text: str) -> Sample:
    """Slow input where every string that a job can choose is `text`."""
    diagnosis, detail = slow_input(4)
    name = FunctionName(text, text, text, text + "'", text)
    finding = replace(
        diagnosis.findings[0],
        hosts=(text,), function=name, ruled_out=(text,), advice=text, device=text, link=text,
        pattern=replace(diagnosis.findings[0].pattern, mu_source=text),
    )  # fmt: skip
    return (
        replace(
            diagnosis,
            job=text,
            coverage=replace(diagnosis.coverage, notes=(text,)),
            hosts={text: "0-3"},
            verdict=replace(diagnosis.verdict, summary=text, hosts=(text,)),
            findings=(finding,),
            consequences=(Consequence("0-2", text, text),),
            evidence={"E1": Evidence(text, text, {text: text}), "E2": Evidence(text, text), "E3": Evidence(text, text)},
            environment={text: text, "nested": {text: [text]}},
        ),
        replace(
            detail,
            hosts=(text,) * 4,
            roles=(text,) * 4,
            functions=(name,) * len(detail.functions),
            groups=(text,) * 2,
        ),
    )
